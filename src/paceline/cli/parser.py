"""The argument parser of all commands: our error form, suggestions, every wrong flag at once.

Knows how arguments are read, not which there are: ``flags`` makes those. Must not import torch.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

from paceline.check.report import Fault
from paceline.cli.argv import with_dashes, with_joined_keys
from paceline.cli.main import print_error
from paceline.cli.vllm_flags import absent
from paceline.engine_args import join_problems
from paceline.no_effect import closest
from paceline.server.settings import NO_EFFECT as SERVER_NO_EFFECT
from paceline.server.settings import ServerSettings

JSON = "JSON"  # the metavar of flags whose keys may be given one by one
_REFUSED = object()  # stands for a value that its flag cannot read
_OF_THE_SERVER = frozenset({*(f.name for f in fields(ServerSettings)), *SERVER_NO_EFFECT})


class Parser(argparse.ArgumentParser):
    """An argument parser that says everything that is wrong, in our form; it serves once."""

    def __init__(self, **options: Any) -> None:
        # Abbreviations would change meaning when a flag is added.
        super().__init__(allow_abbrev=False, **options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, with flags and positional arguments in any order. Exits with 2 on wrong usage."""
        namespace, faults = self.parse_all(argv)
        if faults:
            self.error(join_problems([str(fault) for fault in faults]))
        return namespace

    def parse_all(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[Fault]]:
        """What could be read, and a fault for each flag or value that could not.

        ``given`` leaves out the flags whose value could not be read.
        """
        argv, problems = with_joined_keys(with_dashes(argv), self._flags_with_keys())
        faults = [Fault.from_message(problem) for problem in problems]
        for action in self._actions:
            if callable(action.type):
                action.type = functools.partial(_read_value, action, action.type, faults)
        strays = {stray.place: stray.message for stray in self.stray_values(argv)}
        faults += map(Fault.from_message, strays.values())
        bare = self._flags_without_value(argv)
        faults += [Fault.from_message(f"`{argv[place]}` needs a value") for place in bare]
        wrong = {*strays, *bare}
        for place in strays:  # nobody knows what a flag with an opposite was to mean
            flag = self._option_string_actions.get(argv[place - 1])
            if "=" not in argv[place] and isinstance(flag, argparse.BooleanOptionalAction):
                wrong.add(place - 1)
        rest_of = [one for place, one in enumerate(argv) if place not in wrong]
        namespace, rest = self.parse_known_intermixed_args(rest_of)
        # What follows an unknown flag may be its value: it is not blamed as well.
        unknown = [one for one in rest if one.startswith("-")] or rest[:1]
        faults += [Fault.from_message(self.about_unknown(one)) for one in unknown]
        _drop_values_of(unknown, rest_of, getattr(namespace, "positional", []))
        return namespace, faults

    def about_unknown(self, argument: str) -> str:
        """What to say of an argument that no flag has taken."""
        flag, dot, keys = argument.partition("=")[0].partition(".")
        vllms = absent(flag)
        if vllms is not None:
            return f"vLLM's `{flag}` is not here: {vllms.why}. hint: {vllms.hint}"
        if flag.removeprefix("--no-").removeprefix("--").replace("-", "_") in _OF_THE_SERVER:
            return (
                f"`{flag}` is a flag of `paceline serve`. hint: leave it out; `paceline serve "
                "--dry-run` checks a server"
            )
        known = [option for action in self._actions for option in action.option_strings]
        if dot and flag in known:
            return f"`{flag}` has no keys such as `{keys}`. hint: give it a plain value"
        close = closest(flag, known)
        hint = f"did you mean `{close}`?" if close else f"`{self.prog} --help` shows all"
        return f"unknown argument `{flag}`. hint: {hint}"

    def _flags_with_keys(self) -> set[str]:
        """Those that take a JSON object."""
        actions = [action for action in self._actions if action.metavar == JSON]
        return {option for action in actions for option in action.option_strings}

    def _flags_without_value(self, argv: Sequence[str]) -> list[int]:
        """Where flags stand that need a value and have none: argparse would stop at the first."""
        end = argv.index("--") if "--" in argv else len(argv)
        return [
            place
            for place, argument in enumerate(argv[:end])
            if (action := self._option_string_actions.get(argument)) is not None
            and action.nargs in (None, "+")
            and (place + 1 == end or self._parse_optional(argv[place + 1]) is not None)
        ]

    def stray_values(self, argv: Sequence[str]) -> list[StrayValue]:
        """Every True and False behind a flag that takes no value."""
        switches = {
            option: action
            for action in self._actions
            if action.nargs == 0
            for option in action.option_strings
        }
        strays: list[StrayValue] = []
        for place, argument in enumerate(argv):
            flag, equals, value = argument.partition("=")
            word, index = value, place
            if not equals and place + 1 < len(argv):
                word, index = argv[place + 1], place + 1
            if flag in switches and word.lower() in ("true", "false"):
                strays.append(StrayValue(index, _about_stray(flag, switches[flag], word)))
        return strays

    def error(self, message: str) -> NoReturn:
        if " hint: " not in message:
            end = "" if message.endswith(("?", "!", ".")) else "."
            message += f"{end} hint: `{self.prog} --help` shows all arguments"
        print_error(message)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is not _REFUSED:
            super()._check_value(action, value)


def given(namespace: argparse.Namespace, group: str) -> dict[str, Any]:
    """The flags of one group ("engine", "sampling", "server") that were given, by argument name."""
    prefix = f"{group}."
    return {
        name.removeprefix(prefix): value
        for name, value in vars(namespace).items()
        if name.startswith(prefix) and not _is_refused(value)
    }


def _is_refused(value: object) -> bool:
    return value is _REFUSED or (isinstance(value, list) and _REFUSED in value)


def _read_value(
    action: argparse.Action, read: Callable[[str], Any], faults: list[Fault], text: str
) -> Any:
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        group, _, name = action.dest.partition(".")
        flag = action.option_strings[0] if action.option_strings else action.metavar
        hint = "correct it or leave it out"
        blamed = name if group == "engine" else ""
        faults.append(Fault.from_message(f"{flag}: {error}. hint: {hint}", argument=blamed))
        return _REFUSED


def _drop_values_of(unknown: Sequence[str], argv: Sequence[str], positional: list[str]) -> None:
    """Leave out what may be values of unknown flags, as long as something is left."""
    for flag, following in itertools.pairwise(argv):
        if flag in unknown and "=" not in flag and following in positional[:-1]:
            positional.remove(following)


class StrayValue(NamedTuple):
    """A value that belongs to no flag: where it stands among the arguments, and what to say."""

    place: int
    message: str


def _about_stray(flag: str, action: argparse.Action, word: str) -> str:
    hint = f"leave `{word}` out, or give it before the flag"
    if isinstance(action, argparse.BooleanOptionalAction):
        on, off = action.option_strings[0], action.option_strings[-1]
        hint = f"write `{on if word.lower() == 'true' else off}` alone"
        if flag == off:
            hint = f"write `{on}` or `{off}` alone"
    return f"`{flag}` takes no value, but `{word}` follows it. hint: {hint}"
