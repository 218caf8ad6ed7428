"""Iteration-level scheduling: what the next step computes, and what became of the last.

At every step finished sequences leave, waiting ones enter if blocks and the token budget allow. One
rule counts for all: a sequence gets the tokens it still has to compute, within the budget; decode
rows first, then the drafter's missed tokens, then prefill chunks. (Iteration-level scheduling: Yu
et al., "Orca", OSDI 2022; paged KV: Kwon et al., "PagedAttention", SOSP 2023; chunked prefill:
Agrawal et al., "Sarathi-Serve", OSDI 2024.)

``schedule`` may run before the results of earlier steps are known: a row has a committed length and
bounds on what is in flight. No torch, no text; cost is O(running), never O(waiting).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paceline.arrays import Int64Array
from paceline.config import CacheConfig, SchedulerConfig
from paceline.core.catch_up import READY_LAG, CatchUp
from paceline.core.commit import Ending, commit
from paceline.core.kv_cache_manager import KVCacheManager, Prefix
from paceline.core.rows import RowTable
from paceline.core.stats import EngineStats
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.errors import RequestError
from paceline.request import Request, Sequence, SequenceStatus, derive_seed
from paceline.spec.policy import DraftLengthPolicy, Load


@dataclass(slots=True)
class StepEvents:
    """What a caller learns from the scheduler, in order."""

    first_tokens: list[Request] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    streamed: list[tuple[Sequence, list[int]]] = field(default_factory=list)


@dataclass(slots=True)
class _Launched:
    """Bounds a launched step put on rows, taken back when its results arrive."""

    rows: Int64Array
    generations: Int64Array
    at_most: Int64Array  # tokens the step may add to each row


class Scheduler:
    """Owns the row table, the KV blocks and the waiting queue.

    ``drafter_context``: tokens the drafter can reach, None without such a limit.
    ``drafter_has_kv``: whether the drafter keeps KV of its own (a model does, a lookup does not).
    ``stats``: totals to go on with, those of a scheduler before.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        policy: DraftLengthPolicy,
        *,
        seed: int = 0,
        drafter_has_kv: bool = False,
        drafter_context: int | None = None,
        stats: EngineStats | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.stats = stats or EngineStats()
        self.table = RowTable(config.max_num_seqs, config.max_model_len, cache.block_size)
        self.kv = KVCacheManager(
            self.table,
            cache.num_blocks,
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_host_blocks=cache.num_host_blocks,
        )
        self.waiting: deque[Sequence] = deque()
        self._seed = seed
        self._drafter_has_kv = drafter_has_kv
        self._drafter_context = drafter_context or config.max_model_len
        self._num_admitted = 0
        self._num_waiting = 0
        self._step = 0
        self._launched: deque[_Launched] = deque()
        self._freed_rows: list[int] = []
        self._events = StepEvents()
        self._static_batch_closed = False

    # ---- requests -------------------------------------------------------------------------------

    def check_request(self, request: Request) -> None:
        """Raise RequestError, with the numbers, if the request could never run."""
        count, capacity = request.prompt_len, self.kv.pool.num_blocks * self.kv.block_size
        if count == 0:
            raise RequestError("the prompt has no tokens. hint: give at least one token")
        if count >= self.config.max_model_len:
            raise RequestError(
                f"the prompt has {count} tokens, but max_model_len is "
                f"{self.config.max_model_len} and one place is needed for output. hint: shorten "
                "the prompt, or raise max_model_len if the model allows more"
            )
        if count > capacity:
            raise RequestError(
                f"the prompt has {count} tokens, but the KV pool holds {capacity} "
                f"({self.kv.pool.num_blocks} blocks of {self.kv.block_size}). hint: shorten the "
                "prompt or raise kv_cache_memory_bytes"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request's sequences. Raises RequestError if it can never run."""
        self.check_request(request)
        count, wanted = request.prompt_len, request.sampling.max_tokens
        limit = self.config.max_model_len
        request.max_total_tokens = limit if wanted is None else min(limit, count + wanted)
        request.number = self._num_admitted
        self._num_admitted += 1
        given = request.sampling.seed
        request.seed = derive_seed(self._seed, request.number) if given is None else given
        self.waiting.extend(request.sequences)
        self._num_waiting += len(request.sequences)

    def abort(self, request: Request) -> None:
        """End all of a request's unfinished sequences; blocks are free at once."""
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, Ending(sequence.row, "abort"))
        self._end_static_batch()

    @property
    def num_running(self) -> int:
        """Sequences that hold a row and have not finished."""
        return self.table.num_occupied - int(self.table.finished.sum())

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_unfinished(self) -> bool:
        return self.num_running > 0 or self._num_waiting > 0

    def take_events(self) -> StepEvents:
        """What happened since the last call."""
        events, self._events = self._events, StepEvents()
        return events

    # ---- one step -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step; an empty one means: collect what is in flight, or be idle."""
        out = SchedulerOutput(step=self._step)
        rows = self._decode_rows()
        k = self._choose_k(out, rows)
        if len(rows):
            placed = self._place_decode_rows(out, rows, k)
            if placed is None:
                return out
            rows, drafts = placed
            self._emit_decode(out, rows, drafts)
        catch_up = None
        if k > 0 and self._drafter_has_kv:
            budget = self.config.max_num_batched_tokens
            catch_up = CatchUp(self.table, self.kv, self.stats, budget, self._drafter_context)
            catch_up.add_decode_rows(out)
        self._schedule_prefill(out, catch_up)
        if catch_up is not None:
            catch_up.emit(out)
        if not out.is_empty:
            self._launch(out)
        elif self._close_static_batch():
            return self.schedule()
        return out

    def _decode_rows(self) -> Int64Array:
        """Rows to decode, oldest first; rows that end with what is in flight are left out."""
        table = self.table
        if self.config.batching == "static" and not self._static_batch_closed:
            return np.zeros(0, np.int64)
        live = table.decoding & ~table.finished
        live &= table.num_tokens + table.in_flight_min < table.max_total
        if not live.any():
            return np.zeros(0, np.int64)
        return table.rows_in_order(live | (table.decoding & table.finished))

    def _choose_k(self, out: SchedulerOutput, rows: Int64Array) -> int:
        """Ask the policy, then fit the answer to the token budget."""
        load = Load(
            num_running=self.num_running,
            num_decoding=len(rows),
            num_waiting=self._num_waiting,
            num_context_tokens=int(self.table.num_tokens[rows].sum()),
        )
        choice = self.policy.choose(load)
        if not 0 <= choice.k <= self.policy.max_k:
            raise ValueError(
                f"{type(self.policy).__name__} chose k = {choice.k}, outside 0 to its max_k "
                f"{self.policy.max_k}"
            )
        k, out.k_reason = choice.k, choice.reason
        if len(rows) and k:
            budget = self.config.max_num_batched_tokens
            # Waiting prompts keep a quarter of the budget, so that drafts cannot stall them.
            fit = max(0, (budget - min(self._pending_prefill(), budget // 4)) // len(rows) - 1)
            if fit < k:
                k = fit
                out.k_reason = f"token budget {budget} for {len(rows)} rows"
        out.k = k
        return k

    def _pending_prefill(self) -> int:
        """Tokens that prefill could use now, or a bound where nobody has counted them."""
        table = self.table
        filling = table.occupied & ~table.decoding
        pending = int((table.prefill_end - table.num_computed)[filling].sum())
        can_admit = self._num_waiting > 0 and table.has_free_row and not self._static_batch_closed
        return self.config.max_num_batched_tokens if can_admit else pending

    # ---- decode ---------------------------------------------------------------------------------

    def _row_drafts(self, rows: Int64Array, k: int) -> Int64Array:
        """Drafts of each row: k, or fewer near its end, or 0 while its drafter KV has a gap."""
        table = self.table
        drafts = np.minimum(k, table.draft_room(rows))
        at_most = table.num_tokens[rows] + table.in_flight_max[rows]
        drafts = np.minimum(drafts, self._drafter_context - at_most)
        if self._drafter_has_kv:
            drafts[table.draft_lag[rows] > READY_LAG] = 0
        at_least: Int64Array = np.maximum(drafts, 0)
        return at_least

    def _new_blocks(self, rows: Int64Array, drafts: Int64Array) -> Int64Array:
        """Blocks each row lacks to write its last token and drafts, wherever it stands."""
        table = self.table
        slots = table.num_tokens[rows] + table.in_flight_max[rows] + drafts
        # The last token of a sequence is never fed, so it needs no slot.
        slots = np.minimum(slots, table.max_total[rows] - 1)
        lacking = -(-slots // self.kv.block_size) - table.num_blocks[rows]
        lacking[table.finished[rows]] = 0
        at_least: Int64Array = np.maximum(lacking, 0)
        return at_least

    def _place_decode_rows(
        self, out: SchedulerOutput, rows: Int64Array, k: int
    ) -> tuple[Int64Array, Int64Array] | None:
        """Give every row its blocks: with fewer drafts, or by preempting the newest, if need be.

        Returns rows and drafts, or None where results in flight must be collected first.
        """
        pool = self.kv.pool
        while True:
            drafts = self._row_drafts(rows, k)
            lacking = self._new_blocks(rows, drafts)
            if lacking.sum() <= pool.num_free:
                break
            if drafts.any():
                k = int(drafts.max()) - 1
                out.k_reason = f"free blocks: {pool.num_free}"
                continue
            if self._launched:
                out.k = 0
                return None
            self._make_room()
            rows = self._decode_rows()
            if not len(rows):
                break
        out.k = min(out.k, k)
        if len(rows):
            grown = self.kv.grow(rows, lacking)
            out.new_block_rows, out.new_block_indices, out.new_block_ids = grown
        return rows, drafts

    def _make_room(self) -> None:
        """Free blocks: finished rows of a static batch first, then the newest sequence's."""
        table = self.table
        if table.finished.any():
            for row in np.flatnonzero(table.finished).tolist():
                self.kv.release(row)
            return
        order = table.rows_in_order(table.occupied)
        newest = int(order[-1])
        if len(order) > 1:
            self._preempt(newest)
        else:
            # Alone and still short: the pool is smaller than what it asked for.
            self._finish(table.sequence(newest), Ending(newest, "length"))

    def _preempt(self, row: int) -> None:
        sequence = self.table.sequence(row)
        self.kv.preempt(row)
        self._freed_rows.append(row)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._num_waiting += 1

    def _emit_decode(self, out: SchedulerOutput, rows: Int64Array, drafts: Int64Array) -> None:
        table = self.table
        lagging = table.draft_lag[rows] > READY_LAG if self._drafter_has_kv else drafts < 0
        room = table.draft_room(rows)
        self.stats.record_choice(out.k, out.k_reason, drafts, room, lagging)
        out.decode_rows = rows.astype(np.int32)
        out.num_draft_tokens = drafts.astype(np.int32)
        out.num_batched_tokens += int(drafts.sum()) + len(rows)
        out.compute_finished = self.config.batching == "static"
        table.in_flight_max[rows] += drafts + 1
        table.in_flight_min[rows] += 1
        if self._drafter_has_kv:
            table.draft_lag[rows] = np.where(drafts > 0, READY_LAG, table.draft_lag[rows] + 1)

    # ---- prefill --------------------------------------------------------------------------------

    def _schedule_prefill(self, out: SchedulerOutput, catch_up: CatchUp | None) -> None:
        """Prefill chunks of running rows, then admissions, first come first served."""
        table = self.table
        chunks: list[tuple[int, int, int]] = []
        filling = table.rows_in_order(table.occupied & ~table.decoding & ~table.finished)
        for row in filling.tolist():
            self._add_chunk(out, chunks, catch_up, row)
        while self._budget_left(out) > 0 and (admitted := self._admit_next(out)) is not None:
            self._add_chunk(out, chunks, catch_up, admitted)
        if not chunks:
            return
        columns = np.array(chunks, np.int64).T
        rows, starts, lens = columns
        samples = starts + lens == table.prefill_end[rows]
        out.prefill_rows, out.prefill_starts, out.prefill_lens = columns.astype(np.int32)
        out.prefill_samples = samples
        done = rows[samples]
        table.decoding[done] = True
        table.in_flight_max[done] += 1
        table.in_flight_min[done] += 1
        table.draft_lag[done] = table.num_tokens[done] + 1 - table.draft_filled[done]

    def _budget_left(self, out: SchedulerOutput) -> int:
        return self.config.max_num_batched_tokens - out.num_batched_tokens

    def _add_chunk(
        self,
        out: SchedulerOutput,
        chunks: list[tuple[int, int, int]],
        catch_up: CatchUp | None,
        row: int,
    ) -> None:
        table = self.table
        start, goal = int(table.num_computed[row]), int(table.prefill_end[row])
        count = min(goal - start, self._budget_left(out))
        if count <= 0:
            return
        end = start + count
        chunks.append((row, start, count))
        table.num_computed[row] = end
        out.num_batched_tokens += count
        # Every pass writes K and V before it reads, so later rows of this pass may share the
        # blocks.
        self.kv.register_full_blocks(row, end)
        if catch_up is not None:
            catch_up.add_prefill_chunk(out, row, start, end)

    def _admit_next(self, out: SchedulerOutput) -> int | None:
        """Give the first waiting sequence a row if everything it needs is there."""
        while self.waiting and self.waiting[0].finished:
            self.waiting.popleft()
        if not self.waiting or not self.table.has_free_row or self._static_batch_closed:
            return None
        sequence = self.waiting[0]
        leader = sequence.leader
        if leader.row >= 0 and not self.table.decoding[leader.row]:
            return None  # wait until an earlier step computed the prompt to be shared
        prefix = self.kv.find_prefix(sequence)
        if not self._has_room(sequence, prefix, out):
            return None
        self.waiting.popleft()
        self._num_waiting -= 1
        if sequence.request.first_scheduled_time is None:
            sequence.request.first_scheduled_time = time.monotonic()
        row, copies = self.kv.admit(sequence, prefix)
        out.block_copies += copies
        out.new_rows.append(self.table.describe(row))
        self.stats.num_cached_tokens += prefix.num_tokens - prefix.num_restored
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = prefix.num_tokens
            if self.kv.enable_prefix_caching and sequence is leader:
                self.stats.num_prefix_queries += sequence.request.prompt_len
                self.stats.num_prefix_hits += prefix.num_tokens
        return row

    def _has_room(self, sequence: Sequence, prefix: Prefix, out: SchedulerOutput) -> bool:
        needed = self.kv.blocks_needed(sequence, prefix)
        # Running rows keep a block each to grow into, or the newcomer would be preempted at once.
        if needed + self.table.num_occupied > self.kv.pool.num_free:
            return False
        todo = len(sequence.token_ids) - prefix.num_tokens
        return self.config.enable_chunked_prefill or todo <= self._budget_left(out)

    # ---- static batching ------------------------------------------------------------------------

    def _end_static_batch(self) -> None:
        """Let go of a batch all of whose sequences have finished; the next may form."""
        table = self.table
        if self.config.batching != "static":
            return
        if self.num_running == 0 and not self._launched:
            for row in np.flatnonzero(table.occupied).tolist():
                self.kv.release(row)
        if table.num_occupied == 0:
            self._static_batch_closed = False

    def _close_static_batch(self) -> bool:
        """Start decoding a batch that nothing more can join; whether that was just decided."""
        forming = self.config.batching == "static" and not self._static_batch_closed
        if not forming or self.num_running == 0:
            return False
        self._static_batch_closed = True
        return True

    # ---- results --------------------------------------------------------------------------------

    def _launch(self, out: SchedulerOutput) -> None:
        """Stamp a step that will run, and remember what it may add."""
        table, stats = self.table, self.stats
        out.freed_rows, self._freed_rows = self._freed_rows, []
        out.swap_outs, out.swap_ins = self.kv.swap.take_copies()
        self._step += 1
        done = out.prefill_rows[out.prefill_samples].astype(np.int64)
        rows = np.concatenate([out.decode_rows.astype(np.int64), done])
        at_most = np.concatenate([out.num_draft_tokens.astype(np.int64) + 1, np.ones_like(done)])
        self._launched.append(_Launched(rows, table.generation[rows], at_most))
        stats.num_blocks_swapped_out += len(out.swap_outs)
        stats.num_blocks_swapped_in += len(out.swap_ins)
        stats.num_steps += 1
        stats.num_decode_passes += bool(len(out.decode_rows))
        stats.num_prefill_passes += bool(len(out.prefill_rows))
        stats.num_prefill_chunks += len(out.prefill_rows)
        stats.num_prompt_tokens += int(out.prefill_lens.sum())
        stats.num_batched_tokens += out.num_batched_tokens

    def update_from_output(self, output: ModelRunnerOutput) -> None:
        """Commit a step's results, in launch order; events are fetched with ``take_events``."""
        table = self.table
        launched = self._launched.popleft()
        same = table.generation[launched.rows] == launched.generations
        rows = launched.rows[same]
        table.in_flight_max[rows] -= launched.at_most[same]
        table.in_flight_min[rows] -= 1
        committed = commit(table, self.kv, self.stats, output)
        self._events.first_tokens += committed.first_tokens
        self._events.streamed += committed.streamed
        for ending in committed.endings:
            self._finish(table.sequence(ending.row), ending)
        if committed.outcome is not None:
            self.policy.observe(committed.outcome)
        self._end_static_batch()

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        """End a sequence wherever it is; in a static batch its row keeps computing."""
        row = sequence.row
        if row < 0:
            self._num_waiting -= 1
            self.kv.swap.drop(sequence)
        elif self.config.batching == "static" and ending.finish_reason != "abort":
            self.table.detach(row)
            self.table.finished[row] = True
            sequence.row = -1
            self._freed_rows.append(row)
        else:
            self.kv.release(row)
            self._freed_rows.append(row)
        sequence.status = SequenceStatus.FINISHED
        sequence.request.num_unfinished -= 1
        sequence.finish_reason = ending.finish_reason
        sequence.stop_reason = ending.stop_reason
        sequence.error = ending.error
        self.stats.num_finished += 1
        self._events.finished.append(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, rows and queue agree; for tests."""
        self.kv.check_integrity()
        self.kv.swap.check_integrity(self.waiting)
        table = self.table
        live = table.occupied & ~table.finished
        if (table.num_tokens > table.max_total)[live].any():
            raise AssertionError("a row passed its token limit")
        if (table.in_flight_min > table.in_flight_max).any():
            raise AssertionError("bounds in flight are crossed")
        if not self._launched and table.in_flight_max.any():
            raise AssertionError("tokens in flight with nothing launched")
        alive = sum(not s.finished for s in self.waiting)
        if alive != self._num_waiting:
            raise AssertionError(f"{alive} sequences wait, {self._num_waiting} are counted")
