"""/metrics of a real server: counts equal what clients were told, through aborts and restarts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from paceline.server.app import make_app
from server.serving import MODEL, RunningServer, StubClient, stub_api, wait_for

DOCS = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


def scrape(server: RunningServer) -> dict[tuple[str, str], float]:
    """Values by name and by the labels besides the model's."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            key = sample.name.removeprefix("paceline:"), ",".join(labels.values())
            found[key] = sample.value
    return found


def grown(server: RunningServer, before: dict[tuple[str, str], float], name: str) -> float:
    """How much a metric without further labels has grown, once the engine is idle."""
    wait_for(server.is_idle)
    return scrape(server)[name, ""] - before.get((name, ""), 0.0)


def test_counts_are_those_of_the_answers(server: RunningServer) -> None:
    before = scrape(server)
    prompts = output = 0
    for i in range(4):
        answer = server.post("/v1/completions", prompt="def f" * (i + 1), max_tokens=5 + i, seed=i)
        usage = answer.json()["usage"]
        prompts, output = prompts + usage["prompt_tokens"], output + usage["completion_tokens"]
    body = {"prompt": "import os\n", "max_tokens": 12, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("data: {")]
    usage = httpx.Response(200, text=events[-1][6:]).json()["usage"]
    prompts, output = prompts + usage["prompt_tokens"], output + usage["completion_tokens"]
    assert grown(server, before, "prompt_tokens_total") == prompts
    assert grown(server, before, "generation_tokens_total") == output
    assert grown(server, before, "time_to_first_token_seconds_count") == 5
    assert grown(server, before, "e2e_request_latency_seconds_count") == 5
    assert grown(server, before, "request_queue_time_seconds_count") == 5
    assert grown(server, before, "request_prompt_tokens_sum") == prompts
    assert grown(server, before, "request_generation_tokens_sum") == output
    # One a step of the streamed request after its first.
    assert grown(server, before, "inter_token_latency_seconds_count") == len(events) - 2
    now = scrape(server)
    assert now["kv_cache_usage_perc", ""] == 0
    accepted = [v for (name, _), v in now.items() if name.endswith("accepted_tokens_per_pos_total")]
    assert sum(accepted) == now["spec_decode_num_accepted_tokens_total", ""] > 0
    assert now["spec_decode_choices_total", "3,fixed"] > 0
    assert now["http_responses_total", "/v1/completions,200"] >= 5


def test_several_outputs_and_prefix_hits_count_as_in_usage(server: RunningServer) -> None:
    before = scrape(server)
    prompts = output = cached = 0
    body = {"prompt": ["y = [" + "2, " * 50, "z"], "n": 2, "max_tokens": 7, "ignore_eos": True}
    for _ in range(2):
        usage = server.post("/v1/completions", **body).json()["usage"]
        prompts, output = prompts + usage["prompt_tokens"], output + usage["completion_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
    assert output == 2 * 2 * 2 * 7
    assert cached >= 32
    assert grown(server, before, "prompt_tokens_total") == prompts
    assert grown(server, before, "generation_tokens_total") == output
    assert grown(server, before, "prefix_cache_queries_total") == prompts
    assert grown(server, before, "prefix_cache_hits_total") == cached
    assert grown(server, before, "e2e_request_latency_seconds_count") == 4  # one a prompt
    key = "request_success_total", "length"
    assert scrape(server)[key] - before[key] == 8  # one an output


def test_times_are_those_a_client_sees(server: RunningServer) -> None:
    before = scrape(server)
    body = {"prompt": "import sys\n", "max_tokens": 40, "stream": True, "ignore_eos": True}
    began = time.monotonic()
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        first = time.monotonic() - began
        for _ in lines:
            pass
    total = time.monotonic() - began
    seen = {
        name: grown(server, before, name + "_seconds_sum")
        for name in (
            "time_to_first_token",
            "e2e_request_latency",
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "inter_token_latency",
            "request_time_per_output_token",
        )
    }
    assert 0 < seen["time_to_first_token"] < first
    assert first - seen["time_to_first_token"] < 0.25  # connecting, and two threads on few cores
    assert seen["time_to_first_token"] < seen["e2e_request_latency"] < total
    engine = seen["request_queue_time"] + seen["request_inference_time"]
    assert engine < seen["e2e_request_latency"]
    parts = seen["request_prefill_time"] + seen["request_decode_time"]
    assert parts == pytest.approx(seen["request_inference_time"])
    assert seen["request_time_per_output_token"] == pytest.approx(seen["request_decode_time"] / 39)
    events = seen["time_to_first_token"] + seen["inter_token_latency"]
    assert events == pytest.approx(seen["e2e_request_latency"], abs=0.01)


def test_aborted_and_refused_requests(server: RunningServer) -> None:
    before = scrape(server)
    body = {"prompt": "x = 1\n", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    assert server.post("/v1/completions", prompt="a", temperature=-1).status_code == 400
    wait_for(server.is_idle)
    now = scrape(server)
    key = "request_success_total", "abort"
    assert now[key] - before.get(key, 0) == 1
    key = "http_responses_total", "/v1/completions,400"
    assert now[key] - before.get(key, 0) == 1
    assert server.get("/nowhere").status_code == 404
    assert scrape(server)["http_responses_total", "other,404"] >= 1


def test_totals_survive_the_engine() -> None:
    with RunningServer(restart_engine=True) as server:
        server.post("/v1/completions", prompt="def f", max_tokens=9, ignore_eos=True)
        wait_for(server.is_idle)
        before = scrape(server)
        assert before["generation_tokens_total", ""] == 9
        pid = server.serving.client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: scrape(server)["engine_up", ""] == 0)
        assert scrape(server)["generation_tokens_total", ""] == 9
        wait_for(server.is_idle, 60)
        server.post("/v1/completions", prompt="def f", max_tokens=4, ignore_eos=True)
        assert grown(server, before, "generation_tokens_total") == 4


def test_what_is_refused_for_its_key_counts_for_its_route() -> None:
    api = stub_api(StubClient())

    async def main() -> None:
        transport = httpx.ASGITransport(make_app(api, ("secret",)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/v1/nothing")).status_code == 401
            assert (await http.get("/metrics")).status_code == 200

    asyncio.run(main())
    assert api.observer.responses == {
        ("/v1/models", 401): 1,
        ("other", 401): 1,
        ("/metrics", 200): 1,
    }


def test_histograms_are_cumulative_and_complete(server: RunningServer) -> None:
    server.post("/v1/completions", prompt="def f", max_tokens=3)
    families = text_string_to_metric_families(server.get("/metrics").text)
    histograms = [family for family in families if family.type == "histogram"]
    assert len(histograms) == 10
    for family in histograms:
        counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
        (total,) = (s.value for s in family.samples if s.name.endswith("_count"))
        assert counts == sorted(counts)
        assert counts[-1] == total
        assert family.samples[len(counts) - 1].labels["le"] == "+Inf"


def test_openmetrics_where_it_is_asked_for(server: RunningServer) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(server.url + "/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(answer.text)}
    assert {"paceline:prompt_tokens", "paceline:time_to_first_token_seconds"} <= names


def test_the_documentation_names_every_metric(server: RunningServer) -> None:
    server.post("/v1/completions", prompt="def f", max_tokens=3)
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    assert all(family.documentation for family in families)
    text = DOCS.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `paceline:(\w+?)(?:_total)?` \|", text, re.MULTILINE))
    assert named == {family.name.removeprefix("paceline:") for family in families}
