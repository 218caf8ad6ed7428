"""Log-probabilities in the forms of OpenAI's two APIs and of vLLM's prompt_logprobs.

Pure functions of what the engine sent. Knows no bodies and no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.engine.tokenizer import Tokenizer
from paceline.server.messages import TokenLogprobs

_LOWEST = -9999.0  # JSON has no infinity; OpenAI's stand-in


def chat_logprobs(
    positions: Iterable[TokenLogprobs], count: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat choice: one entry a token, ``count`` candidates in each."""
    entries = []
    for position in positions:
        entry = _chat_token(position, 0, tokenizer)
        entry["top_logprobs"] = [
            _chat_token(position, place, tokenizer) for place in _top(position, count)
        ]
        entries.append(entry)
    return entries


def _chat_token(position: TokenLogprobs, place: int, tokenizer: Tokenizer) -> dict[str, Any]:
    text, token_id = position.texts[place], position.ids[place]
    # Part of a character has bytes, but no text.
    exact = tokenizer.token_bytes(False)[token_id] if tokenizer.is_byte_level else text.encode()
    return {
        "token": text,
        "logprob": _finite(position.logprobs[place]),
        "bytes": list(exact),
    }


def _top(position: TokenLogprobs, count: int) -> list[int]:
    """Places of the ``count`` most probable candidates, best first.

    The chosen token stands first whatever its rank, and is one of them only if its rank says so.
    """
    others = [p for p in range(1, len(position.ids)) if position.ids[p] != position.ids[0]]
    places = [0, *others] if position.ranks[0] <= count else others
    return sorted(places, key=lambda place: -position.logprobs[place])[:count]


class CompletionLogprobs:
    """``logprobs`` of a text completion's choice, built up token by token.

    A stream takes what has come since the last call of ``take``; text offsets go on.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_text(self, token: str) -> None:
        """A token without a log-probability: the first of a prompt."""
        self._add(token, None, None)

    def add(self, positions: Iterable[TokenLogprobs]) -> None:
        """Tokens with theirs."""
        for position in positions:
            value = _finite(position.logprobs[0])
            top: dict[str, float] = {position.texts[0]: value}
            for place in _top(position, self._count):
                top.setdefault(position.texts[place], _finite(position.logprobs[place]))
            self._add(position.texts[0], value, top)

    def _add(self, token: str, value: float | None, top: dict[str, float] | None) -> None:
        self._tokens.append(token)
        self._values.append(value)
        self._tops.append(top)
        self._offsets.append(self._offset)
        self._offset += len(token)

    def take(self) -> dict[str, Any]:
        """What has been added since the last call."""
        result = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._clear()
        return result


def prompt_logprobs(
    positions: Sequence[TokenLogprobs | None], count: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: a dictionary by token id for every position but the first."""
    return [
        None
        if position is None
        else {
            str(position.ids[place]): {
                "logprob": _finite(position.logprobs[place]),
                "rank": position.ranks[place],
                "decoded_token": position.texts[place],
            }
            for place in dict.fromkeys((0, *_top(position, count)))
        }
        for position in positions
    ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST
