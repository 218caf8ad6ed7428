"""The command line: dispatch, flags, errors and exit statuses; ``generate`` on a scripted LLM."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import signal
import subprocess
import sys
import termios
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from model_dirs import write_model
from paceline.cli import flags, main, parser, prompts
from paceline.engine_args import NO_EFFECT, EngineArgs
from paceline.errors import EngineError, RequestError
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paceline.sampling_params import SamplingParams


class ScriptedLLM:
    """Answers every prompt with its own text in upper case; records what it was asked."""

    made: list[ScriptedLLM]
    defaults = SamplingParams(temperature=0.6)
    fail_with: BaseException | None = None
    finishing: list[int] | None = None  # prompts in the order in which they finish
    seen: list[str]  # standard output after each
    failing_prompt = "bad"

    def __init__(self, **engine: Any) -> None:
        self.engine = engine
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.use_tqdm = True
        self.closed = False
        self.seen = []
        type(self).made.append(self)

    def __enter__(self) -> ScriptedLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True

    def get_default_sampling_params(self) -> SamplingParams:
        return self.defaults

    def get_tokenizer(self) -> ScriptedLLM:
        return self

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(char) for message in messages for char in message["content"]]

    def generate(
        self,
        prompts: list[Any],
        params: list[SamplingParams],
        use_tqdm: bool = True,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        self.prompts, self.params, self.use_tqdm = prompts, params, use_tqdm
        outputs = [
            self._output(i, prompt, one.n)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        assert on_output is not None
        for place in range(len(outputs)) if self.finishing is None else self.finishing:
            on_output(place, outputs[place])
            self.seen.append(sys.stdout.getvalue() if hasattr(sys.stdout, "getvalue") else "")
        if self.fail_with is not None:
            raise self.fail_with
        return outputs

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts, self.params = [prompt], [params]
        for end in (1, 2, None):
            output = self._output(0, prompt, 1)
            output.outputs[0].text = output.outputs[0].text[:end]
            yield output

    def _output(self, index: int, prompt: Any, n: int) -> RequestOutput:
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt["prompt_token_ids"]
        text = "".join(map(chr, ids)).upper()
        outputs = [
            CompletionOutput(i, text, ids, finish_reason="stop", logprobs=[{7: Logprob(-0.5, 1)}])
            for i in range(n)
        ]
        error = "out of luck" if prompt == self.failing_prompt else None
        return RequestOutput(str(index), None, ids, outputs, True, RequestMetrics(0.0), error=error)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLLM]:
    module: Any = types.ModuleType("paceline.llm")
    module.LLM = type("LLM", (ScriptedLLM,), {"made": []})
    monkeypatch.setitem(sys.modules, "paceline.llm", module)
    monkeypatch.setattr(sys, "stdin", Terminal())
    # The scripted model has no files; test_generate_requests.py checks requests on a real one.
    monkeypatch.setattr("paceline.cli.generate.check_items", lambda *_: None)
    made: type[ScriptedLLM] = module.LLM
    return made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- dispatch and errors ---


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert main.main([]) == 2
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("paceline ")
    assert main.main(["generat"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "paceline: error: unknown command `generat`.\n  hint: did you mean `generate`?\n"
    )


@pytest.mark.parametrize("command", ["generate", "check"])
def test_every_argument_has_a_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for f in fields(EngineArgs):
        assert f"--{f.name.replace('_', '-')}" in text
    if command == "generate":
        for sampling in fields(SamplingParams):
            name = "sampling_seed" if sampling.name == "seed" else sampling.name
            assert f"--{name.replace('_', '-')}" in text
    assert "--hf-overrides" not in text
    assert set(flags._SAMPLING_HELP) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "m", "p", "--max-model-length", "5"], "did you mean `--max-model-len`"),
        (["generate", "m", "p", "--max-num-seqs", "many"], "'many' is not a whole number"),
        (["check"], "no model"),
        (["check", "m", "n"], "what is `n`?"),
        (["generate"], "no model"),
        (["generate", "m"], "no prompt"),
        (["generate", "m", "p", "--temprature=0"], "did you mean `--temperature`"),
        (["generate", "m", "p", "--logit-bias", "5"], "not a JSON object"),
        (["generate", "m", "p", "--stop-token-ids", "a"], "not a list of token ids"),
        (["generate", "m", "p", "--stop-token-ids", "5,６"], "not a list of token ids"),
        (["generate", "m", "p", "--quiet", "--verbose"], "not allowed with argument --quiet"),
    ],
)
def test_wrong_usage_exits_with_2(
    argv: list[str], says: str, llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("paceline: error: ")
    assert says in error
    assert not llm.made


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "m", "p", "--temperature", "-1"], "`temperature` must be"),
        (["generate", "m", "p", "--tensor-parallel-size", "2"], "tensor_parallel_size=2"),
        (["generate", "m", "--file", "/no/file"], "/no/file"),
        (["generate", "m", "p", "--speculative-config", "{"], "not valid JSON"),
        (["generate", "m", "p", "--quantization", "awq"], "unquantised"),
    ],
)
def test_what_cannot_work_exits_with_1_before_a_model_loads(
    argv: list[str], says: str, llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("paceline: error: ")
    assert says in error
    assert "Traceback" not in error
    assert not llm.made


def test_errors_while_running(llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.fail_with = EngineError("the runner failed. hint: see the log")
    assert main.main(["generate", "m", "p", "q"]) == 1
    assert capsys.readouterr().err.endswith("the runner failed.\n  hint: see the log\n")
    llm.fail_with = KeyboardInterrupt()
    assert main.main(["generate", "m", "p"]) == 130
    assert all(made.closed for made in llm.made)


def test_several_problems_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    main.print_error("2 problems:\n1. one. hint: fix\n2. two")
    assert capsys.readouterr().err == (
        "paceline: error: 2 problems:\n1. one.\n  hint: fix\n2. two\n"
    )


# --- check ---


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    assert main.main(["check", model, "--max-num-seqs", "4"]) == 0
    out = capsys.readouterr().out
    assert "OK: no fault found" in out
    assert "max_num_seqs" in out
    assert main.main(["check", "--model", model, "--json", "--max-model-len", "999"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["settings"]["max_model_len"] == 999
    assert main.main(["generate", model, "--dry-run", "--json", "--no-enable-prefix-caching"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["enable_prefix_caching"] is False


def test_check_says_why_a_choice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "m"))
    assert main.main(["check", model, "--device", "cuda"]) == 1
    assert "no NVIDIA GPU is seen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--max-num-seqs", "１２", "'１２' is not a whole number"),
        ("--max-num-seqs", "1_000", "'1_000' is not a whole number"),
        ("--gpu-memory-utilization", "0.９", "'0.９' is not a number"),
        ("--kv-cache-memory-bytes", "４GiB", "not a size such as 4GiB"),
        ("--kv-cache-memory-bytes", "lots", "not a size such as 4GiB"),
        ("--max-model-length", "5", "did you mean `--max-model-len`"),
        ("--quantization", "awq", "unquantised"),
    ],
)
def test_check_reports_a_wrong_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, says: str
) -> None:
    model = str(write_model(tmp_path / "m"))
    assert main.main(["check", model, flag, value]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Faults: 1\n")
    assert says in out


def test_check_finds_wrong_flags_of_every_kind_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["check", str(write_model(tmp_path / "m")), "--json", "--max-num-seqs", "many"]
    argv += ["--blocksize", "8", "--block-size", "0", "--quantization", "awq"]
    argv += ["--speculative-config", '{"method": "eagle", "size": 3}', "--max-model-len", "999"]
    assert main.main([*argv, "--ngram-prompt-lookup-max", "4"]) == 1
    report = json.loads(capsys.readouterr().out)
    for fault, part in zip(
        report["faults"],
        [
            "'many' is not a whole number",
            "unknown argument `--blocksize`",
            "quantization='awq'",
            "`size`",
            "'eagle' is not supported",
            "`block_size` must be between 1 and 1024, got 0",
            "`ngram_prompt_lookup_max=4` has no effect without a drafter",
            "`max_model_len` (999) is above the 512 positions",
        ],
        strict=True,
    ):
        assert part in fault["cause"]
    assert report["faults"][6]["hint"] == "set `--speculative-model`, or leave it out"
    # What the plan took instead is not what these arguments are.
    assert report["settings"]["max_num_seqs"] is None
    assert report["settings"]["block_size"] is None
    assert report["settings"]["max_model_len"] == 999


def test_no_effect_flags_are_accepted(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m"))
    given = ["--swap-space", "4", "--disable-log-stats", "--no-trust-remote-code"]
    given += ["--tensor-parallel-size", "1", "--revision", "None", "--quantization", "None"]
    assert main.main(["check", *given, model]) == 0


# --- generate ---


def test_prompts_from_arguments(llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "m", "one", "--max-num-seqs", "8", "two", "--prompt", "three", "--quiet"]
    assert main.main([*argv, "--stop", "a", "--stop", "b", "--stop-token-ids", "5,6"]) == 0
    (made,) = llm.made
    assert made.engine == {"model": "m", "max_num_seqs": 8}
    assert made.prompts == ["one", "two", "three"]
    assert made.use_tqdm is False
    assert made.params[0] == SamplingParams(
        temperature=0.6, max_tokens=256, stop=["a", "b"], stop_token_ids=[5, 6]
    )
    assert capsys.readouterr().out == (
        "==> prompt 1 of 3 <==\nONE\n==> prompt 2 of 3 <==\nTWO\n==> prompt 3 of 3 <==\nTHREE\n"
    )


def test_one_prompt_is_printed_alone(
    llm: type[ScriptedLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["generate", "--model", "m", "one"]) == 0
    assert capsys.readouterr().out == "ONE\n"
    assert main.main(["generate", "m", "one", "--n", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[::2] == [
        "==> prompt 1 of 1, output 1 of 2 <==",
        "==> prompt 1 of 1, output 2 of 2 <==",
    ]


def test_sampling_flags_win_over_the_models_defaults(llm: type[ScriptedLLM]) -> None:
    llm.defaults = SamplingParams(temperature=0.6, max_tokens=99)
    assert main.main(["generate", "m", "p"]) == 0
    assert llm.made[-1].params == [llm.defaults]
    argv = ["generate", "m", "p", "--temperature", "0", "--max-tokens", "5"]
    argv += ["--sampling-seed", "3", "--seed", "4", "--logit-bias", '{"7": -1}']
    assert main.main([*argv, "--no-skip-special-tokens"]) == 0
    assert llm.made[-1].engine == {"model": "m", "seed": 4}
    assert llm.made[-1].params == [
        SamplingParams(
            temperature=0, max_tokens=5, seed=3, logit_bias={7: -1}, skip_special_tokens=False
        )
    ]


def test_file_and_standard_input(
    llm: type[ScriptedLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second \n", encoding="utf-8")
    assert main.main(["generate", "m", "--file", str(file)]) == 0
    assert llm.made[-1].prompts == ["first", "  second "]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert main.main(["generate", "m"]) == 0
    assert llm.made[-1].prompts == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\n"))
    assert main.main(["generate", "m", "x", "--file", "-"]) == 0
    assert llm.made[-1].prompts == ["x", "c"]


def test_json_lines(
    llm: type[ScriptedLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "hé", "max_tokens": 3, "answer": 42, "best_of": 1},
        {"prompt_token_ids": [65, 66]},
        {"messages": [{"role": "user", "content": "chat"}]},
        {"prompt": "bad"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    argv = ["generate", "m", "--file", str(file), "--json", "--max-tokens", "9"]
    assert main.main(argv) == 1  # one failed
    captured = capsys.readouterr()
    assert "request 3 failed: out of luck" in captured.err
    results = [json.loads(line) for line in captured.out.splitlines()]
    assert [one["outputs"][0]["text"] for one in results] == ["HÉ", "AB", "CHAT", "BAD"]
    assert "HÉ" in captured.out
    assert results[0]["outputs"][0]["logprobs"][0]["7"]["logprob"] == -0.5
    assert results[2]["messages"] == lines[2]["messages"]
    assert results[3]["error"] == "out of luck"
    assert [one.max_tokens for one in llm.made[-1].params] == [3, 9, 9, 9]


def test_chat_wraps_texts(llm: type[ScriptedLLM]) -> None:
    assert main.main(["generate", "m", "hi", "--chat"]) == 0
    assert llm.made[-1].prompts == [{"prompt_token_ids": [104, 105]}]


def test_one_prompt_streams_to_a_terminal(
    llm: type[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    writes: list[str] = []

    class Screen(Terminal):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Screen())
    assert main.main(["generate", "m", "word"]) == 0
    assert writes[:3] == ["W", "O", "RD"]
    assert capsys.readouterr().err == ""  # nobody watches it
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main.main(["generate", "m", "word", "--speculative-model", "d"]) == 0
    begin, end = capsys.readouterr().err.splitlines()
    assert begin == "loading m, drafts by d"
    assert "4 tokens" in end
    assert main.main(["generate", "m", "word", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    writes.clear()
    assert main.main(["generate", "m", "word", "--json"]) == 0
    assert json.loads(writes[0])["outputs"][0]["text"] == "WORD"


@pytest.mark.parametrize(
    ("terminal", "flags", "bar"), [(True, [], True), (True, ["--quiet"], False), (False, [], False)]
)
def test_a_bar_is_for_who_watches(
    llm: type[ScriptedLLM],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    flags: list[str],
    bar: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main.main(["generate", "m", "a", "b", *flags]) == 0
    assert llm.made[-1].use_tqdm is bar


@pytest.mark.parametrize(
    ("flags", "level"),
    [([], logging.WARNING), (["--quiet"], logging.ERROR), (["--verbose"], logging.INFO)],
)
def test_how_much_is_logged(
    llm: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, flags: list[str], level: int
) -> None:
    levels: list[int] = []
    monkeypatch.setattr("paceline.cli.generate.configure_logging", levels.append)
    assert main.main(["generate", "m", "p", *flags]) == 0
    assert levels == [level]


@pytest.mark.parametrize(
    ("model", "argv", "warned"),
    [
        ("paceline/demo", ["hi", "--chat"], True),
        ("paceline/demo-draft", ["hi", "--chat"], True),
        ("paceline/demo", ["hi"], False),
        ("m", ["hi", "--chat"], False),
    ],
)
def test_chat_with_a_code_model_is_warned_of(
    llm: type[ScriptedLLM],
    caplog: pytest.LogCaptureFixture,
    model: str,
    argv: list[str],
    warned: bool,
) -> None:
    assert main.main(["generate", model, *argv]) == 0
    assert [f"`{model}` completes Python code" in one for one in caplog.messages] == [True] * warned


def test_a_directory_of_that_name_is_no_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    items = [prompts.PromptItem(text="hi").as_chat()]
    assert prompts.chat_warning("paceline/demo", items) is not None
    (tmp_path / "paceline" / "demo").mkdir(parents=True)
    assert prompts.chat_warning("paceline/demo", items) is None


def test_input_that_is_no_text(llm: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\n"), "utf-8"))
    assert main.main(["generate", "m"]) == 1
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit):
        main.main(["generate", "m"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\nb', "line 2 is not valid JSON"),
        ('{"prompt": "a"}\n' + "[" * 100_000, "line 2 is not valid JSON: it is nested too deeply"),
        ('{"prompt": "a"}\n\n{"text": "b"}', "line 3 must have one of"),
        ('{"prompt": "a", "messages": []}', "found prompt and messages"),
        ('{"prompt": 5}', "`prompt` must be a string, got 5"),
        ('{"prompt_token_ids": "5"}', "must be a list of ids"),
    ],
)
def test_wrong_json_lines(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        prompts.read_prompts(text.splitlines(), "standard input")


def test_lines_that_only_look_like_json_are_text() -> None:
    items = prompts.read_prompts(['{"a": 1}', "{"], "f")
    assert [item.text for item in items] == ['{"a": 1}', "{"]
    assert prompts.read_prompts([], "f") == []


@pytest.mark.parametrize(
    ("text", "count"),
    [("12", 12), ("4GiB", 4 * 1024**3), ("512mb", 512 * 10**6), ("1.5k", 1500), ("2g", 2 * 10**9)],
)
def test_byte_counts(text: str, count: int) -> None:
    assert flags.byte_count(text) == count


# --- as a process ---


def paceline(*argv: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline.cli.main", *argv]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever starts the tests in the background may have them ignore it, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def test_check_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from paceline.cli.main import main;"
        f"status = main(['check', {str(write_model(tmp_path / 'm'))!r}]);"
        "assert status == 0; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("argv", [["check", "m"], ["--help"], ["--version"], ["bench", "--help"]])
def test_closed_output_is_quiet(tmp_path: Path, argv: list[str]) -> None:
    model = str(write_model(tmp_path / "m"))
    process = paceline(*[model if word == "m" else word for word in argv])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    status = process.wait(timeout=60)
    # argparse takes it for done if a long help cannot be written.
    assert status == 141 or (argv == ["bench", "--help"] and status == 0)
    assert process.stderr.read() == ""
    process.stderr.close()


def wait_until_it_sleeps(pid: int) -> None:
    """Until a process has used no CPU for half a second (Linux)."""
    before, quiet = "", 0
    while quiet < 5:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        now = " ".join((fields[0], *fields[11:13]))  # state, user and system time
        quiet = quiet + 1 if now == before and fields[0] == "S" else 0
        before = now
        time.sleep(0.1)


def test_interrupt_is_quiet() -> None:
    reader, writer = os.pipe()  # keeps the process waiting for prompts
    os.write(writer, b"x\n")
    process = paceline("generate", "m", stdin=reader)
    unread = bytearray(4)
    while fcntl.ioctl(reader, termios.FIONREAD, unread) == 0 and any(unread):
        time.sleep(0.02)  # until it has read the line
    wait_until_it_sleeps(process.pid)  # as a signal just before it waits would not wake it
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    os.close(reader)
    os.close(writer)
    assert (process.returncode, out, error) == (130, "", "")


def test_no_effect_table_has_flags_of_both_kinds() -> None:
    made = parser.Parser(prog="x")
    flags.add_engine_flags(made)
    namespace = made.parse(["--disable-custom-all-reduce", "--compilation-config", "{}"])
    assert parser.given(namespace, "engine") == {
        "disable_custom_all_reduce": True,
        "compilation_config": {},
    }
    assert set(parser.given(namespace, "engine")) <= set(NO_EFFECT)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "max_tokenz": 5}', "line 1: `max_tokenz` is no sampling parameter"),
        ('{"prompt": "a", "max_tokens": -5}', "prompts.jsonl, line 1: `max_tokens` must be"),
        ("not json", "line 1 is not valid JSON"),
        ('{"prompt": "a", "best_of": 2}', "line 1: `best_of=2` is not supported"),
    ],
)
def test_mistakes_in_json_lines_are_not_ignored(
    llm: type[ScriptedLLM],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    assert main.main(["generate", "m", "--file", str(file)]) == 1
    assert message in capsys.readouterr().err
