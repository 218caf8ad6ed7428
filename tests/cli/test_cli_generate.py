"""``paceline generate`` on a real engine with a tiny random model."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
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


def test_outputs_are_handed_over_when_they_finish(model: str) -> None:
    taken: list[tuple[int, str]] = []
    lengths = (40, 3, 20)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    with LLM(model, max_num_seqs=4, dtype="float32") as llm:
        outputs = llm.generate(
            ["one", "two", "six"],
            params,
            use_tqdm=False,
            on_output=lambda place, output: taken.append((place, output.outputs[0].text)),
        )
    assert [place for place, _ in taken] == [1, 2, 0]
    assert dict(taken) == {place: one.outputs[0].text for place, one in enumerate(outputs)}


def test_ctrl_c_keeps_what_is_finished(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one", "max_tokens": n} for n in (2, 4000, 3)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    argv = [sys.executable, "-m", "paceline.cli.main", "generate", model, "--file", str(file)]
    process = subprocess.Popen(
        [*argv, "--json", "--ignore-eos", "--max-num-seqs", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever starts the tests in the background may have them ignore it, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    first = process.stdout.readline()  # while the second prompt still runs
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=60)
    written = [json.loads(line)["index"] for line in [first, *rest.splitlines()]]
    assert process.returncode == 130
    assert written in ([0], [0, 2])  # as the signal may come before the third has finished
    assert error == f"interrupted: {len(written)} of 3 written\n"
