"""``paceline check``: the dry run. Loads nothing, so it must not import torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.check import run_checks
from paceline.cli.flags import Parser, add_engine_flags, given
from paceline.engine_args import EngineArgs


def run(argv: Sequence[str]) -> int:
    """Print what the check found. Returns 0 if an engine would start, else 1."""
    parser = Parser(
        prog="paceline check",
        usage="paceline check MODEL [--json] [flags]",
        description="Find every fault of a configuration and show the memory plan.",
    )
    parser.add_argument("positional", nargs="*", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    namespace = parser.parse(argv)
    engine = given(namespace, "engine")
    if "model" not in engine and namespace.positional:
        engine["model"] = namespace.positional.pop(0)
    if namespace.positional:
        parser.error(f"one model at a time; what is `{namespace.positional[0]}`?")
    return print_report(engine, as_json=namespace.json)


def print_report(engine: dict[str, Any], *, as_json: bool) -> int:
    """Check the engine arguments and print the report. Returns the exit status."""
    report = run_checks(EngineArgs.from_kwargs(**engine))
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        print(report.to_text())
    return 0 if report.ok else 1
