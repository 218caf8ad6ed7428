"""A runner without tensors: its clock is a cost model, its KV is checked.

For tests, scheduling studies and policies at scale. Tokens are a pure function of the whole
context, the seed and the sample index, so any scheduling must give the same ones. Every KV slot
stores a hash of the tokens up to it; each pass reads back the slots it would attend to and fails on
the first that does not hold what it should. The rules of a device hold here too: stop ids and
lengths are checked at once, finished rows go inactive and write to the null block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.arrays import Int64Array
from paceline.core.step import ModelRunnerOutput, NewRow, SchedulerOutput

_MASK = (1 << 61) - 1


def _mix(a: int, b: int) -> int:
    """A cheap hash of two integers; needs to be repeatable, not strong."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x2545F491) & ((1 << 64) - 1)
    x ^= x >> 29
    x = (x * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    return (x ^ (x >> 32)) & _MASK


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds a step takes: pass overheads, then per token; defaults are of no machine."""

    target_pass: float = 4e-3
    target_token: float = 2e-5
    drafter_pass: float = 6e-4
    drafter_token: float = 3e-6
    context_token: float = 1e-8
    swapped_block: float = 2e-5

    def step_time(self, out: SchedulerOutput, context_tokens: int) -> float:
        """Seconds for one scheduler output that reads ``context_tokens`` of KV."""
        seconds = context_tokens * self.context_token
        seconds += (len(out.swap_outs) + len(out.swap_ins)) * self.swapped_block
        if len(out.decode_rows):
            tokens = len(out.decode_rows) + int(out.num_draft_tokens.sum())
            drafting = int((out.num_draft_tokens > 0).sum())
            seconds += self.target_pass + tokens * self.target_token
            if drafting:
                rounds = int(out.num_draft_tokens.max())
                seconds += rounds * (self.drafter_pass + drafting * self.drafter_token)
        if len(out.prefill_rows):
            seconds += self.target_pass + int(out.prefill_lens.sum()) * self.target_token
        if len(out.catch_up_rows):
            caught = int((out.catch_up_ends - out.catch_up_starts).sum())
            seconds += self.drafter_pass + caught * self.drafter_token
        return seconds


@dataclass(slots=True)
class _SimRow:
    new: NewRow
    tokens: list[int]
    hashes: list[int]  # hashes[i] covers tokens[: i + 1]
    blocks: list[int]
    draft_filled: int = 0
    active: bool = True


class SimulatedRunner:
    """``acceptance``: probability that a draft equals the target's token (conditional acceptance).

    ``drafter_has_kv``: check the drafter's slots too, as for a draft model. ``vocab_size`` bounds
    the tokens; ``clock`` is simulated seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        vocab_size: int = 1000,
        acceptance: float = 0.8,
        drafter_has_kv: bool = False,
        cost: CostModel | None = None,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.acceptance = acceptance
        self.drafter_has_kv = drafter_has_kv
        self.cost = cost or CostModel()
        self.clock = 0.0
        slots = (num_blocks + 1) * block_size
        self._target: Int64Array = np.full(slots, -1, np.int64)
        self._drafter: Int64Array = np.full(slots, -1, np.int64)
        self._host: Int64Array = np.full(num_host_blocks * block_size, -1, np.int64)
        self._rows: dict[int, _SimRow] = {}

    def launch(self, out: SchedulerOutput) -> ModelRunnerOutput:
        """Execute a step; the handle is its result."""
        self._change_rows(out)
        result = ModelRunnerOutput(out.step)
        sampled: list[tuple[int, list[int], int]] = []
        context = 0
        for row, drafts in zip(
            out.decode_rows.tolist(), out.num_draft_tokens.tolist(), strict=True
        ):
            if self._rows[row].active:
                context += len(self._rows[row].tokens)
                sampled.append(self._decode(row, drafts))
        for row, start, count, samples in zip(
            out.prefill_rows.tolist(),
            out.prefill_starts.tolist(),
            out.prefill_lens.tolist(),
            out.prefill_samples.tolist(),
            strict=True,
        ):
            sim = self._rows[row]
            if not sim.active:
                continue
            self._check(self._target, sim, start, "target")
            self._write(self._target, sim, start, sim.hashes[start : start + count])
            if samples:
                token = self._next(sim, sim.hashes[-1])
                self._append(sim, [token])
                sampled.append((row, [token], 0))
        for row, start, end in zip(
            out.catch_up_rows.tolist(),
            out.catch_up_starts.tolist(),
            out.catch_up_ends.tolist(),
            strict=True,
        ):
            # Also for a row that just went inactive: its blocks may be shared from now on.
            sim = self._rows[row]
            self._check(self._drafter, sim, start, "drafter")
            self._write(self._drafter, sim, start, sim.hashes[start:end])
        self.clock += self.cost.step_time(out, context)
        self._fill(result, sampled)
        return result

    def collect(self, handle: ModelRunnerOutput) -> ModelRunnerOutput:
        """The result of a launched step."""
        return handle

    def close(self) -> None:
        """Nothing is held."""

    def _change_rows(self, out: SchedulerOutput) -> None:
        for row in out.freed_rows:
            if row in self._rows:
                self._rows[row].active = False
        self._move_blocks(out)
        for new in out.new_rows:
            tokens = new.token_ids.tolist()
            hashes: list[int] = []
            for token in tokens:
                hashes.append(_mix(hashes[-1] if hashes else 0, token))
            self._rows[new.row] = _SimRow(new, tokens, hashes, list(new.block_ids))
        for row, index, block in zip(
            out.new_block_rows.tolist(),
            out.new_block_indices.tolist(),
            out.new_block_ids.tolist(),
            strict=True,
        ):
            blocks = self._rows[row].blocks
            if index != len(blocks):
                raise AssertionError(f"row {row}: block {index} follows {len(blocks)} blocks")
            blocks.append(block)

    def _move_blocks(self, out: SchedulerOutput) -> None:
        for block, slot in out.swap_outs:
            self._copy_block(self._target, block, self._host, slot)
        for slot, block in out.swap_ins:
            self._copy_block(self._host, slot, self._target, block)
        for source, target in out.block_copies:
            for store in (self._target, self._drafter):
                self._copy_block(store, source, store, target)

    def _copy_block(self, source: Int64Array, i: int, target: Int64Array, j: int) -> None:
        size = self.block_size
        target[j * size : (j + 1) * size] = source[i * size : (i + 1) * size]

    def _decode(self, row: int, drafts: int) -> tuple[int, list[int], int]:
        sim = self._rows[row]
        count = len(sim.tokens)
        drafts = min(drafts, sim.new.max_total_tokens - count - 1)
        self._check(self._target, sim, count - 1, "target")
        if drafts > 0 and self.drafter_has_kv:
            self._check(self._drafter, sim, max(0, count - 2), "drafter")
        run: list[int] = []
        state = sim.hashes[-1]
        fed = [state]
        for position in range(drafts + 1):
            token = self._next(sim, state)
            run.append(token)
            state = _mix(state, token)
            luck = _mix(state ^ 0x5555, count + position) / _MASK
            if position == drafts or luck >= self.acceptance:
                break
            fed.append(state)
        # Rejected drafts leave stale values behind the accepted run.
        fed += [-2] * (drafts + 1 - len(fed))
        self._write(self._target, sim, count - 1, fed)
        if drafts > 0 and self.drafter_has_kv:
            behind = sim.hashes[max(0, count - 2) : count - 1]
            self._write(self._drafter, sim, count - 1 - len(behind), behind + fed[:drafts])
        self._append(sim, run)
        return row, run, drafts

    def _next(self, sim: _SimRow, state: int) -> int:
        return _mix(state, sim.new.seed * 1009 + sim.new.sample_index) % self.vocab_size

    def _append(self, sim: _SimRow, run: list[int]) -> None:
        """Extend a row by a run, up to where a device would let it go inactive."""
        for token in run:
            sim.tokens.append(token)
            sim.hashes.append(_mix(sim.hashes[-1], token))
            full = len(sim.tokens) >= sim.new.max_total_tokens
            if full or token in sim.new.stop_token_ids:
                sim.active = False
                return

    def _slots(self, sim: _SimRow, start: int, count: int) -> Int64Array:
        positions = np.arange(start, start + count)
        blocks = np.array([*sim.blocks, 0], np.int64)
        index = np.minimum(positions // self.block_size, len(sim.blocks))
        slots = blocks[index] * self.block_size + positions % self.block_size
        return slots.astype(np.int64)

    def _write(self, store: Int64Array, sim: _SimRow, start: int, values: list[int]) -> None:
        store[self._slots(sim, start, len(values))] = values

    def _check(self, store: Int64Array, sim: _SimRow, count: int, name: str) -> None:
        """The first ``count`` tokens' KV must be what this row computed, or shares."""
        found = store[self._slots(sim, 0, count)]
        wrong = np.flatnonzero(found != np.array(sim.hashes[:count], np.int64))
        if len(wrong):
            raise AssertionError(
                f"row {sim.new.row}: {name} KV of token {wrong[0]} of {len(sim.tokens)} "
                "is not its own"
            )

    def _fill(self, result: ModelRunnerOutput, sampled: list[tuple[int, list[int], int]]) -> None:
        width = max((len(run) for _, run, _ in sampled), default=1)
        result.rows = np.array([row for row, _, _ in sampled], np.int32)
        result.generations = np.array(
            [self._rows[row].new.generation for row, _, _ in sampled], np.int64
        )
        result.token_ids = np.zeros((len(sampled), width), np.int32)
        for i, (_, run, _) in enumerate(sampled):
            result.token_ids[i, : len(run)] = run
        result.num_sampled = np.array([len(run) for _, run, _ in sampled], np.int32)
        result.num_draft_tokens = np.array([drafts for _, _, drafts in sampled], np.int32)
