"""The examples for the server run against a real one, with the demo pair."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
START = """
import sys
sys.path[:0] = [sys.argv[1]]
from serving import RunningServer
with RunningServer(enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A server in a process of its own, which ends with its standard input."""
    folder = str(EXAMPLES.parent / "tests" / "server")
    process = subprocess.Popen(
        [sys.executable, "-c", START, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip() + "/v1"
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def shown_by(
    name: str, base_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(sys, "argv", [name, base_url])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("openai_chat.py", "CompletionUsage(completion_tokens="),
        ("openai_stream.py", " tokens"),
        ("tools.py", ""),
    ],
)
def test_python_examples(
    name: str,
    last_line: str,
    base_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = shown_by(name, base_url, monkeypatch, capsys)
    assert last_line in shown.splitlines()[-1]


def test_json_schema(
    base_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shown_by("json_schema.py", base_url, monkeypatch, capsys)
    assert shown.startswith("surface=")


def test_curl(base_url: str) -> None:
    done = subprocess.run(
        ["sh", str(EXAMPLES / "curl.sh"), base_url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *_, completion, end = done.stdout.split("\n")
    assert end == ""
    assert json.loads(completion)["choices"][0]["text"] in ("blue", "grey", "dark")
    assert "data: [DONE]" in done.stdout
