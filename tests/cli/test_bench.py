"""``paceline bench`` end to end on the pair in the package, and everything it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench import rounds
from paceline.bench.figures import Figures, figures_of
from paceline.bench.plot import check_plot
from paceline.cli import flags
from paceline.cli.main import main

SMALL = ["bench", "paceline/demo", "--dtype", "float32", "--max-num-seqs", "4", "--quiet"]
SMALL += ["--max-model-len", "64", "--kv-cache-memory-bytes", "8MiB"]
SYNTHETIC = [*SMALL, "--num-requests", "6", "--input-len", "4-9", "--output-len", "6"]
DRAFTER = ["--speculative-model", "paceline/demo-draft"]
ONCE = ["--rounds", "1"]


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, dict[str, Any]]:
    """Run it; the tables, and the object on the last line."""
    assert main(list(argv)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    *tables, last = captured.out.splitlines()
    return "\n".join(tables), json.loads(last)


# ---- end to end ----------------------------------------------------------------------------------


def test_draft_lengths_of_one_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    tables, result = bench(capsys, *SYNTHETIC, *DRAFTER, "--k", "0,2", "--rounds", "2")
    assert [variant["name"] for variant in result["variants"]] == ["k=0", "k=2"]
    assert (result["num_rounds"], result["bounds"]) == (2, "min to max")
    assert result["placement"] == "shared"
    assert [variant["threads"] for variant in result["variants"]] == [1, 1]  # it is a tiny model
    workload = result["workload"]
    assert (workload["num_requests"], workload["input_len"], workload["seed"]) == (6, "4-9", 0)
    for variant, k in zip(result["variants"], (0, 2), strict=True):
        assert variant["arguments"]["num_speculative_tokens"] == variant["k"] == k
        assert variant["arguments"]["enable_prefix_caching"] is False
        assert len(variant["rounds"]) == 2
        for one in variant["rounds"]:
            assert one["num_tokens"] == 36
            assert one["tokens_per_second"] == pytest.approx(36 / one["seconds"])
            assert one["num_same_outputs"] == 6
            assert len(one["proposed_by_position"]) == k
            assert one["inter_token_ms"]["p50"] <= one["inter_token_ms"]["p99"]
            assert one["cached_share"] == 0
    plain, drafting = result["variants"]
    assert plain["ratio"] == {"median": 1, "low": 1, "high": 1}
    ratios = [
        mine["tokens_per_second"] / first["tokens_per_second"]
        for mine, first in zip(drafting["rounds"], plain["rounds"], strict=True)
    ]
    assert drafting["ratio"]["low"] == pytest.approx(min(ratios))
    assert plain["tokens_per_step"] == 1 < drafting["tokens_per_step"]
    assert drafting["num_decode_passes"] < plain["num_decode_passes"]
    assert len(drafting["acceptance"]["conditional"]) == 2
    assert "All 6 outputs were the same tokens in every run." in tables
    assert "The prompts were random tokens" in tables


def test_the_temperature_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SYNTHETIC, "--rounds", "1"]
    tables, result = bench(capsys, *argv)
    header = " ".join(tables.split())
    nobody = "temperature 1, as neither the command nor the model names one (choose another with"
    assert f"{nobody} --temperature);" in header
    assert result["workload"]["temperatures"] == [1]
    tables, result = bench(capsys, *argv, "--temperature", "0")
    assert "tokens, temperature 0 (greedy); prefix caching" in " ".join(tables.split())
    assert result["workload"]["temperatures"] == [0]


def test_a_temperature_that_the_model_names_is_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"temperature": 0.5, "do_sample": true}')
    argv = [*SYNTHETIC, *ONCE, "--b", f"generation_config={tmp_path}"]
    tables, result = bench(capsys, *argv, "--a", f"generation_config={tmp_path}")
    header = " ".join(tables.split())
    assert "temperature 0.5, the model's own (choose another with --temperature);" in header
    assert result["workload"]["temperatures"] == [0.5]
    tables, _ = bench(capsys, *argv)
    header = " ".join(tables.split())
    assert "temperatures 0.5 to 1, the model's own, or 1 where it names none (choose" in header


@pytest.mark.parametrize(
    ("limit", "threads", "processes"),
    [(30_000_000, 1, "shared"), (30_000_000, 1, "separate"), (1_000_000, 2, "shared")],
)
def test_the_threads_are_those_of_the_engine(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    threads: int,
    processes: str,
) -> None:
    """torch has two here; a tiny model runs on one of them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("paceline.worker.threads._TEAM_PARAMETERS", limit)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tables, result = bench(capsys, *SYNTHETIC, *ONCE, "--processes", processes)
    finally:
        torch.set_num_threads(before)
    assert f" ({threads} of {result['machine']['cores']} cores), " in " ".join(tables.split())
    assert [variant["threads"] for variant in result["variants"]] == [threads]


@pytest.mark.parametrize(("flags", "lines"), [([], 0), (["--json"], 1), (["--no-json"], 0)])
def test_a_terminal_is_spared_the_line_of_json(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    lines: int,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([*SYNTHETIC, *ONCE, *flags]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("{") for line in said) == lines


def test_one_round_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    tables, result = bench(capsys, *SYNTHETIC, *DRAFTER, "--k", "0,2", *ONCE)
    assert "\none round after a warm-up: spread unknown\n" in tables
    assert result["bounds"] == "spread unknown"
    assert " to " not in tables.partition("Speed")[2].partition("Latency")[0]
    tables, _ = bench(capsys, *SYNTHETIC, *DRAFTER, "--k", "0,2", "--rounds", "2")
    assert "2 rounds after a warm-up, interleaved: median (min to max);" in tables
    assert tables.partition("Speed")[2].partition("Latency")[0].count(" to ") == 3


def test_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    one = [*SMALL, "--num-requests", "1", "--input-len", "4", "--output-len", "1", *ONCE]
    tables, _ = bench(capsys, *one, *DRAFTER, "--k", "0,1")
    header = " ".join(tables.split())
    assert "1 request a round, submitted at once: 4 prompt and 1 output token, " in header
    assert tables.rstrip().endswith("The output was the same tokens in every run.")
    tables, _ = bench(capsys, *one)
    assert "same tokens" not in tables  # there was one run


def test_drafts_that_are_rare_or_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ngram = [*SMALL, "--speculative-model", "[ngram]", "--k", "0,2", *ONCE, "--temperature", "0"]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7, 8], "logit_bias": {"9": 100}}')
    run = [*ngram, "--file", str(file), "--ignore-eos", "--max-tokens"]
    tables, result = bench(capsys, *run, "2")  # 9 9 repeats nothing before its last token
    none = "No drafts proposed: k=2. Prompt lookup found nothing in the text that its last tokens"
    assert none in " ".join(tables.split())
    assert "Accepted drafts" not in tables
    assert [variant["drafting_share"] for variant in result["variants"]] == [0, 0]
    tables, result = bench(capsys, *run, "20")  # from the third 9 on there is something to repeat
    assert "No drafts proposed" not in tables
    share = result["variants"][1]["drafting_share"]
    assert 0 < share < 1
    batches = tables.partition("Batches\n")[2].splitlines()
    assert batches[0].split()[:2] == ["tokens/step", "drafting"]
    assert batches[1].split()[:3] == ["k=0", "1.00", "-"]
    assert batches[2].split()[2] == f"{share * 100:.0f}%"


def test_the_tables_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tables, _ = bench(capsys, *SYNTHETIC, *DRAFTER, "--k", "0,16", "--rounds", "1")
    assert max(map(len, tables.splitlines())) <= 100
    for heading in ("Speed", "Latency, ms", "Batches", "Accepted drafts by position"):
        assert heading in tables


def test_static_against_continuous(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--num-requests", "8", "--input-len", "4", "--output-len", "mix:0.75=3,0.25=24"]
    argv = [*SMALL, *lengths, "--batching", "static,continuous", "--rounds", "1"]
    tables, result = bench(capsys, *argv)
    static, continuous = result["variants"]
    assert (static["name"], continuous["name"]) == ("static", "continuous")
    assert static["num_decode_passes"] > continuous["num_decode_passes"]
    assert static["rows_per_pass"] < continuous["rows_per_pass"]
    assert "2 engines, all in one process" in tables
    assert "Accepted drafts" not in tables


def test_two_sides_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SYNTHETIC, "--processes", "separate", "--rounds", "1", "--b", "block_size=8"]
    argv += ["--b", "enable-prefix-caching=true", "--input-len", "20"]
    tables, result = bench(capsys, *argv)
    assert result["placement"] == "separate"
    a, b = result["variants"]
    assert "block_size" not in a["arguments"]
    assert b["arguments"]["block_size"] == 8
    assert (a["cached_share"] > 0, b["cached_share"] > 0) == (False, True)
    assert a["rounds"][0]["num_same_outputs"] == b["rounds"][0]["num_same_outputs"] == 6
    assert "b: enable_prefix_caching=True, block_size=8" in tables
    assert "prefix caching is on and warm: 0% to" in tables.replace("\n  ", " ")


def test_engines_take_turns_where_memory_holds_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.check.machine.available_memory", lambda: 70 * 1024**2)
    argv = [*SYNTHETIC, "--rounds", "2", "--a", "block_size=8", "--b", "block_size=16"]
    tables, result = bench(capsys, *argv)
    assert result["placement"] == "alternating"
    assert [len(variant["rounds"]) for variant in result["variants"]] == [2, 2]
    assert "memory holds one at a time" in tables.replace("\n  ", " ")
    assert main([*argv, "--processes", "shared"]) == 1
    assert "the 2 engines need" in capsys.readouterr().err


def test_prompts_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "import os", "max_tokens": 3}, {"prompt_token_ids": [5, 6]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    argv = [*SMALL, "--file", str(file), "--max-tokens", "5", "--ignore-eos", "--rounds", "1"]
    _, result = bench(capsys, *argv, "--temperature", "0", "--num-requests", "5", "--json")
    (variant,) = result["variants"]
    assert variant["name"] == "engine"
    assert variant["rounds"][0]["num_tokens"] == 3 + 5 + 3 + 5 + 3
    assert result["workload"]["sampling"]["temperature"] == 0
    assert result["workload"]["file"] == str(file)
    assert result["workload"]["input_len"] is None


def test_temperatures_of_the_lines_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "import", "temperature": one} for one in (0.5, 0)]
    file.write_text("\n".join(map(json.dumps, lines)))
    tables, result = bench(capsys, *SMALL, "--file", str(file), "--max-tokens", "3", *ONCE)
    assert "temperatures 0 to 0.5; prefix" in " ".join(tables.split())
    assert result["workload"]["temperatures"] == [0, 0.5]


def test_only_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SYNTHETIC, "--rounds", "1", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert set(json.loads(line)) == {
        "paceline",
        "machine",
        "workload",
        "num_rounds",
        "bounds",
        "placement",
        "variants",
    }


def test_only_tables_have_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SYNTHETIC, *ONCE, "--no-json"]) == 0
    out = capsys.readouterr().out
    assert "Speed" in out
    assert "{" not in out
    with pytest.raises(SystemExit):
        main([*SYNTHETIC, *ONCE, "--no-json", "--json"])
    assert "not allowed with argument --no-json" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    loud = [part for part in SYNTHETIC if part != "--quiet"]
    assert main([*loud, *DRAFTER, "--k", "0,2", "--rounds", "2", "--json"]) == 0
    if terminal:
        due = [rf"round {n} of 2, tokens/s: k=0 \d+, k=2 \d+" for n in (1, 2)]
    else:  # the second round runs the variants in the other order
        runs = ((1, 0), (1, 2), (2, 2), (2, 0))
        due = [rf"round {n} of 2, k={k}: \d+ tokens/s" for n, k in runs]
    for line, pattern in zip(err_lines(capsys), ["loading the engine; .*", *due], strict=True):
        assert re.fullmatch(pattern, line)


def test_chat_with_a_code_model_is_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\n")
    loud = [part for part in SMALL if part != "--quiet"]
    argv = [*loud, "--file", str(file), "--max-tokens", "3", *ONCE, "--json"]
    assert main([*argv, "--chat"]) == 0
    warnings = [line for line in err_lines(capsys) if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("paceline: warning: `paceline/demo` completes Python code")
    assert main(argv) == 0
    assert "warning" not in capsys.readouterr().err


def err_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("after", "printed"), [(3, 1), (1, 0)])
def test_an_interrupt_shows_the_whole_rounds(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    printed: int,
) -> None:
    calls = iter(range(100))

    def interrupted(*arguments: Any) -> Figures:
        if next(calls) == after:
            raise KeyboardInterrupt
        return figures_of(*arguments)

    monkeypatch.setattr(rounds, "figures_of", interrupted)
    argv = [*SYNTHETIC, *DRAFTER, "--k", "0,1", "--rounds", "9"]
    assert main(argv) == 130
    out = capsys.readouterr().out
    assert bool(out) == bool(printed)
    if printed:
        assert json.loads(out.splitlines()[-1])["num_rounds"] == printed


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, starts in (("k.png", b"\x89PNG"), ("k.svg", b"<?xml")):
        file = tmp_path / name
        argv = [*SYNTHETIC, *DRAFTER, "--k", "0,1", "--rounds", "2", "--temperature", "0"]
        bench(capsys, *argv, "--plot", str(file))
        assert file.read_bytes().startswith(starts)
    words = " ".join(re.findall(r"<!-- (.*?) -->", file.read_text()))  # svg notes each text
    for says in (
        "Draft length: 6 requests at once, temperature 0 (greedy)",
        "tokens/s",
        "times as fast as k=0, within a round",
        "paceline/demo with paceline/demo-draft in float32",
        "medians of 2 interleaved rounds, whiskers: min to max",
    ):
        assert says in words


# ---- refused before anything loads ---------------------------------------------------------------


@pytest.fixture
def _nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("paceline.bench.engines.LocalEngine.__init__", load)
    monkeypatch.setattr("paceline.bench.engines.ChildEngine.__init__", load)


@pytest.mark.usefixtures("_nothing_loads")
@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["bench"], 2, "no model. hint: `paceline bench MODEL`"),
        (["bench", "m", "other"], 2, "one model at a time; what is `other`?"),
        ([*SMALL, "--k", "0,3"], 1, "without a drafter. hint: name one with --speculative-model"),
        ([*SMALL, "--k", "0,３"], 2, "'0,３' is not a list of draft lengths"),
        ([*SMALL, "--num-requests", "１２"], 2, "'１２' is not a whole number"),
        ([*SMALL, "--num-requests", "9" * 20], 2, "requests a round are more than 1000000"),
        ([*SMALL, "--rounds", "9" * 5000], 2, "a number of 5000 digits is too large"),
        ([*SMALL, "--input-len", "9" * 20], 1, "is more than 1000000000 tokens"),
        ([*SMALL, "--output-len", "normal:1,1e30"], 1, "is not a mean and a standard deviation"),
        ([*SMALL, "--a", "block_size=１６"], 2, "block_size: '１６' is not a whole number"),
        ([*SMALL, "--k", "0,x"], 2, "'0,x' is not a list of draft lengths"),
        ([*SMALL, "--k", "3,-1"], 2, "'3,-1' is not a list of draft lengths"),
        ([*SMALL, "--a", "block_sise=3"], 1, "did you mean `--block-size`?"),
        ([*SMALL, "--a", "block_size"], 2, "'block_size' is not of the form name=value"),
        ([*SMALL, "--a", "block_size=x"], 2, "block_size: 'x' is not a whole number"),
        ([*SMALL, "--a", "enable_prefix_caching=1"], 2, "must be true or false, got '1'"),
        ([*SMALL, "--a", "kv_cache_memory_bytes=9q"], 2, "'9q' is not a size"),
        ([*SMALL, "--b", "block_size=0"], 1, "variant b: `block_size` must be"),
        ([*SMALL, "--batching", "static,dynamic"], 1, "`batching='dynamic'` is unknown"),
        ([*SMALL, "--rounds", "0"], 2, "'0' is not a whole number above 0"),
        ([*SMALL, "--output-len", "poisson:3"], 1, "there is no distribution `poisson`"),
        ([*SMALL, "--output-len", "80"], 1, "208 in all, but max_model_len is 64"),
        ([*SMALL, "--max-tokens", "5"], 2, "synthetic outputs end at their length"),
        ([*SMALL, "--stop", "x"], 2, "--stop is for prompts of a file"),
        ([*SMALL, "--temperature", "-1"], 1, "`temperature`"),
        ([*SMALL, "--chat"], 2, "--chat is for the texts of a file"),
        ([*SMALL, "--file", "/no/such"], 1, "the prompt file `/no/such` cannot be read"),
        ([*SMALL, "--plot", "x.png"], 1, "fewer than two draft lengths"),
    ],
)
def test_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], status: int, says: str
) -> None:
    try:
        found = main(argv)
    except SystemExit as exit_:
        found = int(exit_.code or 0)
    captured = capsys.readouterr()
    assert found == status
    assert says in captured.err.replace(".\n  hint:", ". hint:")
    assert captured.out == ""


@pytest.mark.usefixtures("_nothing_loads")
def test_refused_prompts_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("short\n" + "a long one " * 100 + "\n")
    assert main([*SMALL, "--file", str(file)]) == 1
    assert f"{file}, line 2: the prompt has" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*SMALL, "--file", str(file), "--input-len", "5"])
    assert "--input-len is for synthetic requests" in capsys.readouterr().err
    assert main([*SMALL, "--file", str(file), "--skip-tokenizer-init"]) == 1
    assert "the prompts are texts, but skip_tokenizer_init is set" in capsys.readouterr().err
    file.write_text("\n")
    with pytest.raises(SystemExit):
        main([*SMALL, "--file", str(file)])
    assert "has no prompts" in capsys.readouterr().err


@pytest.mark.usefixtures("_nothing_loads")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "a", "temperature": -1}', "`temperature` must be"),
        (b'{"prompt": "a", "logit_bias": {"5000": 1}}', "logit_bias has the id 5000"),
        (b'{"prompt_token_ids": [5, 4096]}', "prompt token 1 is 4096"),
        (b'{"prompt_token_ids": []}', "the prompt has no tokens"),
        (b'{"messages": [{"role": 5}]}', "messages[0]"),
        (b'{"prompt": "\xff"}', "not UTF-8, as byte 0xff shows"),
    ],
)
def test_faults_of_a_file_have_its_name_and_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: bytes, says: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    assert main([*SMALL, "--file", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"paceline: error: {file}, line 3: ")
    assert says in error


@pytest.mark.usefixtures("_nothing_loads")
def test_refused_plots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    plots = [*SMALL, *DRAFTER, "--k", "0,1", "--plot"]
    for path, says in (
        (tmp_path / "no" / "x.png", "there is no directory"),
        (tmp_path / "x.docx", "cannot write the format"),
    ):
        assert main([*plots, str(path)]) == 1
        assert says in capsys.readouterr().err
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "nowhere.png")
    for place in (tmp_path / "fifo.png", tmp_path / "link.png"):
        assert main([*plots, str(place)]) == 1
        assert "cannot be written: it is not a file" in capsys.readouterr().err
    assert (tmp_path / "link.png").is_symlink()
    # The last is writable by its permissions for some users, and still cannot be written.
    for place in (tmp_path / "folder.png", tmp_path / f"{'a' * 300}.png", Path("/proc/x.png")):
        assert main([*plots, str(place)]) == 1
        assert "cannot be written: " in capsys.readouterr().err


def test_a_checked_plot_leaves_no_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    old = tmp_path / "old.png"
    old.write_bytes(b"a picture")
    for place in (old, tmp_path / "new.png"):
        check_plot(place, [0, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
    assert old.read_bytes() == b"a picture"


@pytest.mark.usefixtures("_nothing_loads")
def test_a_plot_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*SMALL, *DRAFTER, "--k", "0,1", "--plot", "x.png"]) == 1
    assert (
        'run `pip install -c constraints.txt -e ".[plot]"` in your clone' in capsys.readouterr().err
    )


# ---- flags and imports ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("block_size=32", "block_size", 32),
        ("--block-size=32", "block_size", 32),
        ("kv_cache_memory_bytes=1GiB", "kv_cache_memory_bytes", 1024**3),
        ("enable-prefix-caching=True", "enable_prefix_caching", True),
        ("enable_chunked_prefill=false", "enable_chunked_prefill", False),
        ("speculative_model=none", "speculative_model", None),
        ("speculative_model=[ngram]", "speculative_model", "[ngram]"),
        ("gpu_memory_utilization=0.5", "gpu_memory_utilization", 0.5),
        ("tensor_parallel_size=1", "tensor_parallel_size", 1),
        ("model=a=b", "model", "a=b"),
    ],
)
def test_engine_assignments(text: str, name: str, value: object) -> None:
    assert flags.engine_assignment(text) == (name, value)


def test_help_and_refusals_need_no_torch() -> None:
    code = (
        "import sys; from paceline.cli.main import main\n"
        "status = main(['bench', 'paceline/demo', '--output-len', '100000'])\n"
        "assert status == 1; assert 'torch' not in sys.modules\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "max_model_len is" in found.stderr


def test_help_has_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for example in ("--k 0,1,3,5 --file", "--batching static,continuous", "--b block_size=32"):
        assert example in out
