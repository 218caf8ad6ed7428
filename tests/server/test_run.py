"""What a server finds out about its model before it serves."""

from __future__ import annotations

import logging

import pytest

from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError
from paceline.hub import local_directory
from paceline.server.run import find_tool_parser
from paceline.server.settings import ServerSettings
from server.serving import MODEL, RunningServer

HERMES = "{{ tools }} <tool_call> {% for message in messages %}{{ message.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = local_directory(MODEL)
    assert path is not None
    return Tokenizer.load(path)


def test_the_template_tells_the_tool_parser(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    auto = ServerSettings(enable_auto_tool_choice=True)
    with caplog.at_level(logging.INFO, "paceline"):
        assert find_tool_parser(auto, tokenizer, HERMES) == "hermes"
    named = ServerSettings(enable_auto_tool_choice=True, tool_call_parser="llama3_json")
    assert find_tool_parser(named, tokenizer, HERMES) == "llama3_json"
    assert find_tool_parser(ServerSettings(), tokenizer, HERMES) is None
    assert find_tool_parser(ServerSettings(tool_call_parser="hermes"), tokenizer, HERMES) is None


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "shows none that is known"),  # the demo model's own
        ("{{ messages }}", "shows none that is known"),
        ("no-such-name", "neither a Jinja template nor the name of one"),
    ],
)
def test_a_template_that_tells_none(
    template: str | None, problem: str, tokenizer: Tokenizer
) -> None:
    auto = ServerSettings(enable_auto_tool_choice=True)
    with pytest.raises(ConfigError, match=problem) as raised:
        find_tool_parser(auto, tokenizer, template)
    assert str(raised.value).count("hint:") == 1
    assert "`--tool-call-parser` (hermes, llama3_json)" in str(raised.value)


def test_tools_without_a_named_parser() -> None:
    with RunningServer(enable_auto_tool_choice=True, chat_template=HERMES) as server:
        messages = [{"role": "user", "content": "look"}]
        answer = server.post("/v1/chat/completions", messages=messages, tools=[TOOL], max_tokens=4)
        assert answer.status_code == 200
