"""A structure is tried out before a request relies on it: its masks, and the time they take.

Masks are made in the engine's steps, where a slow one holds up everybody; and a mask that allows
what the compiler's own matcher then refuses would let text out of its form. This file must not
know how structures are compiled.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

import numpy as np

from paceline.arrays import Int32Array
from paceline.errors import RequestError

# What a sequence may take in all: so much, and so much a token.
SPENT_SECONDS, MEAN_SECONDS = 1.0, 0.02
MASK_SECONDS = 0.25  # of processor time that one mask may take; most take microseconds
_TOKENS = 12  # of a text that is tried
_COMPARED = 3  # places at which every token of a mask is tried
_NOTHING = np.zeros(0, np.int32)


class Tried(Protocol):
    """One sequence's grammar; see ``SequenceGrammar``."""

    def accept(self, token_ids: Int32Array) -> None: ...

    def fill(self, drafts: Int32Array, words: Int32Array) -> int: ...

    def takes(self, token_id: int) -> bool:
        """Whether the id may come next; changes nothing."""


def try_out(
    grammar: Tried, name: str, vocab_size: int, ends: Collection[int], *, compare: bool
) -> None:
    """Walk some tokens into a structure, as a sequence would, at random but always the same.

    grammar: at its beginning. ends: ids that end a text. compare: also check masks against what the
    matcher takes, token by token, which takes a second for large vocabularies.

    Raises:
        RequestError: the structure, called ``name``, cannot be used.
    """
    rng = np.random.default_rng(0)
    words = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for place in range(_TOKENS):
        words[:] = 0
        start = time.thread_time()
        filled = grammar.fill(_NOTHING, words)
        if time.thread_time() - start > MASK_SECONDS:
            raise RequestError(too_slow(name, time.thread_time() - start))
        if filled < 0 and not place:
            raise RequestError(
                f"{name} allows no text that this model's tokenizer can spell. hint: look "
                "for a rule that only refers to itself, or for characters it does not know"
            )
        going_on = [i for i in ids_of(words[0], vocab_size) if i not in ends]
        if filled < 0 or not going_on:
            return
        if compare and place < _COMPARED and not all(map(grammar.takes, going_on)):
            raise RequestError(
                f"{name} cannot be enforced: the compiler's masks are wrong for it. hint: write a "
                "long repetition of characters as one of short ones, as in ([a-z ]{0,100}){0,4}"
            )
        grammar.accept(np.array([rng.choice(going_on)], np.int32))


def too_slow(name: str, seconds: float) -> str:
    """What to say of a structure whose masks take so long."""
    return (
        f"{name} cannot be used: working out which token may come next took {seconds:.2g} s, and "
        f"{MASK_SECONDS:g} s are allowed. hint: avoid repetitions of what may be empty or can be "
        "read in many ways"
    )


def ids_of(words: Int32Array, vocab_size: int) -> list[int]:
    """The ids that one mask allows, ascending; its last word may have bits of no id."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits).tolist()
