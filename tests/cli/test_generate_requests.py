"""``paceline generate``: requests refused before weights load, and what is written when."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.cli.output import OutputWriter
from paceline.cli.prompts import PromptItem
from paceline.cli.spelling import with_flags
from paceline.errors import EngineError
from paceline.outputs import CompletionOutput, RequestMetrics, RequestOutput


class NoLLM:
    """In the place of the engine; fails the test when a model would load."""

    def __init__(self, **_: Any) -> None:
        pytest.fail("a model was loaded")


@pytest.mark.parametrize(
    ("wrong", "flags", "says"),
    [
        ({"prompt_token_ids": [1] * 2048}, [], "2048 tokens, but max_model_len is 2048"),
        ({"prompt_token_ids": [1] * 9}, ["--max-model-len", "9"], "raise --max-model-len"),
        ({"prompt_token_ids": [3, 4096]}, [], "prompt token 1 is 4096"),
        ({"prompt": "a", "logprobs": 21}, [], "start the engine with --max-logprobs 21"),
        ({"prompt": "a", "stop_token_ids": [4096]}, [], "stop_token_ids has the id 4096"),
        ({"prompt": "a"}, ["--logit-bias", '{"4096": 1}'], "logit_bias has the id 4096"),
        ({"prompt": ""}, [], "the prompt has no tokens"),
    ],
)
def test_a_wrong_request_is_named_before_weights_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, Any],
    flags: list[str],
    says: str,
) -> None:
    monkeypatch.setattr("paceline.llm.LLM", NoLLM)
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt_token_ids": [1, 2]}, wrong]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    argv = ["generate", "paceline/demo", "--file", str(file), "--device", "cpu"]
    assert main.main([*argv, *flags]) == 1
    error = capsys.readouterr().err
    line = 1 if flags[:1] == ["--logit-bias"] else 2
    assert f"prompts.jsonl, line {line}: " in error
    assert says in error


# --- what is written, and when ---


def output(index: int, text: str) -> RequestOutput:
    one = CompletionOutput(0, text, [index], finish_reason="stop")
    return RequestOutput(str(index), None, [1], [one], True, RequestMetrics(0.0))


def test_outputs_are_written_in_order_as_soon_as_they_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = OutputWriter([PromptItem(text=text) for text in "abcd"], as_json=True)

    def written() -> list[int]:
        return [json.loads(line)["index"] for line in capsys.readouterr().out.splitlines()]

    writer.take(1, output(1, "B"))
    assert written() == []
    writer.take(0, output(0, "A"))
    assert written() == [0, 1]
    writer.take(3, output(3, "D"))
    assert (written(), writer.count) == ([], 2)
    writer.write_rest()
    assert (written(), writer.count) == ([3], 3)


class BrokenOff:
    """An engine that finishes prompts 0 and 2 of three and then raises ``error``."""

    error: BaseException = KeyboardInterrupt()

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> BrokenOff:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_default_sampling_params(self) -> Any:
        from paceline.sampling_params import SamplingParams

        return SamplingParams()

    def generate(self, *_: Any, on_output: Any, **__: Any) -> None:
        for index in (2, 0):
            on_output(index, output(index, f"text {index}"))
        raise self.error


@pytest.fixture
def broken_off(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of three prompts for ``BrokenOff``."""
    monkeypatch.setattr("paceline.llm.LLM", BrokenOff)
    return ["generate", "paceline/demo", "a", "b", "c", "--device", "cpu"]


def test_an_interruption_loses_nothing_that_was_finished(
    broken_off: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*broken_off, "--json"]) == 130
    captured = capsys.readouterr()
    assert [json.loads(line)["index"] for line in captured.out.splitlines()] == [0, 2]
    assert captured.err == "interrupted: 2 of 3 written\n"
    assert main.main(broken_off) == 130
    assert capsys.readouterr().out == (
        "==> prompt 1 of 3 <==\ntext 0\n==> prompt 3 of 3 <==\ntext 2\n"
    )


def test_a_failing_engine_loses_nothing_that_was_finished(
    broken_off: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BrokenOff, "error", EngineError("the runner failed. hint: see the log"))
    assert main.main([*broken_off, "--json"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["index"] for line in captured.out.splitlines()] == [0, 2]
    assert "the runner failed" in captured.err


@pytest.mark.parametrize(
    ("flags", "warned"),
    [(["--logprobs", "2"], True), (["--logprobs", "2", "--json"], False), ([], False)],
)
def test_logprobs_without_json_are_warned_of(
    broken_off: list[str], caplog: pytest.LogCaptureFixture, flags: list[str], warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        main.main([*broken_off, *flags])
    expected = ["--logprobs is not shown in text. hint: add --json"] * warned
    assert [message for message in caplog.messages if "logprobs" in message] == expected


@pytest.mark.parametrize(
    ("hint", "spelt"),
    [
        ("start the engine with max_logprobs=25", "start the engine with --max-logprobs 25"),
        ('set `dtype="bfloat16"` or so', "set `--dtype bfloat16` or so"),
        ('use `speculative_model="[ngram]"`', "use `--speculative-model '[ngram]'`"),
        ("raise `kv_cache_memory_bytes` to 5", "raise `--kv-cache-memory-bytes` to 5"),
        (
            "raise max_model_len if the model allows it",
            "raise --max-model-len if the model allows it",
        ),
        ("did you mean `max_tokens`?", "did you mean `max_tokens`?"),
        ("try --max-model-len 5", "try --max-model-len 5"),
    ],
)
def test_hints_name_flags(hint: str, spelt: str) -> None:
    assert with_flags(hint) == spelt
