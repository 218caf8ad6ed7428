"""What a prompt may be, with vLLM's names for its forms. Standard library only.

from paceline import LLM, TokensPrompt
LLM(model="paceline/demo").generate(TokensPrompt(prompt_token_ids=[5, 6, 7]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text, which the engine tokenises."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: the text they stand for, repeated in the output as it is."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
