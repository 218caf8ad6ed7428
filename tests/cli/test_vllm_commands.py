"""vLLM's commands are answered with what does their work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.bench import _parser as bench_parser
from paceline.cli.generate import _parser as generate_parser
from paceline.cli.vllm_commands import ABSENT, about_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ABSENT)
@pytest.mark.parametrize("more", [[], ["--model", "m", "--unknown"]], ids=["alone", "flags"])
def test_a_command_that_only_vllm_has(
    name: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*name.split(), *more]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"paceline: error: vLLM's `{name}` is not here: ")
    assert message.count("\n") == 2


def test_what_the_hints_name_is_there() -> None:
    hints = " ".join(hint for _, hint in ABSENT.values())
    parsers = (bench_parser(), generate_parser())
    flags = {option for parser in parsers for a in parser._actions for option in a.option_strings}
    assert set(re.findall(r"--[\w-]+", hints)) - {"--streams"} <= flags
    assert set(re.findall(r"`paceline (\w+)", hints)) <= set(main.COMMANDS)
    for example in re.findall(r"(?:examples|benchmarks)/\S+\.\w+", hints):
        assert (ROOT / example).is_file()


def test_a_directory_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert about_command(["bench", "serve"]) is not None
    (tmp_path / "serve").mkdir()
    assert about_command(["bench", "serve"]) is None


@pytest.mark.parametrize("argv", [["bench"], ["bench", "m"], ["serve", "m"], ["chats"], ["check"]])
def test_other_commands_are_none_of_its_business(argv: list[str]) -> None:
    assert about_command(argv) is None
