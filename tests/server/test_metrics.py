"""/metrics of a real server: counts equal what clients were told, through aborts and restarts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.serving import MODEL, RunningServer, wait_for

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


def test_the_documentation_names_every_metric(server: RunningServer) -> None:
    server.post("/v1/completions", prompt="def f", max_tokens=3)
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    assert all(family.documentation for family in families)
    text = DOCS.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `paceline:(\w+?)(?:_total)?` \|", text, re.MULTILINE))
    assert named == {family.name.removeprefix("paceline:") for family in families}
