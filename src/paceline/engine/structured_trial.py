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

# Of processor time that the outputs of a request may take in all: so much, and for each token of
# the longest so much, or so much an output.
SPENT_SECONDS, MEAN_SECONDS, EACH_SECONDS = 1.0, 0.02, 0.001
MASK_SECONDS = 0.25  # of processor time that one mask may take; most take microseconds
_TOKENS = 12  # of a text that is tried
_COMPARED = 3  # places at which every token of a mask is tried
_NOTHING = np.zeros(0, np.int32)


class Tried(Protocol):
    """One sequence's grammar; see ``SequenceGrammar``."""

    fault: str | None

    def accept(self, token_ids: Int32Array) -> None: ...

    def fill(self, drafts: Int32Array, words: Int32Array) -> int: ...

    def takes(self, token_id: int) -> bool:
        """Whether the id may come next; changes nothing."""


class Budget:
    """Processor time that a request's outputs have taken together, while everybody waited.

    num_outputs: of the request.
    """

    def __init__(self, num_outputs: int) -> None:
        self._each_step = max(MEAN_SECONDS, EACH_SECONDS * num_outputs)
        self._spent = 0.0
        self._num_tokens = 0  # of the longest output

    def charge(self, seconds: float, num_tokens: int) -> None:
        """An output of ``num_tokens`` so far has taken more."""
        self._spent += seconds
        self._num_tokens = max(self._num_tokens, num_tokens)

    @property
    def fault(self) -> str | None:
        """What to say when too much was taken: a structure that can be read in many ways may begin
        fast and get slower with every token."""
        allowed = SPENT_SECONDS + self._each_step * self._num_tokens
        if self._spent <= allowed:
            return None
        return (
            f"the structure took {self._spent:.2g} s for {self._num_tokens} tokens, and "
            f"{allowed:.2g} s are allowed. hint: avoid rules that can be read in many ways"
        )


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
        if grammar.fault is not None:
            raise RequestError(grammar.fault)
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
