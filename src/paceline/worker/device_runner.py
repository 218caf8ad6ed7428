"""Executes steps on a GPU: enqueues row changes, a decode iteration, a prefill pass, catch-up.

``launch`` waits for nothing; ``collect`` waits for its own step, while the next one runs. All work
goes to one stream, so blocks freed by the host may be handed out at once. Results carry the row
generations of their launch: what came of an earlier owner of a row is dropped by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.arrays import Int32Array, Int64Array
from paceline.core.step import ModelRunnerOutput, NewRow, SchedulerOutput
from paceline.errors import EngineError
from paceline.sample.logprobs import token_logprobs
from paceline.sample.triton import STATUS_FAILED, STATUS_SPOILT
from paceline.worker.decode_graphs import DecodeGraphs, bucket_of
from paceline.worker.decode_step import Scores
from paceline.worker.device_rows import DeviceRows
from paceline.worker.kv_cache import copy_blocks
from paceline.worker.model_runner import NONFINITE, PROMPT_LOGITS_ROWS
from paceline.worker.prefill import PrefillPass
from paceline.worker.row_grammars import RowGrammars
from paceline.worker.split_decode import IN_RESULTS, SplitDecode
from paceline.worker.swap import HostBlocks
from paceline.worker.transfer import Download, upload

_LENGTH_STEP = 128  # tokens; rows of a batch are ordered by length in these steps


@dataclass(slots=True)
class _Sampled:
    """Results on their way: of B rows in ``bucket`` entries with k drafts."""

    rows: Int64Array  # [B]
    generations: Int64Array  # [B]
    bucket: int
    k: int
    download: Download
    scores: Scores | None  # of bucket * (k + 1) tokens, only if logprobs are asked
    drafts: Int32Array | None = None  # [B] as in ``Verified``


@dataclass(slots=True)
class _PromptPart:
    """Prompt tokens whose logprobs are asked."""

    row: int
    generation: int
    at: int  # position of the first hidden state
    hidden: torch.Tensor  # [N, hidden]
    following: torch.Tensor  # [N] int32 ids
    num_logprobs: int


@dataclass(slots=True)
class _Launched:
    """A step whose results are on their way."""

    step: int
    sampled: list[_Sampled] = field(default_factory=list)
    prompts: list[_PromptPart] = field(default_factory=list)
    failed: list[tuple[int, int, str]] = field(default_factory=list)  # as in ModelRunnerOutput


class DeviceRunner:
    """A ``Runner`` over device rows; see the file's docstring.

    prefill: the target's; catch_up: the drafter's, None where a drafter keeps no KV. vocab_limit:
    ids from here on are never reported.
    """

    def __init__(
        self,
        decode: DecodeGraphs,
        prefill: PrefillPass,
        catch_up: PrefillPass | None,
        vocab_limit: int,
    ) -> None:
        self.decode = decode
        self._step = decode.step
        self._state: DeviceRows = decode.step.state
        self._target = decode.step.target
        self.prefill = prefill
        self.catch_up = catch_up
        self._vocab_limit = vocab_limit
        self._grammars = RowGrammars(self._target.model.arch.vocab_size)
        self._split = SplitDecode(decode, self._grammars)
        self.host_blocks: HostBlocks | None = None  # set where preempted sequences are swapped
        rows = self._state.max_num_seqs
        self._generation: Int64Array = np.zeros(rows, np.int64)
        self._num_logprobs: Int64Array = np.full(rows, -1, np.int64)  # -1: not asked
        self._num_prompt_logprobs: Int64Array = np.full(rows, -1, np.int64)
        self._prompt_len: Int64Array = np.zeros(rows, np.int64)
        self._num_tokens: Int64Array = np.zeros(rows, np.int64)  # as far as results are read
        # Rows whose drafts led to logits that are not finite: from then on they take none.
        self._undrafted = np.zeros(rows, np.bool_)
        self._batch: tuple[Int64Array, Int64Array, int] | None = None  # what the buffers hold

    @torch.inference_mode()
    def launch(self, out: SchedulerOutput) -> _Launched:
        """Enqueue a step; the handle is for ``collect``."""
        launched = _Launched(out.step)
        if self.host_blocks is not None:
            self.host_blocks.copy_out(out.swap_outs)
            self.host_blocks.copy_in(out.swap_ins)
        if out.block_copies:
            copy_blocks(self._target.kv_caches, out.block_copies)
            if self.catch_up is not None:
                copy_blocks(self.catch_up.side.kv_caches, out.block_copies)
        self._change_rows(out)
        if len(out.decode_rows):
            self._decode(out, launched)
        if len(out.prefill_rows):
            self._prefill(out, launched)
        if len(out.catch_up_rows) and self.catch_up is not None:
            # Also for rows that just went inactive: their blocks count as filled from now on.
            starts = out.catch_up_starts.astype(np.int64)
            lens = out.catch_up_ends.astype(np.int64) - starts
            self.catch_up.run(out.catch_up_rows.astype(np.int64), starts, lens)
        return launched

    @torch.inference_mode()
    def collect(self, handle: _Launched) -> ModelRunnerOutput:
        """Wait for a launched step and read its results."""
        result = ModelRunnerOutput(handle.step, failed=handle.failed)
        for sampled in handle.sampled:
            self._read(sampled, result)
        for part in handle.prompts:
            logits = self._target.model.compute_logits(part.hidden)
            result.prompt_logprobs[part.row, part.generation, part.at] = token_logprobs(
                logits, part.following, part.num_logprobs, self._vocab_limit
            )
        return result

    def _change_rows(self, out: SchedulerOutput) -> None:
        state = self._state
        state.deactivate(out.freed_rows)
        state.enter(out.new_rows)
        self._grammars.apply(out)
        for new in out.new_rows:
            self._remember(new)
        state.set_blocks(out.new_block_rows, out.new_block_indices, out.new_block_ids)

    def _remember(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        self._generation[row] = new.generation
        self._prompt_len[row] = new.prompt_len
        self._num_tokens[row] = len(new.token_ids)
        self._undrafted[row] = False
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        wanted = sampling.prompt_logprobs if new.sample_index == 0 else None
        self._num_prompt_logprobs[row] = -1 if wanted is None else wanted

    # ---- decode ----------------------------------------------------------------------------------

    def _decode(self, out: SchedulerOutput, launched: _Launched) -> None:
        rows = out.decode_rows.astype(np.int64)
        drafts = out.num_draft_tokens.astype(np.int64)
        if self._grammars.which(rows).any():
            self._decode_split(rows, drafts, out.k, launched)
            return
        alone = self._undrafted[rows]
        if alone.any() and drafts.any():
            # A pass without drafts: what is behind a row's last token could spoil it again.
            self._iterate(rows[alone], np.zeros_like(rows[alone]), 0, launched)
            rows, drafts = rows[~alone], drafts[~alone]
        if len(rows):
            self._iterate(rows, drafts, out.k if drafts.any() else 0, launched)

    def _decode_split(
        self, rows: Int64Array, drafts: Int64Array, k: int, launched: _Launched
    ) -> None:
        """A pass in which some rows have a grammar."""
        if self._undrafted[rows].any() or not drafts.any():
            drafts, k = np.zeros_like(drafts), 0
        rows, bucket = self._place(rows, drafts)
        verified = self._split.run(rows, bucket, k, self._prompt_len[rows])
        self._fail(verified.dead, launched)
        self._start_download(rows, bucket, k, verified.scores, launched, verified.drafts)

    def _fail(self, rows: list[int], launched: _Launched) -> None:
        """Report rows whose grammar leaves no way to go on."""
        launched.failed += [
            (row, int(self._generation[row]), self._grammars.fault(row)) for row in rows
        ]

    def _place(self, rows: Int64Array, drafts: Int64Array) -> tuple[Int64Array, int]:
        """Put a batch into the iteration's buffers; its rows in their order there, its bucket."""
        bucket = bucket_of(len(rows), self._step.max_entries)
        # Long contexts first: attention ends when the last of its programs does. In coarse steps,
        # so that the order, and with it the buffers, seldom change.
        order = np.argsort(-(self._num_tokens[rows] // _LENGTH_STEP), kind="stable")
        self._set_batch(rows[order], drafts[order], bucket)
        return rows[order], bucket

    def _iterate(self, rows: Int64Array, drafts: Int64Array, k: int, launched: _Launched) -> None:
        rows, bucket = self._place(rows, drafts)
        scores = self.decode.run(bucket, k)
        self._start_download(rows, bucket, k, scores, launched)

    def _set_batch(self, rows: Int64Array, drafts: Int64Array, bucket: int) -> None:
        """Fill the iteration's buffers, unless they hold the same already."""
        before = self._batch
        if (
            before is not None
            and before[2] == bucket
            and np.array_equal(before[0], rows)
            and np.array_equal(before[1], drafts)
        ):
            return
        step = self._step
        packed = np.zeros((2, bucket), np.int32)
        packed[0] = self._state.max_num_seqs  # the null row
        packed[0, : len(rows)], packed[1, : len(rows)] = rows, drafts
        buffers = upload(packed, step.rows.device)
        step.rows[:bucket].copy_(buffers[0])
        step.wanted[:bucket].copy_(buffers[1])
        self._batch = rows, drafts, bucket

    def _start_download(
        self,
        rows: Int64Array,
        bucket: int,
        k: int,
        scores: Scores,
        launched: _Launched,
        drafts: Int32Array | None = None,
    ) -> None:
        asked = (self._num_logprobs[rows] >= 0).any()
        launched.sampled.append(
            _Sampled(
                rows,
                self._generation[rows],
                bucket,
                k,
                Download(self._step.results(bucket, k)),
                scores.clone() if asked else None,
                drafts,
            )
        )

    # ---- passes over known tokens ----------------------------------------------------------------

    def _prefill(self, out: SchedulerOutput, launched: _Launched) -> None:
        rows = out.prefill_rows.astype(np.int64)
        starts = out.prefill_starts.astype(np.int64)
        lens = out.prefill_lens.astype(np.int64)
        hidden = self.prefill.run(rows, starts, lens)
        ends = np.cumsum(lens)
        for i in np.flatnonzero(self._num_prompt_logprobs[rows] >= 0).tolist():
            part = hidden[int(ends[i] - lens[i]) : int(ends[i])]
            self._keep_prompt(int(rows[i]), int(starts[i]), part, launched)
        done = out.prefill_samples
        if not done.any():
            return
        rows, step = rows[done], self._step
        last = hidden[upload(ends[done] - 1, hidden.device)]
        scores = Scores(self._target.model, last, are_logits=False)
        self._set_batch(rows, np.zeros_like(rows), len(rows))
        allowed = None
        if self._grammars.which(rows).any():
            allowed, dead = self._split.first_masks(rows)
            self._fail(dead, launched)
        step.finish(len(rows), scores, 0, allowed)
        self._start_download(rows, len(rows), 0, scores, launched)

    def _keep_prompt(self, row: int, start: int, hidden: torch.Tensor, launched: _Launched) -> None:
        """Remember the hidden states whose prompt logprobs are asked."""
        end = min(start + len(hidden), int(self._prompt_len[row]) - 1)
        for at in range(start, end, PROMPT_LOGITS_ROWS):
            to = min(end, at + PROMPT_LOGITS_ROWS)
            launched.prompts.append(
                _PromptPart(
                    row,
                    int(self._generation[row]),
                    at,
                    hidden[at - start : to - start].clone(),
                    self._state.history[row, at + 1 : to + 1].clone(),
                    int(self._num_prompt_logprobs[row]),
                )
            )

    # ---- results ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the device's memory back; the runner is of no use afterwards."""
        self.decode.graphs.clear()
        del self.decode, self.prefill, self.catch_up, self._step, self._state, self._target
        del self.host_blocks, self._split
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _read(self, sampled: _Sampled, result: ModelRunnerOutput) -> None:
        """Add one iteration's results."""
        count, width = len(sampled.rows), sampled.k + 1
        values = sampled.download.wait()
        tokens = values[: sampled.bucket * width].reshape(sampled.bucket, width)[:count]
        counts, status, drafts = values[sampled.bucket * width :].reshape(3, sampled.bucket)
        counts, status, drafts = counts[:count], status[:count], drafts[:count]
        if sampled.k == 0:
            drafts = np.zeros_like(drafts)
        elif sampled.drafts is not None:
            drafts = np.where(sampled.drafts == IN_RESULTS, drafts, sampled.drafts)
        rows, generations = sampled.rows, sampled.generations
        failed = np.flatnonzero(status == STATUS_FAILED).tolist()
        if failed:
            self._check_latency()
        for i in failed:
            result.failed.append((int(rows[i]), int(generations[i]), NONFINITE))
        mine = self._generation[rows] == generations
        self._undrafted[rows[mine & (status == STATUS_SPOILT)]] = True
        live = counts > 0
        self._num_tokens[rows[mine]] += counts[mine]
        if sampled.scores is not None:
            self._add_logprobs(sampled, sampled.scores, tokens, live, result)
        result.add(rows[live], generations[live], tokens[live], counts[live], drafts[live])

    def _check_latency(self) -> None:
        """Raise EngineError if logits are not finite because the latency kernel gave up."""
        side = self._target
        if side.latency is None:
            return
        try:
            side.latency.check()
        except EngineError:
            side.latency = None
            self.decode.graphs.clear()  # they were captured with it
            raise

    def _add_logprobs(
        self,
        sampled: _Sampled,
        scores: Scores,
        tokens: np.ndarray,
        live: np.ndarray,
        result: ModelRunnerOutput,
    ) -> None:
        asked = live & (self._num_logprobs[sampled.rows] >= 0)
        asked &= self._generation[sampled.rows] == sampled.generations
        width = sampled.k + 1
        for i in np.flatnonzero(asked).tolist():
            row = int(sampled.rows[i])
            logits = scores.logits(slice(i * width, (i + 1) * width))
            chosen = torch.from_numpy(tokens[i].astype(np.int64))
            result.logprobs[row] = token_logprobs(
                logits, chosen, int(self._num_logprobs[row]), self._vocab_limit
            )
