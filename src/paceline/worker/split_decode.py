"""Decode passes on a device in which rows have a grammar: the host stands before the sampling.

The drafts are enqueued, a copy of them to the host, and the forward that verifies them, which needs
no masks. While the device computes it, the host asks the grammars what may follow each draft; then
the sampling is enqueued with their masks. All rows share the pass, whether they have a grammar or
not. All that the host needs to know lies in that copy, so earlier steps need not have been
collected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.arrays import Int32Array, Int64Array
from paceline.worker.decode_graphs import DecodeGraphs
from paceline.worker.decode_step import Scores
from paceline.worker.row_grammars import ANYTHING, RowGrammars
from paceline.worker.transfer import Download, upload

_FACTS = 3  # numbers before the tokens in an entry of the copy
IN_RESULTS = -1


@dataclass(slots=True)
class Verified:
    """A pass whose results are on their way."""

    scores: Scores
    drafts: Int32Array  # [B] proposed to rows with a grammar; the others' are IN_RESULTS
    dead: list[int]  # rows that their grammar leaves no way to go on


@dataclass(slots=True)
class _Asked:
    """What grammars said of the entries of a pass."""

    drafts: Int32Array  # as in Verified
    dead: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)  # whose masks follow
    checked: list[int] = field(default_factory=list)  # drafts that may be accepted
    words: list[Int32Array] = field(default_factory=list)  # [k + 1, num_words] each


class SplitDecode:
    """Runs such passes over the batch that the iteration's buffers hold."""

    def __init__(self, decode: DecodeGraphs, grammars: RowGrammars) -> None:
        self._decode = decode
        self._step = decode.step
        self._grammars = grammars
        self._room = decode.step.max_k + 1  # tokens that a row may gain in one pass

    def run(self, rows: Int64Array, bucket: int, k: int, prompt_lens: Int64Array) -> Verified:
        """Draft, verify, ask the grammars meanwhile, sample.

        rows, prompt_lens: [B], in the buffers' order. The results lie where a whole iteration
        leaves them.
        """
        if k:
            self._decode.draft(bucket, k)
        download = self._facts(bucket, k)
        scores = self._decode.verify(bucket, k)
        asked = self._ask(rows, download.wait(), k, prompt_lens)
        step = self._step
        step.state.deactivate(asked.dead)
        step.finish(bucket, scores, k, self._masks(asked, bucket, k))
        return Verified(scores, asked.drafts, asked.dead)

    def _facts(self, bucket: int, k: int) -> Download:
        """Of each entry: committed tokens, whether it is active, drafts; newest tokens and drafts.

        [bucket, 3 + max_k + 1 + k].
        """
        step, state = self._step, self._step.state
        index = step.rows[:bucket].long()
        committed = state.column("num_tokens")[index]
        drafts = step.num_drafts(bucket, k) if k else torch.zeros_like(committed)
        places = committed[:, None] + torch.arange(-self._room, k, device=index.device)
        tokens = state.history[index[:, None], places.clamp(min=0)]
        facts = torch.stack((committed, state.column("active")[index], drafts), 1)
        return Download(torch.cat((facts, tokens), 1))

    def _ask(self, rows: Int64Array, facts: Int32Array, k: int, prompt_lens: Int64Array) -> _Asked:
        """Tell the grammars what their rows committed, and ask for masks."""
        asked = _Asked(np.full(len(rows), IN_RESULTS, np.int32))
        for i in np.flatnonzero(self._grammars.which(rows)).tolist():
            row = int(rows[i])
            committed, active, proposed = facts[i, :_FACTS].tolist()
            if not active:
                continue
            news = committed - int(prompt_lens[i]) - self._grammars.num_tokens(row)
            if not 0 <= news <= self._room:
                raise AssertionError(f"the grammar of row {row} lacks {news} tokens")
            tokens = facts[i, _FACTS + self._room - news :]
            filled = self._grammars.fill(row, tokens[:news], tokens[news : news + proposed])
            if filled is None:
                asked.dead.append(row)
                continue
            masks, checked = filled
            words = np.full((k + 1, masks.shape[1]), ANYTHING, np.int32)
            words[: len(masks)] = masks
            asked.drafts[i] = proposed
            asked.entries.append(i)
            asked.checked.append(checked)
            asked.words.append(words)
        return asked

    def _masks(self, asked: _Asked, bucket: int, k: int) -> torch.Tensor | None:
        """Masks of all bucket * (k + 1) tokens, on the device; fewer drafts may be accepted."""
        if not asked.entries:
            return None
        step, device = self._step, self._step.rows.device
        entries = upload(np.array(asked.entries), device)
        if k:
            step.num_drafts(bucket, k)[entries] = upload(np.array(asked.checked, np.int32), device)
        shape = (bucket, k + 1, self._grammars.num_words)
        masks = torch.full(shape, int(ANYTHING), dtype=torch.int32, device=device)
        masks[entries] = upload(np.stack(asked.words), device)
        return masks.flatten(0, 1)

    def first_masks(self, rows: Int64Array) -> tuple[torch.Tensor, list[int]]:
        """Masks of rows whose prompt is computed, [B, num_words], and rows that cannot go on."""
        words = np.full((len(rows), self._grammars.num_words), ANYTHING, np.int32)
        dead: list[int] = []
        nothing = np.zeros(0, np.int32)
        for i in np.flatnonzero(self._grammars.which(rows)).tolist():
            filled = self._grammars.fill(int(rows[i]), nothing, nothing)
            if filled is None:
                dead.append(int(rows[i]))
            else:
                words[i] = filled[0][0]
        self._step.state.deactivate(dead)
        return upload(words, self._step.rows.device), dead
