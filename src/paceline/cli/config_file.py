"""The file of ``--config``: flags by name, in YAML, JSON or TOML, as command line arguments.

Every fault of a setting is then said by the same parser, in the same words. Must not import torch.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.parser import JSON, Parser
from paceline.errors import ConfigError

_ONLY_HERE = ("--config", "--help")


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML, JSON or TOML file, by name.

    Raises:
        ConfigError: no such file, another format, or not an object of settings.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(
            f"{path} has none of the endings {', '.join(_READERS)}. hint: --config reads these "
            "formats"
        )
    try:
        content = read(path.read_text(encoding="utf-8-sig"))  # editors on Windows mark it
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. hint: --config takes a file of settings"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(
            f"{path} holds no settings by name. hint: one setting a line, such as port: 8080 "
            'in YAML, or {"port": 8080, "max_num_seqs": 64} in JSON'
        )
    return content


def _read_yaml(text: str) -> Any:
    import yaml  # only those who have such a file pay for it

    class Loader(yaml.SafeLoader):  # plain values alone: a tag can name any Python object
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _once(self.construct_object(key) for key, _ in node.value)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            # A key or a name may begin with 0; YAML 1.1 would make another number of it.
            is_octal = len(node.value) > 1 and node.value.isdigit() and node.value[0] == "0"
            return node.value if is_octal else super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{where}{problem or error}") from error


def _read_json(text: str) -> Any:
    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _once(name for name, _ in pairs)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=as_dict)


def _once(names: Iterable[Any]) -> None:
    """Raise ValueError for a name that is there twice: YAML and JSON would take the last."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"`{twice[0]}` is there twice")


_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_json,
    ".toml": tomllib.loads,
}


def as_arguments(
    parser: Parser, filed: Mapping[str, Any], argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Settings of a file as command line arguments, without those that ``argv`` has; problems."""
    here = {_without_keys(argument.partition("=")[0]) for argument in argv}
    actions = {option: action for action in parser._actions for option in action.option_strings}
    arguments: list[str] = []
    problems: list[str] = []
    names: dict[str, str] = {}
    for name, value in filed.items():
        flag = "--" + name.replace("_", "-")
        problem = _problem(name, value, actions.get(flag))
        if flag in _ONLY_HERE:
            problem = (
                f"a configuration file cannot have `{name}`. hint: give it on the command line"
            )
        elif flag in names:
            problem = f"`{name}` and `{names[flag]}` are one setting. hint: leave one out"
        names[flag] = name
        if problem is not None:
            problems.append(problem)
        elif value is not None and here.isdisjoint((_without_keys(flag), _opposite(flag))):
            arguments += _arguments(flag, value, actions)
    return arguments, problems


def _problem(name: str, value: Any, action: argparse.Action | None) -> str | None:
    """What is wrong with the kind of a value, which would be lost when it is written as text."""
    if action is None or action.nargs == 0 or action.metavar == JSON:
        return None
    if isinstance(value, list) and action.nargs is None:
        return f"`{name}` is a list in the configuration file. hint: give one value"
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, bool):
            return (
                f"`{name}` is {str(one).lower()} in the configuration file, but it takes a "
                "text or a number. hint: YAML takes on, off, yes and no for true and false; put "
                'them in quotes, such as "on"'
            )
        if isinstance(one, dict | list) or (one is None and isinstance(value, list)):
            return (
                f"`{name}` is {json.dumps(value, default=str)} in the configuration file, but it "
                "takes texts or numbers. hint: put a text in quotes"
            )
    return None


def _arguments(flag: str, value: Any, actions: Mapping[str, argparse.Action]) -> list[str]:
    """One setting: several arguments where a list was given."""
    action = actions.get(flag)
    if _without_keys(flag) not in actions:
        return [flag]  # for the parser to refuse
    if isinstance(value, bool) and action is not None and action.nargs == 0:
        named = flag if value else _opposite(flag)
        return [named] if named in actions else []  # without an opposite, off is the default
    several = isinstance(value, list) and action is not None and action.metavar != JSON
    values = value if several else [value]
    return [f"{flag}={one if isinstance(one, str) else _text(one)}" for one in values]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _opposite(flag: str) -> str:
    return "--no-" + flag[2:]


def _without_keys(flag: str) -> str:
    """``--speculative-config`` of ``--speculative-config.method``."""
    return flag.partition(".")[0]
