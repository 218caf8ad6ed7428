"""The drafter seam: who guesses the next tokens. A guess cannot affect what comes out.

The runner calls; rows are row numbers of the runner's state. Token ids live in the state's history:
what precedes position p of row r is ``history[r, :p]``, and a drafter writes its guesses there,
behind the committed tokens.
"""

from __future__ import annotations

from typing import Protocol

from paceline.arrays import Int64Array


class Drafter(Protocol):
    """Proposes tokens; never decides how many, and never sees a request."""

    name: str

    def propose(
        self, rows: Int64Array, num_tokens: Int64Array, num_draft_tokens: Int64Array
    ) -> Int64Array:
        """Write up to ``num_draft_tokens`` guesses of each row into its history.

        rows [B]; num_tokens [B] committed tokens of each; num_draft_tokens [B], some may be 0. A
        row that keeps KV of its own may lack it for the last two committed tokens, no more. Returns
        [B] how many were really written.
        """

    def catch_up(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> None:
        """Compute own KV for known tokens [start, end) of each row, if it keeps any."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy own KV between blocks, (source, destination) each."""
