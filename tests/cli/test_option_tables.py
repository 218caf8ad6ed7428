"""The tables of options in docs/bench.md and docs/synth.md say what the parsers say."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from paceline.cli import bench, synth
from paceline.synth.pair import DEFAULT_ACCEPTANCE

DOCS = Path(__file__).resolve().parents[2] / "docs"
PARSERS = {"bench": bench._parser, "synth": synth._parser}


def own_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those that only this command has."""
    return [
        action
        for action in parser._actions
        if action.option_strings
        and action.help != argparse.SUPPRESS
        and action.dest != "help"
        and not action.dest.startswith(("engine.", "sampling."))
    ]


def row_of(action: argparse.Action) -> str:
    """The option's line in the table, made of its flag, metavar, default and help text."""
    flag = action.option_strings[0]
    if action.choices:
        flag += f" {{{','.join(map(str, action.choices))}}}"
    elif action.metavar:
        flag += f" {action.metavar}"
    elif action.nargs != 0:
        flag += f" {action.dest.upper()}"
    text = (action.help or "") % {"default": action.default}
    meaning, _, default = text.removesuffix(")").partition(" (default: ")
    return f"| `{flag}` | {'required' if action.required else default} | {meaning} |"


@pytest.mark.parametrize("command", PARSERS)
def test_the_table_of_options_is_current(command: str) -> None:
    text = (DOCS / f"{command}.md").read_text(encoding="utf-8")
    written = re.findall(r"^\| `--.*$", text, re.MULTILINE)
    due = [row_of(action) for action in own_options(PARSERS[command]())]
    assert written == due, "the table should be:\n" + "\n".join(due)


@pytest.mark.parametrize("command", PARSERS)
def test_help_texts_say_the_default(command: str) -> None:
    for action in own_options(PARSERS[command]()):
        if action.default not in (None, [], False):
            assert f"(default: {action.default})" in (action.help or "") % {
                "default": action.default
            }


def test_the_default_acceptance_is_the_one_of_the_plan() -> None:
    (option,) = (a for a in own_options(synth._parser()) if a.dest == "acceptance")
    assert (option.help or "").endswith(f"(default: {DEFAULT_ACCEPTANCE})")
