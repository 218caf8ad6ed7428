"""The dashboard's page: its files, its data, and in a browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import httpx
import pytest

from server.serving import RunningServer, wait_for

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
FILES = {
    file.name: file.read_text()
    for file in (resources.files("paceline.server") / "dashboard").iterdir()
    if file.name.endswith((".html", ".css", ".js"))
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        running.post("/v1/completions", prompt="def f(x):\n", max_tokens=20, ignore_eos=True)
        wait_for(running.is_idle)
        wait_for(lambda: running.get("/dashboard/data").json()["samples"])
        yield running


def test_files_need_nothing_from_elsewhere() -> None:
    assert set(FILES) == {"index.html", "style.css", "app.js", "charts.js"}
    for name, text in FILES.items():
        text = text.replace('"http://www.w3.org/2000/svg"', "")  # a name, not an address
        assert not re.search(r"https?://|//[a-z]+\.|innerHTML|eval\(", text), name
    page = FILES["index.html"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src)", page)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == {"style.css", "app.js", "data:,"}
    asked = set(re.findall(r'\bat\("(\w+)"\)', FILES["app.js"]))
    assert asked <= set(re.findall(r'id="(\w+)"', page))


def test_files_are_served(server: RunningServer) -> None:
    for name, text in FILES.items():
        answer = server.get(f"/dashboard/{name}")
        assert answer.text == text
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert server.get("/dashboard/").text == FILES["index.html"]
    moved = server.get("/dashboard")
    assert (moved.status_code, moved.headers["location"]) == (307, "dashboard/")
    assert server.get("/dashboard/../app.py").status_code == 404
    assert server.get("/dashboard/__init__.py").status_code == 404


def test_data_has_what_the_page_reads(server: RunningServer) -> None:
    data = server.get("/dashboard/data").json()
    sample, request = data["samples"][-1], data["requests"][0]
    script = FILES["app.js"]
    for pattern, keys in (
        (r'of\("\w+", "(\w+)"\)', sample),
        (r'percentiles\(recent, "(\w+)"\)', sample),
        (r"sample\.(\w+)", {*sample}),
        (r"\bone\.(\w+)", request),
        (r"engine\.(\w+)", data["engine"]),
        (r"\bdata\.(\w+)", data),
    ):
        asked = set(re.findall(pattern, script))
        assert asked, pattern
        assert asked <= set(keys), pattern
    assert request["output_tokens"] == 20
    assert "def f" not in str(data)


def test_data_needs_the_key_and_the_page_does_not() -> None:
    with RunningServer(api_key=("secret",)) as server:
        assert server.get("/dashboard/").status_code == 200
        assert server.get("/metrics").status_code == 200
        assert server.get("/dashboard/data").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(server.url + "/dashboard/data", headers=headers).status_code == 200


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_it(server: RunningServer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=4000", "--dump-dom"]
    address = server.url + "/dashboard/"
    shown = subprocess.run(
        [CHROMIUM, *options, address], capture_output=True, text=True, timeout=60
    )
    page = shown.stdout
    assert "idle, up" in page
    assert "drafter paceline/demo-draft" in page
    assert page.count("<svg") == 7
    assert page.count("nothing yet") == 1  # no request was streamed
    assert "last minute: fixed 100%" in page
    assert "<td>completion</td>" in page.replace(' class=""', "")
    console = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
