"""Decode passes of rows with a grammar on a device: the host stands between draft and verification.

``begin`` enqueues the drafts and a copy of them to the host. ``finish`` waits for it, asks the
grammars, and enqueues the verification with their masks. What the caller enqueues in between keeps
the device busy. All that the host needs to know lies in that copy, so earlier steps need not have
been collected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.arrays import Int32Array, Int64Array
from paceline.worker.decode_graphs import DecodeGraphs
from paceline.worker.decode_step import Scores
from paceline.worker.row_grammars import ANYTHING, RowGrammars
from paceline.worker.transfer import Download, upload

_FACTS = 3  # numbers before the tokens in an entry of the copy


@dataclass(slots=True)
class Split:
    """A pass whose drafts are on their way to the host."""

    rows: Int64Array  # [B]
    bucket: int
    k: int
    download: Download  # [bucket, 3 + max_k + 1 + k]


@dataclass(slots=True)
class Verified:
    """A pass whose results are on their way."""

    scores: Scores
    drafts: Int32Array  # [B] proposed; fewer may have been worth verifying
    dead: list[int]  # rows that their grammar leaves no way to go on


class SplitDecode:
    """Both halves; the iteration's buffers must hold the same batch for each of them."""

    def __init__(self, decode: DecodeGraphs, grammars: RowGrammars) -> None:
        self._decode = decode
        self._step = decode.step
        self._grammars = grammars
        self._room = decode.step.max_k + 1  # tokens that a row may gain in one pass

    def begin(self, rows: Int64Array, bucket: int, k: int) -> Split:
        """Draft, and send drafts and newest tokens of each row to the host."""
        if k:
            self._decode.draft(bucket, k)
        step, state = self._step, self._step.state
        index = step.rows[:bucket].long()
        committed = state.column("num_tokens")[index]
        drafts = step.num_drafts(bucket, k) if k else torch.zeros_like(committed)
        places = committed[:, None] + torch.arange(-self._room, k, device=index.device)
        tokens = state.history[index[:, None], places.clamp(min=0)]
        facts = torch.stack((committed, state.column("active")[index], drafts), 1)
        return Split(rows, bucket, k, Download(torch.cat((facts, tokens), 1)))

    def finish(self, split: Split, prompt_lens: Int64Array) -> Verified:
        """Ask the grammars, then verify.

        prompt_lens: [B]. The results lie where a whole iteration leaves them.
        """
        step, bucket, k = self._step, split.bucket, split.k
        values = split.download.wait()
        drafts = values[: len(split.rows), 2].copy()
        checked = np.zeros(bucket, np.int32)
        words = np.full((bucket, k + 1, self._grammars.num_words), ANYTHING, np.int32)
        dead: list[int] = []
        for i, row in enumerate(split.rows.tolist()):
            committed, active, proposed = values[i, :_FACTS].tolist()
            if not active or row not in self._grammars:
                continue
            news = committed - int(prompt_lens[i]) - self._grammars.num_tokens(row)
            if not 0 <= news <= self._room:
                raise AssertionError(f"the grammar of row {row} lacks {news} tokens")
            tokens = values[i, _FACTS + self._room - news :]
            filled = self._grammars.fill(row, tokens[:news], tokens[news : news + proposed])
            if filled is None:
                dead.append(row)
            else:
                words[i, : len(filled[0])], checked[i] = filled
        step.state.deactivate(dead)
        if k:
            step.num_drafts(bucket, k).copy_(upload(checked, step.rows.device))
        scores = self._decode.verify(bucket, k)
        masks = upload(words.reshape(bucket * (k + 1), -1), step.rows.device)
        step.finish(bucket, scores, k, masks)
        return Verified(scores, drafts, dead)

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
