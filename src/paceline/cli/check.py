"""``paceline check``: the dry run. Loads nothing, so it must not import torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from paceline.check import run_checks
from paceline.check.report import CheckReport, Fault, Setting
from paceline.cli.flags import add_engine_flags
from paceline.cli.parser import Parser, given
from paceline.cli.spelling import with_flags
from paceline.engine_args import EngineArgs


def run(argv: Sequence[str]) -> int:
    """Print what the check found. Returns 0 if an engine would start, else 1.

    Unknown flags, and values that a flag cannot read, are faults like all others.
    """
    parser = Parser(
        prog="paceline check",
        usage="paceline check MODEL [--json] [flags]",
        description="Find every fault of a configuration and show the memory plan.",
    )
    parser.add_argument("positional", nargs="*", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    namespace, faults = parser.parse_all(argv)
    engine = given(namespace, "engine")
    if "model" not in engine and namespace.positional:
        engine["model"] = namespace.positional.pop(0)
    if "model" not in engine:
        parser.error("no model. hint: `paceline check MODEL`")
    # Behind an unknown flag nobody can tell a value from a second model.
    if namespace.positional and not any(fault.argument == "" for fault in faults):
        parser.error(f"one model at a time; what is `{namespace.positional[0]}`?")
    return print_report(engine, as_json=namespace.json, known=faults)


def print_report(
    engine: dict[str, Any],
    *,
    as_json: bool,
    known: Sequence[Fault] = (),
    settings: Sequence[Setting] = (),
    warnings: Sequence[str] = (),
) -> int:
    """Check the engine arguments and print the report. Returns the exit status.

    known: faults found before, which come first. settings, warnings: of what is beside the engine.
    """
    args, problems = EngineArgs.read(**engine)
    report = run_checks(args, [*known, *map(Fault.from_message, problems)])
    report.settings += settings
    report.warnings += warnings
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
