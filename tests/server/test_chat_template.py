"""``--chat-template``: what is wrong with it is said before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.engine.chat import ChatTemplates
from paceline.errors import ConfigError
from paceline.server.chat_template import check_named, read_template
from server.serving import MODEL

GOOD = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATES = ChatTemplates({"default": GOOD, "rag": GOOD, "broken": "{% if %}"}, {})


def written(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "own.jinja"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_a_file_a_text_and_a_name_are_taken(tmp_path: Path) -> None:
    assert read_template(None) is None
    assert read_template(GOOD) == GOOD
    assert read_template(written(tmp_path, GOOD)) == GOOD
    assert read_template("rag") == "rag"
    for template in (None, GOOD, "rag"):
        check_named(template, TEMPLATES)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{{ a }}\n{{ m.content }\n", "has a mistake in line 2: unexpected '}'. hint: correct it"),
        ("{{ x | no_filter }}", "has a mistake in line 1: No filter named 'no_filter'. hint:"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "has a mistake that keeps it from being compiled"),
        ("plain text", "holds no Jinja: neither {{ nor {% is in it"),
        (b"\xff\xfe{{ x }}", "cannot be read"),
    ],
)
def test_a_file_that_is_no_template(content: str | bytes, says: str, tmp_path: Path) -> None:
    name = written(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        read_template(name)
    message = str(raised.value)
    assert says in message
    assert f"the chat template {name} " in message
    assert message.count("hint:") == 1


@pytest.mark.parametrize("given", ["own.jinja", "./own", "folder/own", "~/nothing/there"])
def test_a_file_that_is_not_there(given: str) -> None:
    with pytest.raises(ConfigError, match="there is no such file") as raised:
        read_template(given)
    assert f"`--chat-template {given}`" in str(raised.value)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a directory"):
        read_template(str(tmp_path))


def test_a_name_must_be_one_of_the_models() -> None:
    with pytest.raises(ConfigError, match=r"no chat template of that name .*default, rag"):
        check_named("ragg", TEMPLATES)
    with pytest.raises(ConfigError, match="the model's chat template `broken` has a mistake"):
        check_named("broken", TEMPLATES)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("own.jinja", "there is no such file"),
        ("no-such-name", "the model has no chat template of that name (it has: default)"),
        ("{{ x }", "`--chat-template` has a mistake in line 1"),
    ],
)
def test_start_and_dry_run_say_the_same(
    given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", MODEL, "--port", "0", "--max-model-len", "64", "--chat-template", given]
    assert main.main(argv) == 1
    assert says in capsys.readouterr().err
    assert main.main([*argv, "--dry-run", "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert says in fault["cause"]


def test_a_dry_run_looks_for_the_form_of_tool_calls(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", MODEL, "--dry-run", "--enable-auto-tool-choice"]
    assert main.main(argv) == 1
    assert "needs to know in which form the model writes calls" in capsys.readouterr().out
    assert main.main([*argv, "--tool-call-parser", "hermes"]) == 0
