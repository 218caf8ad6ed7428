"""A real server, asked over sockets by httpx and by the official OpenAI client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from paceline import LLM, SamplingParams
from server.serving import ENGINE, MAX_LEN, MODEL, RunningServer, wait_for

PROMPTS = ["def add(a, b):", "class Stack:\n    def", "import", "for i in range(", "# 日本語\nx ="]
MESSAGES: list[Any] = [{"role": "user", "content": "Write a loop."}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with RunningServer(per_request_spec_decode_metrics="detailed") as server:
            yield server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def offline(llm: LLM, prompt: Any, **sampling: Any) -> Any:
    return llm.generate([prompt], SamplingParams(**sampling), use_tqdm=False)[0].outputs


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON values of a stream, which must end with its mark."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ---- the same text as offline --------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
def test_completions_give_the_offline_text(
    server: RunningServer, llm: LLM, sampling: dict[str, Any]
) -> None:
    body = {"max_tokens": 24, **sampling}
    expected = [offline(llm, prompt, **body)[0] for prompt in PROMPTS]
    whole = server.post("/v1/completions", prompt=PROMPTS, **body).json()
    assert [choice["text"] for choice in whole["choices"]] == [one.text for one in expected]
    assert [choice["finish_reason"] for choice in whole["choices"]] == [
        one.finish_reason for one in expected
    ]
    counted = sum(len(one.token_ids) for one in expected)
    assert whole["usage"]["completion_tokens"] == counted
    streamed = events(server.post("/v1/completions", prompt=PROMPTS, stream=True, **body))
    texts = [""] * len(PROMPTS)
    for event in streamed:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [one.text for one in expected]


def test_chat_gives_the_offline_text(client: openai.OpenAI, llm: LLM) -> None:
    sampling = {"temperature": 0.9, "seed": 11, "max_tokens": 30}
    expected = llm.chat(MESSAGES, SamplingParams(**sampling), use_tqdm=False)[0].outputs[0]
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **sampling)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(expected.token_ids)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **sampling,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected.text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == [expected.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len(chunks) > 3


def test_several_outputs_are_those_of_offline(client: openai.OpenAI, llm: LLM) -> None:
    expected = offline(llm, PROMPTS[0], n=3, seed=5, max_tokens=16)
    whole = client.completions.create(model=MODEL, prompt=PROMPTS[0], n=3, seed=5, max_tokens=16)
    assert [choice.text for choice in whole.choices] == [one.text for one in expected]
    texts = [""] * 3
    for chunk in client.completions.create(
        model=MODEL, prompt=PROMPTS[0], n=3, seed=5, max_tokens=16, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in expected]


def test_the_asynchronous_client(server: RunningServer, llm: LLM) -> None:
    seeds = range(20, 28)
    expected = [offline(llm, PROMPTS[seed % 5], seed=seed, max_tokens=12)[0].text for seed in seeds]

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt=PROMPTS[seed % 5], seed=seed, max_tokens=12, stream=True
                )
                return "".join([c.choices[0].text async for c in stream if c.choices])

            return await asyncio.gather(*map(one, seeds))

    assert asyncio.run(main()) == expected


def test_one_event_a_stream_and_step_however_many_tokens(server: RunningServer) -> None:
    """Accepted drafts come in one event; none is lost."""
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    response = server.post(
        "/v1/completions",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **body,
    )
    counts = [event["usage"]["completion_tokens"] for event in events(response)]
    assert counts[-1] == 60
    assert counts == sorted(counts)
    assert len(counts) < 60


def test_ids_as_prompts_echo_and_logprobs(server: RunningServer, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    body = {"temperature": 0, "max_tokens": 8}
    (expected,) = offline(llm, PROMPTS[0], logprobs=2, **body)
    answer = server.post("/v1/completions", prompt=ids, echo=True, logprobs=2, **body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPTS[0] + expected.text
    assert len(choice["logprobs"]["tokens"]) == len(ids) + len(expected.token_ids)
    drafts = answer["metrics"]["speculative_decoding"]
    accepted, drafted = drafts["per_step_accepted"], drafts["per_step_drafted"]
    assert all(0 <= a <= d <= 3 for a, d in zip(accepted, drafted, strict=True))
    assert sum(accepted) == drafts["num_accepted_draft_tokens"]
    assert sum(drafted) == drafts["num_draft_tokens"] > 0
    assert len(accepted) == drafts["num_spec_steps"] == sum(drafts["acceptance_histogram"])


def test_a_repeated_prompt_is_found_in_the_cache(server: RunningServer) -> None:
    body = {"prompt": "x = [" + "1, " * 60, "max_tokens": 2, "temperature": 0}
    first, second = (server.post("/v1/completions", **body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens"] == second["prompt_tokens"] > 32
    assert second["prompt_tokens_details"]["cached_tokens"] >= 32


# ---- the small endpoints -------------------------------------------------------------------------


def test_models_version_health_tokens(server: RunningServer, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == MAX_LEN
    assert client.models.retrieve(MODEL).id == MODEL
    assert server.get("/version").json()["version"]
    assert server.get("/ping").status_code == 200
    tokens = server.post("/tokenize", prompt=PROMPTS[4]).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == MAX_LEN
    assert server.post("/detokenize", tokens=tokens["tokens"]).json()["prompt"] == PROMPTS[4]
    wait_for(server.is_idle)


# ---- what clients do wrong -----------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 5000}, "max_tokens"),
    ({"prompt": [5] * 600}, "prompt"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 5000}, ""),
    ({"prompt": "x", "logprobs": 50}, ""),
    ({"prompt": "x", "logit_bias": {"999999": 1}}, ""),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "seed": 2**70}, "seed"),
    ({"prompt": "x", "temprature": 1}, "temprature"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "structured_outputs": {"regex": "(("}}, ""),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_a_400_that_says_why(
    server: RunningServer, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = server.post("/v1/completions", stream=stream, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert len(error["message"]) > 10
    if param:
        assert error["param"] == param
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"content": "x"}],
        ["x"],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": 5}],
    ],
)
def test_wrong_messages_are_a_400(server: RunningServer, messages: Any) -> None:
    response = server.post("/v1/chat/completions", messages=messages, max_tokens=2)
    assert response.status_code == 400, response.text


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model `gpt-x`"):
        client.chat.completions.create(model="gpt-x", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL, prompt=[5] * 600)


# ---- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_closed_connection_frees_everything(server: RunningServer, stream: bool, n: int) -> None:
    wait_for(server.is_idle)
    body = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": stream, "n": n}
    data = json.dumps(body).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
            + str(len(data)).encode()
            + b"\r\n\r\n"
            + data
        )
        wait_for(lambda: server.get("/health").json()["num_running"] == n)
    assert wait_for(server.is_idle) < 2.0
    wait_for(lambda: server.serving.client.num_in_flight == 0)


def test_a_reader_that_stops_reading_holds_up_nobody(server: RunningServer) -> None:
    """Its text waits, in few pieces; others are served, and it gets all of it in the end."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "seed": 3}
    expected = server.post("/v1/completions", **body)
    with (
        httpx.Client(timeout=60) as http,
        http.stream("POST", f"{server.url}/v1/completions", json=body) as slow,
    ):
        lines = slow.iter_lines()
        first = next(lines)
        assert server.post("/v1/completions", prompt="y", max_tokens=20).status_code == 200
        wait_for(server.is_idle)
        got = [first, *lines]
    texts = [
        "".join(json.loads(line[6:])["choices"][0]["text"] for line in whole if line[6:7] == "{")
        for whole in (got, expected.text.splitlines())
    ]
    assert texts[0] == texts[1]


# ---- many at once --------------------------------------------------------------------------------


def mixed_request(server: RunningServer, number: int) -> int:
    """One of many kinds; its status, 0 where the client left."""
    prompt, kind = PROMPTS[number % 5], number % 8
    if kind == 0:
        return server.post("/v1/completions", prompt=prompt, max_tokens=number % 30 + 1).status_code
    if kind == 1:
        return server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=9).status_code
    if kind == 2:
        body = {"prompt": prompt, "max_tokens": 20, "stream": True}
        return len(events(server.post("/v1/completions", **body))) and 200
    if kind == 3:
        return server.post("/v1/completions", prompt=[-1]).status_code
    if kind == 4:
        body = {"prompt": prompt, "max_tokens": 300, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as left:
            next(left.iter_raw())
        return 0
    if kind == 5:
        return httpx.post(f"{server.url}/v1/chat/completions", content=b"{", timeout=60).status_code
    if kind == 6:
        return server.post("/v1/completions", prompt=prompt * 20, n=2, max_tokens=5).status_code
    return server.post(
        "/v1/completions", prompt=prompt, max_tokens=8, logprobs=2, presence_penalty=1.0
    ).status_code


def test_many_mixed_requests_at_once(server: RunningServer) -> None:
    count = 192
    with ThreadPoolExecutor(64) as pool:
        statuses = list(pool.map(lambda number: mixed_request(server, number), range(count)))
    expected = {0: 200, 1: 200, 2: 200, 3: 400, 4: 0, 5: 400, 6: 200, 7: 200}
    assert statuses == [expected[number % 8] for number in range(count)]
    wait_for(server.is_idle)
    assert server.serving.client.num_in_flight == 0
