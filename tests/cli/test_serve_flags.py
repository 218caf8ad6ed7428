"""Flags of ``paceline serve`` as vLLM's users write them, and everything wrong in one message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.cli import main
from paceline.cli.serve import _parser
from paceline.engine_args import NO_EFFECT as ENGINE_NO_EFFECT
from paceline.errors import ConfigError
from paceline.server.environment import start_warnings
from paceline.server.network import listen
from paceline.server.settings import NO_EFFECT, ServerSettings

MODEL = "paceline/demo"
Made = list[tuple[dict[str, Any], ServerSettings]]


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and message."""
    try:
        status = main.main(["serve", *argv])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, capsys.readouterr().err


# ---- lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "origins"),
    [
        (["--allowed-origins", '["*"]'], ("*",)),
        (["--allowed-origins", '["http://a", "http://b"]', "http://c"], ("http://a", "http://b", "http://c")),
        (["--allowed-origins", "http://a", "--allowed-origins", "http://b"], ("http://a", "http://b")),
        (["--allowed-origins=[]"], ()),
    ],
)  # fmt: skip
def test_origins_may_be_a_json_list(words: list[str], origins: tuple[str, ...], made: Made) -> None:
    assert main.main(["serve", MODEL, *words]) == 0
    assert made[0][1].allowed_origins == origins


@pytest.mark.parametrize("text", ['["*"', "[1]", "[*]"])
def test_a_list_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = refusal([MODEL, "--allowed-origins", text], capsys)
    assert status == 2
    assert "is not a JSON list of texts" in message


# ---- what changes nothing ------------------------------------------------------------------------

UNCHANGED = [
    ["--allowed-methods", '["*"]'],
    ["--allowed-headers", '["*"]'],
    ["--api-server-count", "1"],
    ["-asc", "1"],
    ["--chat-template-content-format", "auto"],
    ["--disable-uvicorn-access-log"],
    ["--distributed-executor-backend", "mp"],
    ["--enable-prompt-tokens-details"],
    ["--guided-decoding-backend", "auto"],
    ["--guided-decoding-backend", "xgrammar"],
    ["--max-log-len", "100"],
    ["--no-enable-log-outputs"],
    ["--performance-mode", "balanced"],
    ["--data-parallel-backend", "mp"],
    ["--response-role", "assistant"],
    ["--structured-outputs-config", '{"backend": "xgrammar"}'],
    ["--uvicorn-log-level", "warning"],
]


@pytest.mark.parametrize("words", UNCHANGED, ids=" ".join)
def test_vllms_flags_that_change_nothing_are_taken(words: list[str], made: Made) -> None:
    assert main.main(["serve", MODEL, *words]) == 0
    assert made[0][1] == ServerSettings()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--allowed-methods", '["GET"]'], "may use any method. hint: put a proxy before"),
        (["--api-server-count", "4"], "there is one API process"),
        (["--no-disable-uvicorn-access-log"], "use `--access-log`"),
        (["--guided-decoding-backend", "outlines"], "have one backend, xgrammar"),
        (["--response-role", "bot"], "answers always have the role `assistant`"),
        (["--performance-mode", "throughput"], "`--max-num-seqs` and `--max-num-batched-tokens`"),
        (["--data-parallel-backend", "ray"], "several servers behind a proxy"),
        (["--enable-log-outputs"], "prompts and outputs are never logged"),
    ],
)
def test_what_they_would_change_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = refusal([MODEL, *words, "--port", "-1"], capsys)
    assert status == 1
    assert says in message.replace("\n  hint:", " hint:")


def test_no_name_has_two_meanings() -> None:
    own = {action.dest for action in _parser()._actions}
    assert not NO_EFFECT.keys() & ENGINE_NO_EFFECT.keys()
    assert not any(f"engine.{name}" in own for name in NO_EFFECT)


# ---- all at once ---------------------------------------------------------------------------------

WRONG = [
    *("--prot", "1", "--uds", "x", "--port", "70000", "--response-role", "user"),
    *("--max-num-seqs", "0", "--max-queue", "x", "--num-speculative-tokens", "y"),
    *("--tool-call-parser", "z", "--chat-template", "no.jinja", "--trust-remote-code"),
]
NAMED = [
    *("--prot", "--uds", "`port`", "response_role='user'", "`max_num_seqs`", "--max-queue"),
    *("--num-speculative-tokens", "`tool_call_parser`", "no.jinja", "trust_remote_code=True"),
]


def test_every_wrong_flag_is_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    status, message = refusal([MODEL, *WRONG], capsys)
    assert status == 2
    assert message.startswith(f"paceline: error: {len(NAMED)} problems:\n")
    assert all(name in message for name in NAMED)


def test_flags_without_a_value_are_said_with_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--api-key", "--port", "--max-num-seqs", "-1", "-tp", "--max-queue", "x", "--config"]
    assert main.main(["serve", MODEL, "--dry-run", "--json", *words]) == 1
    causes = [fault["cause"] for fault in json.loads(capsys.readouterr().out)["faults"]]
    assert causes[:4] == [
        f"`{one}` needs a value" for one in ("--api-key", "--port", "-tp", "--config")
    ]
    assert causes[4].startswith("--max-queue")
    assert len(causes) == 6  # a negative number is a value


def test_a_dry_run_reports_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", MODEL, "--dry-run", "--json", *WRONG]) == 1
    causes = [fault["cause"] for fault in json.loads(capsys.readouterr().out)["faults"]]
    assert len(causes) == len(NAMED)
    assert all(any(name in cause for cause in causes) for name in NAMED)


def test_a_dry_run_shows_the_servers_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    monkeypatch.setenv("VLLM_PORT", "1")
    with listen(ServerSettings(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        words = ["--port", str(port), "--api-key", "other", "--served-model-name", "a", "b"]
        assert main.main(["serve", MODEL, "--dry-run", "--json", *words]) == 0
    said = capsys.readouterr().out
    assert "secret" not in said
    report = json.loads(said)
    assert report["settings"]["port"] == port
    assert report["settings"]["api_key"] == 2
    assert report["settings"]["served_model_name"] == ["a", "b"]
    ignored, in_use = report["warnings"][-2:]
    assert "VLLM_PORT (use `--port`)" in ignored
    assert f"port {port} of 127.0.0.1 is taken by another program" in in_use


@pytest.mark.parametrize(
    ("host", "key", "is_open"),
    [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False), ("::1", "", False)],
)
def test_a_server_that_is_open_to_everybody(host: str, key: str, is_open: bool) -> None:
    warnings = start_warnings(ServerSettings(host=host), {"PACELINE_API_KEY": key})
    assert [warning.partition(" may")[0] for warning in warnings] == (
        [f"everybody who reaches {host}"] if is_open else []
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--tool-call-parser", "mistral", "--enable-auto-tool-choice"],
        ["--trust-remote-code", "false"],
        ["--trust-remote-code=false"],
        ["--skip-tokenizer-init"],
        ["--chat-template", ""],
        [
            *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
            *("--speculative-config.num_speculative_tokens", "5"),
        ],
    ],
)
def test_a_fault_has_no_second_one_behind_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", MODEL, "--dry-run", *words]) == 1
    said = capsys.readouterr().out
    assert said.startswith("Faults: 1\n")
    assert said.rstrip().endswith("Not OK: one fault, see above")


def test_a_missing_model_is_said_with_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--dry-run"]):
        status, message = refusal(["--port", "70000", *more], capsys)
        assert status == 2
        assert "2 problems" in message
        assert "`paceline serve MODEL`" in message
        assert "at most 65535" in message


def test_a_model_that_a_list_took(capsys: pytest.CaptureFixture[str]) -> None:
    status, message = refusal(["--api-key", "k", MODEL], capsys)
    assert status == 2
    assert "with MODEL before flags that take several values" in message
    assert "before flags" not in refusal(["--port", "1"], capsys)[1]


@pytest.mark.parametrize("command", [["check"], ["serve", "--dry-run"]])
@pytest.mark.parametrize("words", [["--foo", "no/such", MODEL], ["--foo", MODEL], [MODEL, "--foo"]])
def test_a_value_of_an_unknown_flag_is_no_model(
    command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*command, "--json", *words]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == MODEL
    assert [fault["cause"] for fault in report["faults"]] == ["unknown argument `--foo`"]


@pytest.mark.parametrize("command", ["generate", "bench", "check"])
def test_other_commands_know_the_servers_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main.main([command, MODEL, "--port", "1", "--no-restart-engine", "--foo"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status in (1, 2)
    output = capsys.readouterr()
    text = output.out + output.err
    assert "`--port` is a flag of `paceline serve`" in text
    assert "`--no-restart-engine` is a flag of `paceline serve`" in text
    assert "unknown argument `--foo`" in text


@pytest.mark.parametrize(
    "flag", ["--request-timeout", "--shutdown-timeout", "--engine-stall-timeout"]
)
def test_times_without_an_end_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = refusal([MODEL, flag, "1e400"], capsys)
    assert status == 1
    assert "must be a number of seconds, got inf" in message
    with pytest.raises(ConfigError, match="must be at least"):
        ServerSettings(**{flag[2:].replace("-", "_"): float("nan")})


def test_settings_without_what_is_wrong() -> None:
    settings, problems = ServerSettings.read(
        port=-1, max_queue=3, ssl_keyfile="x", api_key=("",), response_role="user", prot=1
    )
    assert settings == ServerSettings(max_queue=3)
    assert [problem.split("`")[1] for problem in problems] == [
        *("response_role='user'", "prot", "port", "api_key", "ssl_keyfile"),
    ]
    with pytest.raises(ConfigError, match="2 problems"):
        ServerSettings(port=-1, max_queue=-1)
