"""What the tests of wire forms share: a context, deltas, ways to cut a text."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tiny_model import build_tokenizer

from paceline.engine.tokenizer import Tokenizer
from paceline.server.convert import ServingContext
from paceline.server.messages import Delta, TokenLogprobs

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinks %}{{- '<think>\\n' }}{%- endif %}
    {%- if reasoning_effort %}{{- 'effort: ' + reasoning_effort }}{%- endif %}
{%- endif %}"""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer(), {"chat_template": TEMPLATE}, Path("nowhere"))


def context(**changes: Any) -> ServingContext:
    values: dict[str, Any] = {
        "tokenizer": tokenizer(),
        "model_name": "tiny",
        "max_model_len": 512,
        "vocab_size": tokenizer().vocab_size,
    }
    return ServingContext(**{**values, **changes})


def position(token: str, *others: str) -> TokenLogprobs:
    """Candidates of one place as the engine sends them: the chosen one, then the most probable
    ones, best first, without the chosen one if it is among them."""
    ranks = {text: rank for rank, text in enumerate(others, 1)}
    rank = ranks.setdefault(token, len(others) + 1)
    texts = [token, *(text for text in others if text != token)]
    values = [0.5 - ranks[text] for text in texts]
    ids = [tokenizer().encode(text)[0] for text in texts]
    return TokenLogprobs(ids, values, [rank, *(ranks[text] for text in texts[1:])], texts)


def delta(text: str = "", *, name: str = "r", tokens: int = 1, **fields: Any) -> Delta:
    values: dict[str, Any] = {
        "request_id": name,
        "index": 0,
        "text": text,
        "token_ids": list(range(tokens)),
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 3,
        "prompt_logprobs": None,
        "speculative": None,
        "times": None,
        "error": None,
    }
    return Delta(**{**values, **fields})


def chunks(stream: bytes) -> list[dict[str, Any]]:
    """The JSON values of a whole stream, which ends as it must."""
    *events, done, rest = stream.split(b"\n\n")
    assert done == b"data: [DONE]"
    assert rest == b""
    assert all(event.startswith(b"data: ") for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    """A text in pieces, some of them empty."""
    text = draw(texts)
    places = draw(st.lists(st.integers(0, len(text)), max_size=12))
    borders = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]
