"""Prompts of ``paceline generate`` and ``bench``: from arguments, a file or standard input.

A file has one prompt a line, or is JSON lines: objects with ``prompt`` (a text),
``prompt_token_ids`` or ``messages`` (a chat). Sampling parameters beside it hold for that line;
other keys are ignored, unless they look like a misspelt one.
Must not know the engine.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paceline import hub
from paceline.errors import RequestError
from paceline.sampling_params import NO_EFFECT, SamplingParams

# key of a JSON line -> field of PromptItem, type, the type in words
_KINDS: dict[str, tuple[str, type, str]] = {
    "prompt": ("text", str, "a string"),
    "prompt_token_ids": ("token_ids", list, "a list of ids"),
    "messages": ("messages", list, "a list of messages"),
}
_SAMPLING = frozenset((*(f.name for f in fields(SamplingParams)), *NO_EFFECT))


@dataclass(frozen=True)
class PromptItem:
    """One prompt. Exactly one of text, token_ids and messages is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # given beside it
    source: str = ""  # file and line, for messages; empty for an argument

    def as_chat(self) -> PromptItem:
        """A text as one user message; others as they are."""
        if self.text is None:
            return self
        message = {"role": "user", "content": self.text}
        return replace(self, text=None, messages=[message])

    def sampling_with(self, common: Mapping[str, Any]) -> SamplingParams:
        """Common sampling parameters and its own, which win.

        Raises:
            RequestError: a wrong value; with file and line.
        """
        with self.located():
            return SamplingParams(**{**common, **self.sampling})

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Put file and line before what is wrong with it."""
        try:
            yield
        except RequestError as error:
            if not self.source:
                raise
            raise RequestError(f"{self.source}: {error}") from error


def chat_warning(model: object, items: Sequence[PromptItem]) -> str | None:
    """What to say if these prompts hold a chat and the model has learnt no conversations."""
    if not hub.is_shipped(str(model)) or all(item.messages is None for item in items):
        return None
    return (
        f"`{model}` completes Python code and has learnt no conversations, so its answers to chat "
        "messages make no sense. hint: give it the beginning of a file without --chat, or take an "
        "instruction tuned model"
    )


def read_prompts(
    lines: Iterable[str], source: str, *, json_lines: bool | None = None
) -> list[PromptItem]:
    """Prompts of a file; blank lines are skipped.

    source: its name in messages. json_lines: which of the two forms it has; None: the first line
    tells.

    Raises:
        RequestError: it is not UTF-8, or a JSON line is malformed, with its number.
    """
    try:
        numbered = [(n, line.rstrip("\r\n")) for n, line in enumerate(lines, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} cannot be read as text: {error}") from error
    if json_lines is None:
        json_lines = bool(numbered) and _is_json_lines(numbered[0][1])
    if not json_lines:
        return [PromptItem(text=line, source=_place(source, n)) for n, line in numbered]
    return [_parse(line, _place(source, number)) for number, line in numbered]


def read_prompt_file(path: Path) -> list[PromptItem]:
    """``read_prompts`` on a UTF-8 file.

    Raises:
        RequestError: also if it cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        cause = error.strerror or error
        raise RequestError(
            f"the prompt file `{path}` cannot be read: {cause}. hint: give a file of prompts, one "
            "a line or as JSON lines"
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RequestError(
            f"{_place(str(path), line)}: not UTF-8, as byte {content[error.start]:#04x} shows. "
            "hint: save the file as UTF-8"
        ) from error
    named_so = path.suffix.lower() == ".jsonl"
    lines = io.StringIO(text, newline=None)  # all three kinds of line ends
    return read_prompts(lines, str(path), json_lines=True if named_so else None)


def _place(source: str, line: int) -> str:
    return f"{source}, line {line}"


def _is_json_lines(line: str) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and any(kind in value for kind in _KINDS)


def _parse(line: str, where: str) -> PromptItem:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(f"{where} is not valid JSON: it is nested too deeply") from error
    kinds = [kind for kind in _KINDS if isinstance(value, dict) and kind in value]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else "none"
        raise RequestError(f"{where} must have one of {', '.join(_KINDS)}, found {found}")
    kind = kinds[0]
    field_name, due, name_of_due = _KINDS[kind]
    if not isinstance(value[kind], due):
        raise RequestError(f"{where}: `{kind}` must be {name_of_due}, got {value[kind]!r}")
    for name in value:
        if name != kind and name not in _SAMPLING:
            close = difflib.get_close_matches(name, _SAMPLING, n=1, cutoff=0.75)
            if close:
                raise RequestError(
                    f"{where}: `{name}` is no sampling parameter. hint: did you mean `{close[0]}`?"
                )
    sampling = {name: value[name] for name in value if name in _SAMPLING}
    return PromptItem(**{field_name: value[kind]}, sampling=sampling, source=where)
