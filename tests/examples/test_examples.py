"""The examples and README's main job run, on the tiny model."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

import paceline

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Directories of a target and a drafter."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_model(folder / "target")
    drafter = write_tiny_model(folder / "drafter", perturb=0.03, vocab_padding=24)
    return str(target), str(drafter)


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_quickstart(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example(monkeypatch, "quickstart.py", models[0])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("'The capital of France is' -> '")


def test_speculation(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example(monkeypatch, "speculation.py", *models)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the same tokens"
    seconds, ratios, rates = [], [], []
    for line in lines[:3]:
        found = re.search(r"([\d.]+) s, ([\d.]+) times as fast(?:, acceptance (\d+)%)?$", line)
        assert found is not None
        seconds.append(float(found[1]))
        ratios.append(float(found[2]))
        rates.append(found[3])
    assert ratios[0] == 1.0
    assert ratios[1] == pytest.approx(seconds[0] / seconds[1], rel=0.2)
    assert rates[0] is None
    assert 30 < int(rates[1]) < 100


def test_chat(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n  \nand again\n"))
    run_example(monkeypatch, "chat.py", models[0])
    captured = capsys.readouterr()
    assert captured.out.count("\n> ") == 2  # empty lines are no turns
    assert "INFO" not in captured.err


def test_a_chat_longer_than_the_context_begins_anew(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 5000 + "\nhello\n"))
    run_example(monkeypatch, "chat.py", models[0])
    said = capsys.readouterr().out
    assert said.count("[what was said so far is forgotten]") == 1
    assert "max_model_len" in said
    assert said.count("\n> ") == 2


def test_every_example_is_short_and_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    here = {"chat.py", "quickstart.py", "speculation.py", "tiny_model.py"}
    served = {"json_schema.py", "openai_chat.py", "openai_stream.py", "tools.py"}
    assert names == here | served  # the latter in test_server_examples.py
    for name in names - {"tiny_model.py"}:
        assert len((EXAMPLES / name).read_text().splitlines()) < 40


def test_the_first_block_of_the_readme(tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = [shlex.split(line) for line in blocks[0].splitlines()]
    assert [words[0] for words in commands] == ["python3.11", ".", "pip", "paceline"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(paceline.__file__).parents[1]),
        # The model is so small that a second thread would only wait for the first.
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *commands[3][1:]],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode()
    assert shown.count("identical") == 2
    assert "DIFFERENT" not in shown
    # The table has a row for each draft length, and longer drafts save passes.
    ratio = r"(?:1|[\d.]+x \([^)]*\))"
    rows = re.findall(rf"^    (\d)  +\d+ \([^)]*\) +{ratio} +([\d.]+)", shown, re.MULTILINE)
    assert [int(k) for k, _ in rows] == [0, 1, 3, 5, 8, 0, 3]  # greedy, then at temperature 1
    per_pass = [float(value) for _, value in rows[:5]]
    assert per_pass == sorted(per_pass)
    assert per_pass[0] == 1.0
    passes = re.findall(r"^  (?:static|continuous) .* in (\d+) decode passes", shown, re.MULTILINE)
    assert int(passes[0]) > 1.5 * int(passes[1])
