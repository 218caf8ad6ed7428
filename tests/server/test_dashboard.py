"""The dashboard's page: its files, its arithmetic and its data, without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.dashboard_page import REASONS, document
from server.serving import RunningServer, wait_for

NODE = shutil.which("node")
FILES = {
    file.name: file.read_text(encoding="utf-8")
    for file in (resources.files("paceline.server") / "dashboard").iterdir()
    if file.name.endswith((".html", ".css", ".js"))
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        running.post("/v1/completions", prompt="def f(x):\n", max_tokens=20, ignore_eos=True)
        wait_for(running.is_idle)
        wait_for(lambda: any(one["k"] for one in dashboard_data(running)["samples"]))
        yield running


def dashboard_data(server: RunningServer) -> dict[str, Any]:
    data: dict[str, Any] = server.get("/dashboard/data").json()
    return data


# ---- files ---------------------------------------------------------------------------------------


def test_files_need_nothing_from_elsewhere() -> None:
    for name, text in FILES.items():
        text = text.replace('"http://www.w3.org/2000/svg"', "")  # a name, not an address
        assert not re.search(r"https?:|['\"(]//|@import|url\(", text), name


def test_nothing_is_inline_and_no_data_becomes_markup() -> None:
    page = FILES["index.html"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src)", page)
    markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\.style\b"
    for name, text in SCRIPTS.items():
        assert not re.search(markup, text), name


def test_every_file_is_used_and_every_used_file_is_there() -> None:
    used = set(re.findall(r'(?:src|href)="([^"]+)"', FILES["index.html"])) - {"data:,"}
    for text in SCRIPTS.values():
        imported = re.findall(r'from "\./(\w+\.js)"', text)
        assert len(imported) == len(re.findall(r"^(?:import|\} from)\b.*from", text, re.M))
        used |= set(imported)
    assert used | {"index.html"} == set(FILES)


def test_scripts_find_their_elements_and_tones() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', FILES["index.html"]))
    asked = set(re.findall(r'\bat\("([\w-]+)"\)', "".join(SCRIPTS.values())))
    charts = set(re.findall(r"^  (\w+): (?:\[|percentiles)", SCRIPTS["panels.js"], re.M))
    assert {"throughput", "k", "itl"} <= charts
    assert asked | charts <= ids
    named = set(re.findall(r'aria-labelledby="([\w-]+)"|for="([\w-]+)"', FILES["index.html"]))
    assert {name for pair in named for name in pair if name} <= ids
    tones = set(re.findall(r'"([tp]\d)"', SCRIPTS["panels.js"])) | {
        f"r{i}" for i in range(len(REASONS) + 1)
    }
    assert all(f".{tone} {{ --tone: var(--{tone});" in FILES["style.css"] for tone in tones)


def test_known_reasons_are_what_the_engine_says() -> None:
    listed = re.search(r"const REASONS = \[(.*?)\];", SCRIPTS["panels.js"], re.S)
    assert listed is not None
    assert re.findall(r'"([^"]+)"', listed[1]) == REASONS
    told = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    reasons = re.search(r"- \*\*Reasons\.\*\*(.*)", told)
    assert reasons is not None
    assert all(f"`{reason}`" in reasons[1] for reason in REASONS)


# ---- arithmetic ----------------------------------------------------------------------------------

EXPECTED = {
    "short(null)": "–",
    "short(NaN)": "–",
    "short(0)": "0",
    "short(6)": "6",
    "short(0.1234)": "0.12",
    "short(9.996)": "10.0",
    "short(99.96)": "100",
    "short(9999)": "9999",
    "short(9999.7)": "10.0k",
    "short(123456)": "123k",
    "short(999600)": "1.00M",
    "count(1234567)": "1\u2009234\u2009567",
    "count(999)": "999",
    "count(null)": "–",
    "percent(0)": "0 %",
    "percent(0.0312)": "3.1 %",
    "percent(0.996)": "100 %",
    "percent(null)": "–",
    "latency(0.00042)": "0.42 ms",
    "latency(0.0199)": "19.9 ms",
    "latency(0.9996)": "1.00 s",
    "latency(42)": "42.0 s",
    "latency(undefined)": "–",
    "age(-1)": "0 s",
    "age(119.9)": "119 s",
    "age(120)": "2 min",
    "age(7391)": "2 h 3 min",
    "age(200000)": "2 days",
    "plain('10.0k')": "10k",
    "plain('1.50 s')": "1.5 s",
    "plain('100 %')": "100 %",
    "plain('0.05')": "0.05",
    "ticks(8683, 4)": [0, 2000, 4000, 6000, 8000],
    "ticks(1, 1)": [0, 1],
    "ticks(25000, 1)": [0, 20000],
    "ticks(3.2, 2, true)": [0, 2],
    "ticks(1.06, 3, true)": [0, 1],
    "ticks(0.5, 3, true)": [0],
    "draftLengths({})": None,
    "draftLengths({'5': 0})": None,
    "draftLengths({'0': 1, '5': 3, '9': 0})": {"mean": 3.75, "least": 0, "largest": 5},
    "share({}, ['a'])": None,
    "share({'a': 1, 'b': 3}, ['b', 'c'])": 0.75,
    "nearest([], 3)": None,
    "nearest([{t: 1}, {t: 2}, {t: 4}], 2.9)": {"t": 2},
}


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_arithmetic_of_the_page() -> None:
    assert NODE is not None
    script = SCRIPTS["format.js"] + f"console.log(JSON.stringify([{', '.join(EXPECTED)}]));"
    command = [NODE, "--input-type=module", "-"]
    run = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert dict(zip(EXPECTED, json.loads(run.stdout), strict=True)) == EXPECTED


# ---- what the server sends -----------------------------------------------------------------------


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


def test_data_has_the_form_of_the_document_that_the_page_is_tested_with(
    server: RunningServer,
) -> None:
    data, made = dashboard_data(server), document()
    assert set(made) == set(data)
    assert set(made["engine"]) == set(data["engine"])
    assert set(made["samples"][-1]) == set(data["samples"][-1])
    assert set(made["positions"][0]) == set(data["positions"][0])
    assert set(made["requests"][0]) == set(data["requests"][0])
    for sample in data["samples"]:
        assert set(sample["reasons"]) <= set(REASONS)
        assert all(k.isdigit() for k in sample["k"])


def test_data_has_what_the_page_reads() -> None:
    made = document()
    panels, requests = SCRIPTS["panels.js"], SCRIPTS["requests.js"]
    for found, keys in (
        (re.findall(r'series\("[^"]+", "\w+", "\w*", \w+, "(\w+)"\)', panels), made["samples"][-1]),
        (re.findall(r'percentiles\("(\w+)"\)', panels), made["samples"][-1]),
        (re.findall(r"\bsample\.(\w+)", panels), made["samples"][-1]),
        (re.findall(r"mark: \(\{ (\w+) \}\)", panels), made["engine"]),
        (re.findall(r"of: \(\{ (\w+) \}\)", requests), made["requests"][0]),
    ):
        assert found
        assert set(found) <= set(keys)
    optional = {"spec_policy"}  # shown if there is one
    assert set(re.findall(r"engine\.(\w+)", SCRIPTS["app.js"])) <= {*made["engine"], *optional}


def test_data_tells_nothing_of_what_was_said(server: RunningServer) -> None:
    data = dashboard_data(server)
    assert data["requests"][0]["output_tokens"] == 20
    assert "def f" not in str(data)


def test_data_needs_the_key_and_the_page_does_not() -> None:
    with RunningServer(api_key=("secret",)) as server:
        assert all(server.get(f"/dashboard/{name}").status_code == 200 for name in ("", *FILES))
        assert server.get("/metrics").status_code == 200
        assert server.get("/dashboard/data").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(server.url + "/dashboard/data", headers=headers).status_code == 200
