"""The grammars of a runner's rows: told what rows committed, asked for masks before sampling.

Rows without a grammar are not known here and cost nothing. This file must not know what a grammar
is made of, nor where logits lie.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.arrays import BoolArray, Int32Array, Int64Array
from paceline.core.step import NewRow, SchedulerOutput, TokenGrammar

DEAD_END = (
    "nothing in this model's vocabulary can continue what `structured_outputs` asks for. hint: its "
    "tokenizer may lack the characters; try another structure"
)
ANYTHING = np.int32(-1)  # a word of a mask that allows all ids


class RowGrammars:
    """Grammars by row; false while no row has one.

    vocab_size: width of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._grammars: dict[int, TokenGrammar] = {}

    def __len__(self) -> int:
        return len(self._grammars)

    def __contains__(self, row: int) -> bool:
        return row in self._grammars

    def which(self, rows: Int64Array) -> BoolArray:
        """[B] whether each row has a grammar."""
        if not self._grammars:
            return np.zeros(len(rows), np.bool_)
        return np.fromiter((row in self._grammars for row in rows.tolist()), np.bool_, len(rows))

    def apply(self, out: SchedulerOutput) -> None:
        """Make the row changes of a step."""
        if self._grammars:
            self._leave(out.freed_rows)
            self._leave(new.row for new in out.new_rows)
        for new in out.new_rows:
            if new.grammar is not None:
                self._enter(new, new.grammar)

    def _leave(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._grammars.pop(row, None)

    def _enter(self, new: NewRow, grammar: TokenGrammar) -> None:
        # After a preemption it may lack the last run, which was committed while it was not asked.
        grammar.accept(new.token_ids[new.prompt_len + grammar.num_tokens :])
        self._grammars[new.row] = grammar

    def num_tokens(self, row: int) -> int:
        """Output tokens that the row's grammar was told."""
        return self._grammars[row].num_tokens

    def fault(self, row: int) -> str:
        """Why the row cannot go on, after ``fill`` gave None."""
        return self._grammars[row].fault or DEAD_END

    def fill(
        self, row: int, token_ids: Int32Array, drafts: Int32Array
    ) -> tuple[Int32Array, int] | None:
        """Masks of a row's next pass, after ``token_ids`` that its grammar was not told yet.

        Returns masks [D + 1, num_words] and how many drafts D may be verified, at most
        ``len(drafts)``; None if the row cannot go on.
        """
        grammar = self._grammars[row]
        grammar.accept(token_ids)
        words = np.zeros((len(drafts) + 1, self.num_words), np.int32)
        count = grammar.fill(drafts, words)
        return None if count < 0 else (words[: count + 1], count)
