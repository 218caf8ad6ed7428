"""``paceline serve`` as a process: start, signals, a killed engine, wrong flags."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import paceline
from paceline.cli import main
from server.certificates import CERTIFICATE, KEY, write
from server.serving import wait_for

SOURCE = Path(paceline.__file__).parents[1]
FLAGS = [
    *("--dtype", "float32", "--device", "cpu", "--max-model-len", "2048"),
    *("--max-num-seqs", "4", "--port", "0"),
]
LONG = {"prompt": "x", "ignore_eos": True, "stream": True, "seed": 1}


class Server:
    """A process of ``paceline serve``, with what it logs."""

    def __init__(self, *flags: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "serve", "paceline/demo", *FLAGS, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_until_serving(self) -> str:
        def url() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log
            return re.search(r"serving paceline/demo at (https?://[^/]+)/", self.log)

        wait_for(url, 60.0)
        found = url()
        assert found is not None
        return found[1]

    def end(self, seconds: float) -> int:
        """Its exit status."""
        status = self.process.wait(seconds)
        self._reader.join()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def running(*flags: str, **environment: str) -> Iterator[tuple[Server, str]]:
    server = Server(*flags, **environment)
    try:
        yield server, server.wait_until_serving()
    finally:
        server.close()


@contextmanager
def streaming(url: str, **body: Any) -> Iterator[Iterator[str]]:
    """Lines of a stream whose first event has come."""
    with (
        httpx.Client(timeout=60) as http,
        http.stream("POST", f"{url}/v1/completions", json={**LONG, **body}) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def children_of(server: Server) -> list[int]:
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_of(server: Server) -> int:
    """Process id of the engine: the server's child."""
    return children_of(server)[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish(number: signal.Signals) -> None:
    with running() as (server, url):
        with streaming(url, max_tokens=300) as lines:
            server.process.send_signal(number)
            wait_for(lambda: "shutting down: 1 outputs" in server.log)
            rest = list(lines)
            assert rest[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in rest[-2]
            time.sleep(0.2)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
        assert server.end(10) == 0
        assert "Traceback" not in server.log


def test_an_idle_server_speaks_of_no_outputs() -> None:
    with running() as (server, _):
        server.process.send_signal(signal.SIGTERM)
        assert server.end(10) == 0
        assert "shutting down: nothing is running" in server.log
        assert "in flight" not in server.log


def test_what_does_not_finish_in_time_is_ended() -> None:
    with running("--shutdown-timeout", "0.3") as (server, url):
        with streaming(url, max_tokens=2000) as lines:
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        last = json.loads(rest[-1].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down"
        assert server.end(10) == 0
        assert "1 outputs in flight are ended" in server.log
        assert "Traceback" not in server.log


def test_a_second_signal_ends_it_at_once() -> None:
    with running("--shutdown-timeout", "600") as (server, url), streaming(url, max_tokens=2000):
        engine = engine_of(server)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: "shutting down" in server.log)
        server.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert server.end(5) == main.INTERRUPTED
        assert time.monotonic() - began < 3.0
        wait_for(lambda: not Path(f"/proc/{engine}").exists(), 5.0)


def test_a_signal_while_the_engine_loads() -> None:
    server = Server()
    try:
        wait_for(lambda: children_of(server), 30.0)  # signals are handled before it is started
        server.process.send_signal(signal.SIGTERM)
        assert server.end(10) == 0
        assert "Traceback" not in server.log
        assert "serving" not in server.log
    finally:
        server.close()


def test_a_killed_engine_and_its_successor() -> None:
    """Begun streams end with an error event, waiting requests with a 503, and it comes back."""
    with running("--restart-engine") as (server, url):
        answers: list[httpx.Response] = []
        body = {**LONG, "stream": False, "max_tokens": 2000}
        waiting = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            )
        )
        with streaming(url, max_tokens=2000) as lines:
            waiting.start()
            wait_for(lambda: httpx.get(f"{url}/health").json().get("num_running") == 2)
            os.kill(engine_of(server), signal.SIGKILL)
            killed = time.monotonic()
            last = list(lines)[-1]
            waiting.join(10)
            assert time.monotonic() - killed < 1.0
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "engine_dead"
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert health.json()["status"] in ("dead", "starting")
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, 30.0)
        again = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3})
        assert again.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end(10) == 0


def test_keys_from_the_environment_stay_secret() -> None:
    with running("--api-key", "first", PACELINE_API_KEY="second") as (server, url):
        statuses = [
            httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
            for key in ("first", "second", "third")
        ]
        assert statuses == [200, 200, 401]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        log = server.log
        assert "2 API keys" in log
        assert not any(key in log for key in ("first", "second", "third"))


def test_vllms_key_closes_the_server_too() -> None:
    variables = {"PACELINE_API_KEY": "", "VLLM_API_KEY": "theirs", "VLLM_LOGGING_LEVEL": "quiet"}
    with running(**variables) as (server, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer theirs"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert server.log.count("VLLM_LOGGING_LEVEL (use `--access-log`") == 1
        assert "VLLM_API_KEY" not in server.log
        assert "quiet" not in server.log


def test_https_behind_a_path(tmp_path: Path) -> None:
    files = ["--ssl-certfile", write(tmp_path, "c", CERTIFICATE)]
    files += ["--ssl-keyfile", write(tmp_path, "k", KEY), "--root-path", "/llm"]
    with running(*files) as (server, url):
        assert f"at {url}/llm/v1" in server.log
        assert "Deprecat" not in server.log
        trusted = ssl.create_default_context(cafile=files[1])
        local = url.replace("127.0.0.1", "localhost")
        with httpx.Client(verify=trusted, base_url=local) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_prompts_are_not_logged() -> None:
    with running("--enable-log-requests", "--access-log") as (server, url):
        body = {"prompt": "a-secret-word", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        wait_for(lambda: "POST /v1/completions" in server.log)
        assert "prompt tokens, max_tokens 2" in server.log
        assert "secret" not in server.log


# ---- before anything is loaded -------------------------------------------------------------------


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        status = main.main(["serve", "paceline/demo", "--max-model-len", "64", "--port", str(port)])
        assert time.monotonic() - began < 5.0
    assert status == 1
    assert f"port {port} of 127.0.0.1 is taken by another program" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no model"),
        (["m", "--prot", "1"], "did you mean `--port`?"),
        (["paceline/demo", "paceline/demo"], "one model at a time"),
        (["paceline/demo", "--port", "70000"], "at most 65535"),
        (["paceline/demo", "--max-queue", "-1"], "`max_queue` must be at least 0"),
        (["paceline/demo", "--host", "no.such.host.invalid"], "there is no address"),
        (["paceline/demo", "--tool-call-parser", "x"], "`tool_call_parser` must be one of"),
        (["paceline/demo", "--port", "0", "--enable-auto-tool-choice"], "--tool-call-parser"),
        (["paceline/demo", "--ssl-keyfile", "x"], "needs both"),
        (["paceline/demo", "--ssl-keyfile", "x", "--ssl-certfile", "x"], "`ssl_certfile` x cannot"),
        (["paceline/demo", "--json"], "`--json` is there for `--dry-run` only"),
        (["paceline/demo", "--config", "none.toml"], "none.toml cannot be read"),
        (["paceline/demo", "--max-model-len", "-1"], "max_model_len"),
    ],
)
def test_wrong_flags_are_said_at_once(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main.main(["serve", *flags])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status in (1, 2)
    assert message in capsys.readouterr().err


def test_a_dry_run_is_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "paceline/demo", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("paceline.server.")]:
        if name != "paceline.server.settings":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main.main(["serve", "paceline/demo"]) == 1
    assert (
        'run `pip install -c constraints.txt -e ".[serve]"` in your clone'
        in capsys.readouterr().err
    )


def test_the_api_process_never_imports_torch() -> None:
    code = (
        "import sys\n"
        "import paceline.cli.serve, paceline.server.run\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
