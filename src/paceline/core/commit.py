"""The one commit routine: accepted run, then cut, then account.

Every sampled token passes here, with and without speculation: a run of one or more ids per row is
cut at the first stop id, stop string or length limit, and ids, logprobs, block hashes, drafter fill
and statistics follow the cut run. Token by token inside the run, never step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.arrays import BoolArray, Int64Array
from paceline.core.kv_cache_manager import KVCacheManager
from paceline.core.rows import RowTable
from paceline.core.stats import EngineStats
from paceline.core.step import ModelRunnerOutput
from paceline.request import Request, Sequence
from paceline.spec.policy import DraftOutcome


@dataclass(slots=True)
class Ending:
    """A sequence that ends with this run."""

    row: int
    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class Committed:
    """What one step's results came to."""

    endings: list[Ending] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    streamed: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    outcome: DraftOutcome | None = None


@dataclass(slots=True)
class _Runs:
    """One step's live results: M rows, runs of at most K ids."""

    rows: Int64Array  # [M]
    tokens: Int64Array  # [M, K]
    kept: Int64Array  # [M] ids left after the cut
    sampled: Int64Array  # [M] accepted drafts + 1
    proposed: Int64Array  # [M]
    start: Int64Array  # [M] committed tokens before this run


def commit(
    table: RowTable, kv: KVCacheManager, stats: EngineStats, output: ModelRunnerOutput
) -> Committed:
    """Apply one step's results to the row table; rows that changed owner since are dropped."""
    result = Committed()
    alive = (table.generation[output.rows] == output.generations) & ~table.finished[output.rows]
    _keep_prompt_logprobs(table, output)
    if alive.any():
        _commit_runs(table, kv, stats, output, alive, result)
    ended = {ending.row for ending in result.endings}
    for row, generation, error in output.failed:
        live = table.generation[row] == generation and not table.finished[row]
        if live and row not in ended:  # a stop in the run before the failure came first
            result.endings.append(Ending(row, "error", error=error))
    return result


def _commit_runs(
    table: RowTable,
    kv: KVCacheManager,
    stats: EngineStats,
    output: ModelRunnerOutput,
    alive: BoolArray,
    result: Committed,
) -> None:
    rows = output.rows[alive].astype(np.int64)
    runs = _Runs(
        rows,
        output.token_ids[alive].astype(np.int64),
        np.zeros(len(rows), np.int64),
        output.num_sampled[alive].astype(np.int64),
        output.num_draft_tokens[alive].astype(np.int64),
        table.num_tokens[rows],
    )
    by_id = _cut(table, runs, result)
    _store(table, runs)
    _keep_logprobs(table, runs, output)
    _account(table, kv, stats, runs, result)
    for row in rows[runs.start == table.prompt_len[rows]].tolist():
        sequence = table.sequence(row)
        result.first_tokens.append(sequence.request)
        if sequence is sequence.leader:
            stats.num_request_prompt_tokens += sequence.request.prompt_len
    for i in np.flatnonzero(table.streams[rows]).tolist():
        row = int(rows[i])
        result.streamed.append((table.sequence(row), runs.tokens[i, : runs.kept[i]].tolist()))
    _end_by_id_or_length(table, runs, by_id, result)


def _cut(table: RowTable, runs: _Runs, result: Committed) -> BoolArray:
    """Shorten each run to its first stop; returns [M] whether a stop id ended it."""
    rows, tokens = runs.rows, runs.tokens
    runs.kept = np.minimum(runs.sampled, table.max_total[rows] - runs.start)
    hits = (tokens[:, :, None] == table.stop_ids[rows][:, None, :]).any(2)
    hits &= np.arange(tokens.shape[1]) < runs.kept[:, None]
    by_id: BoolArray = hits.any(1)
    runs.kept = np.where(by_id, hits.argmax(1) + 1, runs.kept)
    for i in np.flatnonzero(table.has_stop_strings[rows]).tolist():
        sequence = table.sequence(int(rows[i]))
        checker = sequence.stop_checker
        if checker is None:
            continue
        # A stop id's own text is not searched: the id came first.
        ids = tokens[i, : runs.kept[i] - int(by_id[i])].tolist()
        kept = checker.feed(ids)
        if kept is not None:
            runs.kept[i] = kept
            by_id[i] = False
            result.endings.append(Ending(int(rows[i]), "stop", checker.stop_reason))
    return by_id


def _store(table: RowTable, runs: _Runs) -> None:
    columns = np.arange(runs.tokens.shape[1])
    kept = columns < runs.kept[:, None]  # [M, K]
    at = runs.start[:, None] + columns
    rows = np.broadcast_to(runs.rows[:, None], kept.shape)
    table.tokens[rows[kept], at[kept]] = runs.tokens[kept]
    table.num_tokens[runs.rows] = runs.start + runs.kept


def _keep_logprobs(table: RowTable, runs: _Runs, output: ModelRunnerOutput) -> None:
    if not output.logprobs:
        return
    kept = dict(zip(runs.rows.tolist(), runs.kept.tolist(), strict=True))
    for row, logprobs in output.logprobs.items():
        if row in kept:
            table.sequence(row).logprobs.append(logprobs.head(kept[row]))


def _keep_prompt_logprobs(table: RowTable, output: ModelRunnerOutput) -> None:
    for (row, generation, start), logprobs in output.prompt_logprobs.items():
        if table.generation[row] != generation:
            continue
        sequence = table.sequence(row)
        # Recomputation after a preemption repeats what is already there.
        fresh = logprobs.tail(max(0, sequence.num_prompt_logprobs - start))
        if len(fresh):
            sequence.prompt_logprobs.append(fresh)
            sequence.num_prompt_logprobs += len(fresh)


def _account(
    table: RowTable, kv: KVCacheManager, stats: EngineStats, runs: _Runs, result: Committed
) -> None:
    rows, kept, start = runs.rows, runs.kept, runs.start
    accepted = np.minimum(runs.sampled - 1, kept)
    # Drafts behind the cut were never judged.
    proposed = np.where(kept < runs.sampled, np.minimum(runs.proposed, kept), runs.proposed)
    stats.num_generation_tokens += int(kept.sum())
    if stats.commit_log is not None:
        stats.commit_log.add(table, rows, start, kept)
    drafting = proposed > 0
    if drafting.any():
        stats.record_drafts(proposed, accepted)
        table.num_drafts[rows] += drafting
        table.num_draft_tokens[rows] += proposed
        table.num_accepted_tokens[rows] += accepted
        for i in np.flatnonzero(drafting & table.keeps_rounds[rows]).tolist():
            drafts = table.sequence(int(rows[i])).speculative
            drafts.rounds.append((int(proposed[i]), int(accepted[i])))
    if (runs.proposed > 0).any():
        _record_drafter_fill(table, kv, runs)
    result.outcome = DraftOutcome(
        k=int(runs.proposed.max(initial=0)),
        num_rows=len(rows),
        num_draft_tokens=int(proposed.sum()),
        num_accepted_tokens=int(accepted.sum()),
        num_committed_tokens=int(kept.sum()),
    )
    # KV exists up to the token before the last; full blocks of it may be found by others.
    computed = start + kept - 1
    for i in np.flatnonzero(computed // kv.block_size > table.num_hashed_blocks[rows]).tolist():
        kv.register_full_blocks(int(rows[i]), int(computed[i]))


def _record_drafter_fill(table: RowTable, kv: KVCacheManager, runs: _Runs) -> None:
    """A drafting round leaves valid drafter KV up to the last draft it fed that was accepted."""
    drafting = runs.proposed > 0
    rows = runs.rows[drafting]
    start, proposed = runs.start[drafting], runs.proposed[drafting]
    accepted = np.minimum(runs.sampled[drafting] - 1, runs.kept[drafting])
    before = table.draft_filled[rows]
    after = np.maximum(start + np.minimum(accepted, proposed - 1), before)
    table.draft_filled[rows] = after
    kv.record_drafter_fill(rows, before, after)


def _end_by_id_or_length(table: RowTable, runs: _Runs, by_id: BoolArray, result: Committed) -> None:
    ended = {ending.row for ending in result.endings}
    full = runs.start + runs.kept >= table.max_total[runs.rows]
    for i in np.flatnonzero(by_id | full).tolist():
        row = int(runs.rows[i])
        if row in ended:
            continue
        if by_id[i]:
            token = int(runs.tokens[i, runs.kept[i] - 1])
            eos = token in table.sequence(row).request.eos_token_ids
            result.endings.append(Ending(row, "stop", None if eos else token))
        else:
            result.endings.append(Ending(row, "length"))
