# mypy: disable-error-code="import-untyped"
"""The device's sampler, which is also its verifier and its drafters' sampler.

It gives the ids of ``sample/sampler.py``. A call launches the same two or three kernels whatever
the rows are, so a captured graph serves any mix of greedy, sampled and truncated rows; programs
whose row lacks a feature end at once.

    sampler = DeviceSampler(max_entries=256 * 6, vocab=152064, vocab_limit=151936, device=device)
    sampler.sample(logits, rows, state, query_len=6, offset=-1, out=tokens, status=status)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs

from paceline.ops.triton.card import card_of
from paceline.sample.triton.choose import choose_kernel, part_kernel
from paceline.sample.triton.row_tensors import RowTensors
from paceline.sample.triton.truncation import threshold_kernel

_BLOCK = 1024  # tokens a program looks at together, 8 a thread
_FINE = 128  # the same when scores are computed exactly: 1 a thread
_WARPS = 4
_PARTS_PER_SM = 8  # programs wanted: enough that a wave more or less is little
_MAX_CHUNK = 16384
_TILE = 8192  # the same of thresholds
_FEW = 4096  # values that a search for a threshold holds in registers
_TRUNCATION_WARPS = 32


class DeviceSampler:
    """Samples entries of decode passes; owns the scratch memory, fixed at creation.

    max_entries: most tokens a call may sample, B × query_len. vocab: width of the logits.
    vocab_limit: ids from here on are never sampled (a padded vocabulary), None for no limit.
    truncation: False for a drafter's sampler, which leaves top_k, top_p and min_p out.
    """

    def __init__(
        self,
        max_entries: int,
        vocab: int,
        device: torch.device,
        *,
        vocab_limit: int | None = None,
        truncation: bool = True,
    ) -> None:
        self.vocab = vocab
        self.limit = vocab if vocab_limit is None else min(vocab_limit, vocab)
        self.max_entries = max_entries
        self._num_sms = card_of(device).num_sms
        parts = max(m * self._split(m)[1] for m in range(1, max_entries + 1))
        self._scores = torch.empty(parts, dtype=torch.float32, device=device)
        self._ids = torch.empty(parts, dtype=torch.int32, device=device)
        self._seen = torch.empty(parts, dtype=torch.int32, device=device)
        self._thresholds: torch.Tensor | None = None
        self._lists: torch.Tensor | None = None
        if truncation:
            self._thresholds = torch.empty(max_entries, dtype=torch.float32, device=device)
            programs = min(max_entries, self._num_sms)
            room = triton.cdiv(vocab, _TILE) * _TILE + _FEW
            self._lists = torch.empty(programs, room, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of the scratch tensors."""
        tensors = (self._scores, self._ids, self._seen, self._thresholds, self._lists)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        state: RowTensors,
        *,
        query_len: int = 1,
        offset: int = -1,
        out: torch.Tensor | None = None,
        status: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
        to_history: bool = False,
    ) -> None:
        """Sample one token after each query token.

        Query token j of entry b stands at position ``num_tokens[row] + offset + j``; what is
        sampled stands one further.

        Args:
            logits: [B * query_len, vocab] float32, last dimension contiguous, entry by entry; not
                changed.
            rows: [B] int32.
            out: [B * query_len] int32, gets the ids. Those of inactive rows are 0; those of rows
                with NaN or infinity are any id below the limit.
            status: [B * query_len] int32, gets 1 where the logits cannot be sampled (NaN or +inf in
                them, or nothing above -inf), else 0.
            allowed: [B * query_len, >= ceil(vocab / 32)] int32 or None: bit i % 32 of word i // 32
                says whether id i may be sampled.
            to_history: write ids behind the committed tokens of active rows: drafts.
        """
        entries = rows.shape[0] * query_len
        if entries > self.max_entries:
            raise ValueError(f"{entries} tokens to sample, but memory is for {self.max_entries}")
        rows_and_state = self._arguments(rows, state, allowed, query_len)
        if self._lists is not None:
            self._find_thresholds(logits, entries, offset, rows_and_state)
        chunk, parts = self._split(entries)
        part_kernel[(entries, parts)](
            logits,
            logits.stride(0),
            self.vocab,
            self.limit,
            chunk,
            offset,
            self._thresholds,
            self._scores,
            self._ids,
            self._seen,
            *rows_and_state,
            _BLOCK,
            _FINE,
            knobs.runtime.interpret,
            num_warps=_WARPS,
        )
        choose_kernel[(entries,)](
            self._scores,
            self._ids,
            self._seen,
            out,
            status,
            rows,
            state.columns,
            state.columns.stride(0),
            state.history,
            state.history.stride(0),
            parts,
            offset,
            query_len,
            triton.next_power_of_2(parts),
            to_history,
            num_warps=1,
        )

    def _find_thresholds(
        self, logits: torch.Tensor, entries: int, offset: int, rows_and_state: tuple[Any, ...]
    ) -> None:
        assert self._lists is not None
        programs = min(entries, self._lists.shape[0])
        threshold_kernel[(programs,)](
            logits,
            logits.stride(0),
            self.vocab,
            self.limit,
            entries,
            offset,
            self._thresholds,
            self._lists,
            *rows_and_state,
            triton.next_power_of_2(triton.cdiv(entries, programs)),
            _TILE,
            _FEW,
            num_warps=_TRUNCATION_WARPS,
        )

    @staticmethod
    def _arguments(
        rows: torch.Tensor, state: RowTensors, allowed: torch.Tensor | None, query_len: int
    ) -> tuple[Any, ...]:
        """What both kernels that read logits are told of rows, in their parameters' order."""
        return (
            rows,
            state.columns,
            state.columns.stride(0),
            state.history,
            state.history.stride(0),
            state.stop_ids,
            state.bias_ids,
            state.bias_values,
            state.counts,
            0 if state.counts is None else state.counts.shape[1],
            allowed,
            0 if allowed is None else allowed.stride(0),
            query_len,
            state.stop_ids.shape[1],
            state.bias_ids.shape[1],
        )

    def _split(self, entries: int) -> tuple[int, int]:
        """Tokens a part, and parts an entry."""
        wanted = triton.cdiv(self.vocab * entries, _PARTS_PER_SM * self._num_sms)
        chunk = min(triton.cdiv(wanted, _BLOCK) * _BLOCK, _MAX_CHUNK)
        return chunk, triton.cdiv(self.vocab, chunk)
