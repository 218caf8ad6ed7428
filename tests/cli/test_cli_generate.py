"""``paceline generate`` on a real engine with a tiny random model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main

ROOT = Path(__file__).parents[2]
PROMPTS = ["one two one two one two", "In a paceline the riders"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = importlib.util.spec_from_file_location("tiny_model", ROOT / "examples/tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.write_tiny_model(tmp_path_factory.mktemp("tiny")))


def test_json_lines_are_the_same_with_speculation(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["generate", model, *PROMPTS, "--json", "--quiet", "--dtype", "float32"]
    common += ["--max-num-seqs", "4", "--max-tokens", "24", "--ignore-eos", "--seed", "7"]
    assert main(common) == 0
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in plain] == PROMPTS
    assert all(len(one["outputs"][0]["token_ids"]) == 24 for one in plain)
    drafting = ["--speculative-model", "[ngram]", "--num-speculative-tokens", "3"]
    assert main([*common, *drafting, "--ngram-prompt-lookup-min", "1"]) == 0
    speculated = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["outputs"] for one in speculated] == [one["outputs"] for one in plain]
    assert sum(one["metrics"]["num_draft_tokens"] for one in speculated) > 0


def test_chat_streams_to_a_terminal(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", model, "hello", "--chat", "--quiet", "--temperature", "0"]
    argv += ["--max-num-seqs", "4", "--max-tokens", "12", "--dtype", "float32"]
    assert main(argv) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(argv) == 0
    assert capsys.readouterr().out == whole


def test_only_the_text_comes_out(model: str) -> None:
    argv = [sys.executable, "-m", "paceline.cli.main", "generate", model, "one two"]
    argv += ["--max-num-seqs", "4", "--max-tokens", "3", "--temperature", "0", "--ignore-eos"]
    quiet = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    assert quiet.stdout.strip()
    loud = subprocess.run([*argv, "--verbose"], capture_output=True, text=True, check=True)
    assert loud.stdout == quiet.stdout
    assert "resolved settings" in loud.stderr


def test_a_request_the_engine_refuses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", model, "x" * 5000, "--quiet", "--max-num-seqs", "4"]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("paceline: error: ")
    assert "Traceback" not in error
