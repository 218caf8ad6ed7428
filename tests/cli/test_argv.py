"""Underscores in flags, and keys of flags that take JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_dirs import write_model
from paceline.cli import main
from paceline.cli.argv import with_dashes, with_joined_keys
from paceline.cli.flags import add_engine_flags, add_sampling_flags
from paceline.cli.parser import Parser, given

CONFIG = {"--speculative-config"}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("--max_num_seqs", "--max-num-seqs"),
        ("--max_num_seqs=8", "--max-num-seqs=8"),
        ("--stop=--a_b", "--stop=--a_b"),
        ("--speculative_config.prompt_lookup_max", "--speculative-config.prompt_lookup_max"),
        ("--a_b and more", "--a_b and more"),
        ("snake_case", "snake_case"),
        ("and --a_b", "and --a_b"),
        ("-a_b", "-a_b"),
        ("---a_b", "---a_b"),
    ],
)
def test_only_names_of_flags_are_changed(written: str, read: str) -> None:
    assert with_dashes([written]) == [read]
    assert with_dashes(["--", written]) == ["--", written]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--speculative-config.method", "ngram"], {"method": "ngram"}),
        (["--speculative-config.method=ngram"], {"method": "ngram"}),
        (["--speculative-config.prompt-lookup-max", "4"], {"prompt_lookup_max": 4}),
        (["--speculative-config.a.b", "true", "--speculative-config.a.c=x=y"],
         {"a": {"b": True, "c": "x=y"}}),
        (["--speculative-config.a", "1", "--speculative-config.a", "2"], {"a": 2}),
        (["--speculative-config.a", "-1", "--speculative-config.b", "None"], {"a": -1, "b": None}),
    ],
)  # fmt: skip
def test_keys_make_an_object(words: list[str], value: dict[str, Any]) -> None:
    (joined,), problems = with_joined_keys(words, CONFIG)
    assert not problems
    assert json.loads(joined.removeprefix("--speculative-config=")) == value


def test_what_is_no_key_stays_where_it_is() -> None:
    argv = ["m", "--port.x", "1", "--", "--speculative-config.a", "1"]
    assert with_joined_keys(argv, CONFIG) == (argv, [])
    argv = ["m", "--speculative-config.a", "1", "x", "--speculative-config.b", "2", "y"]
    joined, problems = with_joined_keys(argv, CONFIG)
    assert joined == ["m", '--speculative-config={"a": 1, "b": 2}', "x", "y"]
    assert not problems


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--speculative-config.method"], "`--speculative-config.method` needs a value"),
        (["--speculative-config.method", "--quiet"], "needs a value"),
        (["--speculative-config.a", "1", "--speculative-config.a.b", "1"], "contradicts another"),
        (["--speculative-config.a.b", "1", "--speculative-config.a", "1"], "contradicts another"),
        (["--speculative-config.a", "1", "--speculative-config", "{}"], "choose one form"),
        (["--speculative-config={}", "--speculative-config.a", "1"], "choose one form"),
    ],
)
def test_keys_that_make_no_object(words: list[str], says: str) -> None:
    _, (problem,) = with_joined_keys(words, CONFIG)
    assert says in problem


def test_every_command_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    words = [
        *("--max_num_seqs", "8", "--speculative_config.method", "ngram"),
        *("--speculative-config.num_speculative_tokens=3", "--no_enable_prefix_caching"),
        *("--structured-outputs-config.backend", "xgrammar"),
    ]
    for command in (["check"], ["serve", "--dry_run"], ["generate", "--dry-run"]):
        assert main.main([*command, model, "--json", *words]) == 0
        settings = json.loads(capsys.readouterr().out)["settings"]
        assert settings["max_num_seqs"] == 8
        assert settings["speculative_model"] == "[ngram]"
        assert settings["num_speculative_tokens"] == 3
        assert settings["enable_prefix_caching"] is False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max_num_seq", "8"], "unknown argument `--max-num-seq`. hint: did you mean"),
        (["--max-num-seqs.x", "8"], "`--max-num-seqs` has no keys such as `x`"),
        (["--speculative-config.", "ngram"], "`--speculative-config` has no keys such as ``"),
        (["--speculative-config.methd", "ngram"], "unknown key of `speculative_config` `methd`"),
        (["--structured-outputs-config.backend", "guidance"], "have one backend, xgrammar"),
        (["--compilation-config.level", "3"], "kernels and graphs have no settings"),
        (["-cc.mode", "3"], "vLLM's `-cc` is not here"),
        (["--lora_modules", "x"], "vLLM's `--lora-modules` is not here"),
    ],
)
def test_wrong_ones_are_named(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "m"))
    assert main.main(["check", model, *words]) == 1
    out = capsys.readouterr().out
    assert says.partition(" hint:")[0].removesuffix(".") in out


def test_sampling_flags_have_keys_too() -> None:
    parser = Parser(prog="x")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    words = ["--structured-outputs.regex", "[0-9]+", "--logit_bias.5", "-100"]
    assert given(parser.parse(words), "sampling") == {
        "structured_outputs": {"regex": "[0-9]+"},
        "logit_bias": {"5": -100},
    }
