"""Drafting by prompt lookup over each row's own history. No weights, no KV."""

from __future__ import annotations

import numpy as np

from paceline.arrays import Int64Array
from paceline.spec.ngram import find_continuation
from paceline.worker.decode_state import DecodeState


class NgramDrafter:
    """A ``Drafter`` that proposes what followed the last tokens' earlier occurrence."""

    name = "ngram"

    def __init__(self, state: DecodeState, lookup_max: int, lookup_min: int) -> None:
        self._state = state
        self._lookup_max = lookup_max
        self._lookup_min = lookup_min

    def propose(
        self, rows: Int64Array, num_tokens: Int64Array, num_draft_tokens: Int64Array
    ) -> Int64Array:
        """See ``Drafter``; a row without a match proposes nothing."""
        written = np.zeros_like(num_draft_tokens)
        history = self._state.history
        triples = zip(rows.tolist(), num_tokens.tolist(), num_draft_tokens.tolist(), strict=True)
        for i, (row, count, k) in enumerate(triples):
            if k == 0:
                continue
            guess = find_continuation(history[row, :count], k, self._lookup_max, self._lookup_min)
            history[row, count : count + len(guess)] = guess
            written[i] = len(guess)
        return written

    def catch_up(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> None:
        """See ``Drafter``: a lookup keeps nothing."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See ``Drafter``: a lookup keeps nothing."""
