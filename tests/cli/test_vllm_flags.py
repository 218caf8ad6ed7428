"""Flags as vLLM's users write them: taken, or refused in one clear sentence."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_dirs import write_model
from paceline.cli import main
from paceline.cli.flags import add_engine_flags, length_limit, token_count
from paceline.cli.parser import Parser
from paceline.cli.serve import _parser as serve_parser
from paceline.cli.spelling import with_flags
from paceline.cli.vllm_flags import ABSENT, absent
from paceline.server.reasoning import REASONING_PARSERS
from paceline.server.tool_parsers import TOOL_PARSERS


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", [*ABSENT, "-O3", "-O", "--optimization-level"])
def test_a_flag_that_only_vllm_has_gets_one_sentence(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(["serve", "m", flag, "x"], capsys)
    assert message.startswith(f"paceline: error: vLLM's `{flag}` is not here: ")
    assert message.count("\n") == 2
    assert "did you mean" not in message


def test_what_is_called_absent_is_absent() -> None:
    known = {option for action in serve_parser()._actions for option in action.option_strings}
    assert not known & set(ABSENT)
    named = {
        word.strip("`,")
        for entry in ABSENT.values()
        for word in f"{entry.why} {entry.hint}".split()
        if word.startswith("`--")
    }
    assert named <= known
    assert absent("--no-enable-reasoning") == ABSENT["--enable-reasoning"]
    assert absent("--enable-prefix-caching") is None


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--enable-log-request", "did you mean `--enable-log-requests`?"),
        ("--disable-prefix-caching", "did you mean `--no-enable-prefix-caching`?"),
        ("--disable-access-log", "did you mean `--disable-uvicorn-access-log`?"),
        ("--no-disable-log-request", "did you mean `--no-disable-log-requests`?"),
        ("--lora", "`paceline serve --help` shows all"),
    ],
)
def test_suggestions_mean_the_same(
    flag: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(["serve", "m", flag], capsys) == (
        f"paceline: error: unknown argument `{flag}`.\n  hint: {hint}\n"
    )


def test_check_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    argv = ["check", model, "--json", "--uds", "x", "--enforce-eager", "True"]
    assert main.main(argv) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [fault["cause"] for fault in faults] == [
        "`--enforce-eager` takes no value, but `True` follows it",
        "vLLM's `--uds` is not here: the server listens on a port",
    ]
    assert faults[0]["hint"] == "write `--enforce-eager` alone"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--enforce-eager", "True"], "write `--enforce-eager` alone"),
        (["--enforce-eager=False"], "write `--no-enforce-eager` alone"),
        (["--no-enforce-eager", "false"], "write `--enforce-eager` or `--no-enforce-eager` alone"),
        (["--trust-remote-code", "False"], "write `--no-trust-remote-code` alone"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_value_behind_a_flag_without_one(
    command: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused([command, "m", *words], capsys)
    assert "takes no value, but `" in message
    assert f"hint: {says}\n" in message


def test_a_value_behind_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    says = "leave `true` out, or give it before the flag"
    assert says in refused(["generate", "m", "--dry-run", "true"], capsys)
    assert main.main(["serve", "paceline/demo", "--dry-run", "true"]) == 1
    assert says in capsys.readouterr().out


def test_a_prompt_may_be_true() -> None:
    parser = Parser(prog="x")
    parser.add_argument("positional", nargs="*")
    add_engine_flags(parser)
    assert parser.parse(["m", "True", "--enforce-eager"]).positional == ["m", "True"]
    assert parser.stray_values(["--model", "True"]) == []


def test_help_names_every_parser() -> None:
    text = serve_parser().format_help()
    for name in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert name in text
    assert "auto is not available yet" in " ".join(text.split())


def test_a_question_is_followed_by_no_full_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["serve", "m", "n"], capsys).startswith(
        "paceline: error: one model at a time; what is `n`?\n  hint: "
    )


@pytest.mark.parametrize("flag", ["-tp", "--tp", "-pp", "-dp", "--tensor-parallel-size"])
def test_short_names(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    assert main.main(["check", model, flag, "1", "--disable-log-requests"]) == 0
    capsys.readouterr()
    assert main.main(["check", model, flag, "2"]) == 1
    assert "parallel_size=2` is not supported" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2m", 2_000_000), ("1M", 2**20), ("77", 77)],
)
def test_lengths_in_vllms_short_forms(text: str, tokens: int) -> None:
    assert token_count(text) == length_limit(text) == tokens


def test_the_length_may_be_left_to_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "m"))
    found = []
    for flags in ([], ["--max-model-len", "auto"], ["--max-model-len", "0.25K"]):
        assert main.main(["check", model, "--json", *flags]) == 0
        found.append(json.loads(capsys.readouterr().out)["settings"]["max_model_len"])
    assert found == [512, 512, 256]
    assert main.main(["check", model, "--max-model-len", "1x"]) == 1
    assert "'1x' is not a whole number" in capsys.readouterr().out


def test_hints_have_the_form_that_a_flag_takes() -> None:
    assert with_flags('{"num_speculative_tokens": 5}') == '{"num_speculative_tokens": 5}'
    assert with_flags("set skip_tokenizer_init=True") == "set --skip-tokenizer-init"
    assert with_flags("`enable_prefix_caching=False`") == "`--no-enable-prefix-caching`"
    assert with_flags("set max_num_seqs=8") == "set --max-num-seqs 8"


def test_python_runs_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("paceline ")
    failed = subprocess.run(
        [*command, "check", os.fspath(tmp_path)], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1


def test_gguf_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").touch()
    known = write_model(tmp_path / "m")
    (known / "model.safetensors").rename(known / "model.gguf")
    for model in (tmp_path / "x.gguf", tmp_path, known, Path("absent.gguf")):
        assert main.main(["check", str(model)]) == 1
        out = capsys.readouterr().out
        assert "GGUF is not supported" in out
        assert "safetensors files in float32, bfloat16 or float16" in out


def test_a_dash_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
    argv = ["generate", "paceline/demo", "-", "--max-tokens", "3", "--json", "--quiet"]
    assert main.main(argv) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["prompt"] == "def f(x):"


def test_all_spellings_reach_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    argv = ["serve", model, "--dry-run", "--json", "--max_num_seqs", "7"]
    argv += ["--speculative-config.method", "ngram"]
    argv += ["--speculative-config.num_speculative_tokens", "2"]
    argv += ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    argv += ["--response-role", "assistant", "--chat-template-content-format", "auto"]
    argv += ["--guided-decoding-backend", "xgrammar", "--api-server-count", "1"]
    argv += ["--structured-outputs-config.backend", "auto"]
    argv += ["--distributed-executor-backend", "mp", "--performance-mode", "balanced"]
    assert main.main([*argv, "--allowed-origins", '["*"]']) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["max_num_seqs"] == 7
    assert settings["num_speculative_tokens"] == 2


def test_what_the_server_refuses_comes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["serve", "m", "--uds=x", "--max-loras=2"], capsys)
    assert "2 problems" in said
    assert "`--uds`" in said
    assert "`--max-loras`" in said
    assert main.main(["serve", "m", "--response-role", "user", "--api-server-count", "4"]) == 1
    said = capsys.readouterr().err
    assert "`response_role='user'` is not supported: answers always have" in said
    assert "`api_server_count=4` is not supported: there is one API process" in said
