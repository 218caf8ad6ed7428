"""What ``--chat-template`` names, found and compiled before anything heavy is loaded.

A file, the text of a template, or the name of one of the model's. Must not know HTTP, and must not
import what the extra ``serve`` brings: the dry run uses it too.
"""

from __future__ import annotations

from pathlib import Path

from paceline.engine.chat import ChatTemplates, is_template, template_mistake
from paceline.errors import ConfigError

_SUFFIXES = frozenset({".jinja", ".jinja2", ".j2", ".txt", ".json"})
_WAY_OUT = "correct it, or leave `--chat-template` out for the model's own"


def read_template(given: str | None) -> str | None:
    """The template's text where a file was given; a name or a text as it is.

    Raises:
        ConfigError: a file that is not there or cannot be read, or text that is no Jinja template.
    """
    if given is None:
        return None
    if not given.strip():
        raise ConfigError(
            "`--chat-template` is empty. hint: leave it out for the model's own template"
        )
    if is_template(given):
        return _checked(given, "`--chat-template`")
    path = Path(given).expanduser()
    if not path.is_file():
        if path.is_dir() or _looks_like_file(given):
            raise ConfigError(
                f"`--chat-template {given}`: {_no_file(path)}. hint: give a file that holds a "
                "Jinja template"
            )
        return given  # the name of one of the model's: `check_named` knows those
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the chat template {given} cannot be read: {error}. hint: give a text file in UTF-8 "
            "that holds a Jinja template"
        ) from error
    if not is_template(text):
        raise ConfigError(
            f"the chat template {given} holds no Jinja: neither {{{{ nor {{% is in it. hint: "
            f"{_WAY_OUT}"
        )
    return _checked(text, f"the chat template {given}")


def check_named(template: str | None, templates: ChatTemplates) -> None:
    """Raise ConfigError unless a name is that of one of the model's templates, and it compiles.

    template: as ``read_template`` returned it.
    """
    if template is None or is_template(template):
        return
    if template not in templates.templates:
        names = ", ".join(sorted(templates.templates)) or "none"
        raise ConfigError(
            f"`--chat-template {template}`: {_no_file(Path(template))}, and the model has no chat "
            f"template of that name (it has: {names}). hint: give a file that holds a Jinja "
            "template, or one of these names"
        )
    _checked(templates.templates[template], f"the model's chat template `{template}`")


def _looks_like_file(given: str) -> bool:
    return given.startswith(("~", ".")) or "/" in given or Path(given).suffix in _SUFFIXES


def _no_file(path: Path) -> str:
    if path.is_dir():
        return "this is a directory"
    return "there is no such file" + ("" if path.is_absolute() else f" in {Path.cwd()}")


def _checked(source: str, what: str) -> str:
    mistake = template_mistake(source)
    if mistake is not None:
        raise ConfigError(f"{what} has a mistake {mistake}. hint: {_WAY_OUT}")
    return source
