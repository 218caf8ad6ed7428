"""``paceline check``: the dry run. Loads nothing, so it must not import torch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from paceline.check import run_checks
from paceline.check.report import CheckReport, Fault
from paceline.cli.flags import Parser, add_engine_flags, given
from paceline.cli.spelling import with_flags
from paceline.engine_args import EngineArgs

_REFUSED = object()  # stands for a value that its flag cannot read


def run(argv: Sequence[str]) -> int:
    """Print what the check found. Returns 0 if an engine would start, else 1.

    Unknown flags, and values that a flag cannot read, are faults like all others.
    """
    parser = _Parser(
        prog="paceline check",
        usage="paceline check MODEL [--json] [flags]",
        description="Find every fault of a configuration and show the memory plan.",
    )
    parser.add_argument("positional", nargs="*", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    namespace, faults = parser.parse_all(argv)
    engine = {name: one for name, one in given(namespace, "engine").items() if one is not _REFUSED}
    if "model" not in engine and namespace.positional:
        engine["model"] = namespace.positional.pop(0)
    if "model" not in engine:
        parser.error("no model. hint: `paceline check MODEL`")
    # Behind an unknown flag nobody can tell a value from a second model.
    if namespace.positional and not any(fault.argument == "" for fault in faults):
        parser.error(f"one model at a time; what is `{namespace.positional[0]}`?")
    return print_report(engine, as_json=namespace.json, known=faults)


def print_report(engine: dict[str, Any], *, as_json: bool, known: Sequence[Fault] = ()) -> int:
    """Check the engine arguments and print the report. Returns the exit status.

    known: faults found before, which come first.
    """
    args, problems = EngineArgs.read(**engine)
    report = run_checks(args, [*known, *map(Fault.from_message, problems)])
    _spell_as_flags(report)
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        print(report.to_text())
    return 0 if report.ok else 1


def _spell_as_flags(report: CheckReport) -> None:
    report.faults = [
        dataclasses.replace(fault, hint=with_flags(fault.hint)) for fault in report.faults
    ]


class _Parser(Parser):
    """Goes on behind a wrong flag, so that all of them are found in one go."""

    def parse_all(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[Fault]]:
        """What could be read, with ``_REFUSED`` where a value could not, and the faults."""
        faults: list[Fault] = []
        for action in self._actions:
            if callable(action.type):
                action.type = functools.partial(_read_value, action, action.type, faults)
        strays = {stray.place: stray.message for stray in self.stray_values(argv)}
        faults += map(Fault.from_message, strays.values())
        rest_of = [one for place, one in enumerate(argv) if place not in strays]
        namespace, rest = self.parse_known_intermixed_args(rest_of)
        unknown = [flag for flag in rest if flag.startswith("-")]
        faults += [Fault.from_message(self.about_unknown(flag)) for flag in unknown]
        return namespace, faults


def _read_value(
    action: argparse.Action, read: Callable[[str], Any], faults: list[Fault], text: str
) -> Any:
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        name = action.dest.partition(".")[2]
        cause = f"{action.option_strings[0]}: {error}"
        hint = "correct it or leave it out"
        faults.append(Fault.from_message(f"{cause}. hint: {hint}", argument=name))
        return _REFUSED
