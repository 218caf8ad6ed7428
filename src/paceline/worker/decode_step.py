# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""One decode iteration on the device: draft, verify, sample, accept, advance.

Everything here only enqueues work: no value is read back, so the whole iteration can be captured as
one graph. Inputs and outputs lie in buffers that stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from paceline.attention.triton import DecodeMetadata
from paceline.attention.triton_decode import num_splits_for, workspace_size
from paceline.latency.forward import LatencyForward
from paceline.models.decoder import DecoderModel
from paceline.ops.triton import embed_rows
from paceline.ops.triton.card import card_of
from paceline.sample.triton import DeviceSampler, accept_and_advance
from paceline.sample.triton.row_tensors import ACTIVE, MAX_TOTAL, NUM_TOKENS, column_of
from paceline.worker.device_ngram import lookup_drafts
from paceline.worker.device_rows import DeviceRows
from paceline.worker.kv_cache import KVCache

# Tokens whose logits are held at once: 512 of a 150,000-entry vocabulary are 300 MB.
LOGITS_ROWS = 512


@dataclass(slots=True)
class Scores:
    """What a model says after each of N tokens: logits, or the states they are computed from.

    Logits of many tokens at once would take too much memory.
    """

    model: DecoderModel
    values: torch.Tensor  # [N, hidden], or [N, vocab_size] float32
    are_logits: bool

    def logits(self, tokens: slice) -> torch.Tensor:
        """[M, vocab_size] float32 of a slice of the tokens."""
        values = self.values[tokens]
        return values if self.are_logits else self.model.compute_logits(values)

    def clone(self) -> Scores:
        """The same in memory of its own."""
        return Scores(self.model, self.values.clone(), self.are_logits)


@dataclass(slots=True)
class DeviceModel:
    """A model, its KV, and how it reads the rows' tokens.

    latency: takes the passes of ``latency_tokens`` tokens, where there is one.
    """

    model: DecoderModel
    kv_caches: list[KVCache]
    max_model_len: int
    latency: LatencyForward | None = None
    latency_tokens: frozenset[int] = frozenset()

    def decode(
        self,
        state: DeviceRows,
        rows: torch.Tensor,
        active: torch.Tensor,
        *,
        query_len: int,
        offset: int,
    ) -> Scores:
        """Run ``query_len`` tokens an entry, the first at ``num_tokens[row] + offset``.

        rows: [B] int32; active: [R + 1] int32. Inactive rows write no KV; their scores mean
        nothing. Returns scores of B * query_len tokens, entry by entry.
        """
        tokens = rows.shape[0] * query_len
        if self.latency is None or tokens not in self.latency_tokens:
            hidden = self._states(state, rows, active, query_len, offset)
            return Scores(self.model, hidden, are_logits=False)
        logits = torch.empty(
            tokens, self.model.arch.vocab_size, dtype=torch.float32, device=rows.device
        )
        self.latency.run(
            state.history,
            rows,
            state.column("num_tokens"),
            active,
            state.block_table,
            query_len,
            offset,
            logits,
        )
        return Scores(self.model, logits, are_logits=True)

    def _states(
        self,
        state: DeviceRows,
        rows: torch.Tensor,
        active: torch.Tensor,
        query_len: int,
        offset: int,
    ) -> torch.Tensor:
        """Hidden states by the model's own layers, [B * query_len, hidden]."""
        model = self.model
        num_tokens = state.column("num_tokens")
        embedded = embed_rows(
            state.history,
            rows,
            num_tokens,
            model.embedding.weight,
            query_len=query_len,
            offset=offset,
        )
        kv_heads, head_dim = self.kv_caches[0][0].shape[2:]
        heads = model.arch.num_attention_heads // model.arch.num_kv_heads * kv_heads
        card = card_of(rows.device)
        splits = num_splits_for(rows.shape[0], kv_heads, card.num_sms, self.max_model_len)
        size = workspace_size(rows.shape[0] * query_len, heads, head_dim, splits)
        workspace = torch.empty(size, dtype=torch.float32, device=rows.device) if size else None
        metadata = DecodeMetadata(
            rows, num_tokens, active, state.block_table, query_len, offset, splits, workspace
        )
        rotary = (model.rotary.frequencies, rows)  # a decode pass knows its positions
        hidden: torch.Tensor = model.run(embedded, rotary, self.kv_caches, metadata)
        return hidden


class DeviceDrafter(Protocol):
    """Writes drafts behind each entry's committed tokens."""

    def draft(
        self, rows: torch.Tensor, wanted: torch.Tensor, num_drafts: torch.Tensor, k: int
    ) -> None:
        """rows, wanted, num_drafts: [B] int32; num_drafts gets how many were really written.

        Each wanted is at most k. Rows that are not active, or have no room, write fewer.
        """


class DeviceDraftModel:
    """Drafting with a small model: k forwards, the first over the last two committed tokens."""

    def __init__(self, side: DeviceModel, state: DeviceRows, sampler: DeviceSampler) -> None:
        self.side = side
        self._state = state
        self._sampler = sampler
        self._drafting = torch.zeros_like(state.column("active"))

    def draft(
        self, rows: torch.Tensor, wanted: torch.Tensor, num_drafts: torch.Tensor, k: int
    ) -> None:
        """See ``DeviceDrafter``. A row that does not draft keeps its drafter KV as it is."""
        state, drafting = self._state, self._drafting
        columns = state.columns
        _begin_kernel[(rows.shape[0],)](
            rows, wanted, num_drafts, drafting, columns, columns.stride(0), num_warps=1
        )
        for i in range(k):
            query_len, offset = (2, -2) if i == 0 else (1, i - 1)
            scores = self.side.decode(state, rows, drafting, query_len=query_len, offset=offset)
            logits = scores.logits(slice(query_len - 1, None, query_len))
            self._sampler.sample(logits, rows, state, offset=i - 1, to_history=True)


class DeviceNgram:
    """Drafting by lookup in each row's own history; see ``spec/ngram.py``."""

    def __init__(self, state: DeviceRows, max_k: int, lookup_max: int, lookup_min: int) -> None:
        self._state = state
        self._max_k = max_k
        self._lookup = {"lookup_max": lookup_max, "lookup_min": lookup_min}

    def draft(
        self, rows: torch.Tensor, wanted: torch.Tensor, num_drafts: torch.Tensor, k: int
    ) -> None:
        """See ``DeviceDrafter``."""
        lookup_drafts(rows, wanted, num_drafts, self._state, max_k=self._max_k, **self._lookup)


@triton.jit
def _begin_kernel(rows, wanted, num_drafts, drafting, columns, stride):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    room = column_of(columns, stride, row, MAX_TOTAL) - 1
    room -= column_of(columns, stride, row, NUM_TOKENS)
    count = tl.maximum(tl.minimum(tl.load(wanted + entry), room), 0)
    count = tl.where(column_of(columns, stride, row, ACTIVE) != 0, count, 0)
    tl.store(num_drafts + entry, count)
    tl.store(drafting + row, (count > 0).to(tl.int32))


class DecodeStep:
    """Buffers of a decode iteration for up to ``max_entries`` rows and ``max_k`` drafts.

    Entries beyond a batch must name the null row. ``results`` of B entries and k drafts holds B *
    (k + 1) sampled ids, then B run lengths, B statuses (see ``accept_and_advance``) and B drafts.
    """

    def __init__(
        self,
        target: DeviceModel,
        state: DeviceRows,
        sampler: DeviceSampler,
        drafter: DeviceDrafter | None,
        max_entries: int,
        max_k: int,
    ) -> None:
        self.target = target
        self.state = state
        self.drafter = drafter
        self.max_entries = max_entries
        self.max_k = max_k
        self._sampler = sampler
        device = state.history.device

        def buffer(size: int, value: int = 0) -> torch.Tensor:
            return torch.full((size,), value, dtype=torch.int32, device=device)

        tokens = max_entries * (max_k + 1)
        self.rows = buffer(max_entries, state.max_num_seqs)
        self.wanted = buffer(max_entries)
        self._sampled = buffer(tokens)
        self._bad = buffer(tokens)
        self._results = buffer(tokens + 3 * max_entries)

    def results(self, entries: int, k: int) -> torch.Tensor:
        """What an iteration left, [entries * (k + 4)] int32."""
        return self._results[: entries * (k + 4)]

    def run(self, entries: int, k: int) -> Scores:
        """Enqueue an iteration over the first ``entries`` rows of the buffer.

        Returns the target's scores after each of entries * (k + 1) tokens.
        """
        self.draft(entries, k)
        scores = self.verify(entries, k)
        self.finish(entries, scores, k)
        return scores

    def draft(self, entries: int, k: int) -> None:
        """The first part of an iteration: up to k drafts behind the rows' tokens."""
        if k and self.drafter is not None:
            rows, wanted = self.rows[:entries], self.wanted[:entries]
            self.drafter.draft(rows, wanted, self.num_drafts(entries, k), k)

    def verify(self, entries: int, k: int) -> Scores:
        """The second part: the target's scores after each of entries * (k + 1) tokens."""
        rows, active = self.rows[:entries], self.state.column("active")
        return self.target.decode(self.state, rows, active, query_len=k + 1, offset=-1)

    def no_scores(self, entries: int, k: int) -> Scores:
        """Scores in the form of ``verify``'s that say nothing."""
        model = self.target.model
        shape = (entries * (k + 1), model.arch.hidden_size)
        values = torch.zeros(shape, dtype=model.norm.weight.dtype, device=self.rows.device)
        return Scores(model, values, are_logits=False)

    def finish(
        self, entries: int, scores: Scores, k: int, allowed: torch.Tensor | None = None
    ) -> None:
        """The last part: sample after each of k + 1 tokens an entry, accept and advance.

        scores: the target's, of entries * (k + 1) tokens. allowed: masks of the same tokens, see
        ``DeviceSampler.sample``.
        """
        rows = self.rows[:entries]
        self._sample(rows, scores, k, allowed)
        counts, status, num_drafts = self._outcomes(entries, k)
        accept_and_advance(
            self._sampled,
            self._bad,
            rows,
            num_drafts,
            self.state,
            k=k,
            out_tokens=self._results,
            out_counts=counts,
            out_status=status,
        )

    def num_drafts(self, entries: int, k: int) -> torch.Tensor:
        """[entries] int32 in the results: drafts of each entry, between drafting and finishing."""
        return self._outcomes(entries, k)[2]

    def _outcomes(self, entries: int, k: int) -> tuple[torch.Tensor, ...]:
        """Run lengths, statuses and drafts in the results, [entries] each."""
        outcomes = self.results(entries, k)[entries * (k + 1) :]
        return outcomes.view(3, entries).unbind()

    def _sample(
        self, rows: torch.Tensor, scores: Scores, k: int, allowed: torch.Tensor | None
    ) -> None:
        """The target's own choice after each token, into the buffers."""
        width = k + 1
        step = max(1, LOGITS_ROWS // width)
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step]
            tokens = slice(start * width, (start + len(part)) * width)
            self._sampler.sample(
                scores.logits(tokens),
                part,
                self.state,
                query_len=width,
                out=self._sampled[tokens],
                status=self._bad[tokens],
                allowed=None if allowed is None else allowed[tokens],
            )
