"""Many mixed requests at once: no fault of ours, no wrong text, no block or memory lost."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import LLM, SamplingParams
from server.serving import ENGINE, MAX_LEN, RunningServer, wait_for

CONCURRENT = 64
PROMPTS = [
    f"def {name}(x):\n    " for name in ("read", "write", "parse", "sum_of", "close", "find")
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Write a function."}]
BAD = [
    {"content": b"{"},
    {"json": {"prompt": "a", "temprature": 1}},
    {"json": {"prompt": "a", "max_tokens": -1}},
    {"json": {"prompt": [10**9]}},
    {"json": {"prompt": "a " * 5000}},
    {"json": {"prompt": "a", "structured_outputs": {"json": {"type": "nothing"}}}},
]


def greedy(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


class Load:
    """A reproducible mix; ``seen`` counts responses by kind and status."""

    def __init__(self, url: str, texts: dict[str, str], count: int) -> None:
        self.url = url
        self.texts = texts
        self.seen: Counter[tuple[str, int]] = Counter()
        self._rng = random.Random(1)
        self._left = count

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=CONCURRENT)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._worker(client) for _ in range(CONCURRENT)))

    async def _worker(self, client: httpx.AsyncClient) -> None:
        kinds = [self.whole, self.streamed, self.aborted, self.bad, self.several, self.long]
        kinds += [self.schema, self.tools, self.chat]
        while self._left > 0:
            self._left -= 1
            kind = self._rng.choice(kinds)
            self.seen[kind.__name__, await kind(client)] += 1

    async def whole(self, client: httpx.AsyncClient) -> int:
        prompt = self._rng.choice(PROMPTS)
        answer = await client.post("/v1/completions", json=greedy(prompt, 24))
        assert answer.json()["choices"][0]["text"] == self.texts[prompt]
        return answer.status_code

    async def streamed(self, client: httpx.AsyncClient) -> int:
        prompt = self._rng.choice(PROMPTS)
        text = ""
        body = greedy(prompt, 24, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == self.texts[prompt]
        return stream.status_code

    async def aborted(self, client: httpx.AsyncClient) -> int:
        body = {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "stream": True}
        events = self._rng.randrange(6)
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            async for _ in stream.aiter_lines():
                events -= 1
                if events <= 0:
                    break
        return stream.status_code

    async def bad(self, client: httpx.AsyncClient) -> int:
        answer = await client.post("/v1/completions", **self._rng.choice(BAD))
        assert answer.json()["error"]["message"]
        return answer.status_code

    async def several(self, client: httpx.AsyncClient) -> int:
        body = {"prompt": PROMPTS[:2], "n": 2, "logprobs": 2, "seed": 3, "max_tokens": 8}
        answer = await client.post("/v1/completions", json=body)
        assert len(answer.json()["choices"]) == 4
        return answer.status_code

    async def long(self, client: httpx.AsyncClient) -> int:
        ids = [self._rng.randrange(300) for _ in range(MAX_LEN - 20)]
        body = {"prompt": ids, "max_tokens": 12, "stop": ["\n\n"], "presence_penalty": 0.5}
        return (await client.post("/v1/completions", json=body)).status_code

    async def schema(self, client: httpx.AsyncClient) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        body = {"messages": MESSAGES, "response_format": form, "max_tokens": 60}
        answer = await client.post("/v1/chat/completions", json=body)
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"a"}
        return answer.status_code

    async def tools(self, client: httpx.AsyncClient) -> int:
        body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40}
        return (await client.post("/v1/chat/completions", json=body)).status_code

    async def chat(self, client: httpx.AsyncClient) -> int:
        body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0.8, "top_p": 0.9}
        return (await client.post("/v1/chat/completions", json=body)).status_code


def resident_bytes(pid: int | str) -> int:
    """Memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize(
    "count", [300, pytest.param(5000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_mixed_requests(count: int) -> None:
    options = {**ENGINE, "max_num_seqs": 16, "disable_log_stats": True}
    with LLM(**options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=24)
        outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
        texts = {prompt: o.outputs[0].text for prompt, o in zip(PROMPTS, outputs, strict=True)}
    engine = {"max_num_seqs": 16, "num_gpu_blocks_override": 160}  # too few for 16 long ones
    with RunningServer(engine, max_queue=200) as server:
        pid = server.serving.client.pid
        assert pid is not None
        held = []
        for _ in range(4):
            load = Load(server.url, texts, count // 4)
            asyncio.run(load.run())
            wait_for(server.is_idle)
            time.sleep(2.5)  # idle for a second, it gives freed memory back
            held.append((resident_bytes(pid), resident_bytes("self")))
            statuses = {status for _, status in load.seen}
            assert statuses <= {200, 400}, load.seen
            assert {kind for kind, status in load.seen if status == 400} <= {"bad", "tools"}
            assert load.seen["bad", 200] == 0
            assert load.seen["schema", 200] > 0
        assert server.serving.client.pid == pid  # nothing ended it
        assert server.serving.client.num_in_flight == 0
    grown = [now - before for before, now in zip(held[-2], held[-1], strict=True)]
    assert max(grown) < 32 << 20, held
