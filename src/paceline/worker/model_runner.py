"""Executes one step: row changes, decode pass (draft, verify, sample, advance), prefill pass,
catch-up.

Everything that touches a tensor lies behind ``launch`` and ``collect``. The runner names no
concrete drafter or attention backend and knows no requests: rows, tokens and sampling parameters
only.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.arrays import BoolArray, Int32Array, Int64Array
from paceline.core.step import ModelRunnerOutput, SchedulerOutput
from paceline.models.decoder import DecoderModel
from paceline.sample.logprobs import token_logprobs
from paceline.sample.sampler import Sampler, nonfinite_rows
from paceline.sample.verify import count_accepted
from paceline.spec.drafter import Drafter
from paceline.worker.batch import PassInput, build_pass
from paceline.worker.decode_state import DecodeState
from paceline.worker.kv_cache import KVCache, copy_blocks
from paceline.worker.row_grammars import RowGrammars
from paceline.worker.threads import limit_threads

NONFINITE = (
    "the model gave logits that are not finite. hint: its weights may be damaged or overflow in "
    "this dtype; try dtype='float32'"
)


# Prompt positions whose logits are held at once: 256 rows of a 150,000-entry vocabulary are 150 MB.
PROMPT_LOGITS_ROWS = 256


class ModelRunner:
    """The eager runner; work is done in ``launch``, in the caller's thread.

    num_threads: of a step; by default what torch has.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: list[KVCache],
        state: DecodeState,
        sampler: Sampler,
        drafter: Drafter | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        self.state = state
        self.grammars = RowGrammars(model.arch.vocab_size)
        self._masks: dict[int, Int32Array] = {}  # of rows with a grammar, for the pass under way
        self._num_threads = num_threads or torch.get_num_threads()
        self._model = model
        self._kv_caches = kv_caches
        self._sampler = sampler
        self._drafter = drafter

    @torch.inference_mode()
    def launch(self, out: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step; the handle is its result."""
        with limit_threads(self._num_threads):
            return self._run(out)

    def _run(self, out: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput(out.step)
        if out.block_copies:
            copy_blocks(self._kv_caches, out.block_copies)
            if self._drafter is not None:
                self._drafter.copy_blocks(out.block_copies)
        self.state.apply(out)
        self.grammars.apply(out)
        if len(out.decode_rows):
            self._decode(out, result)
        if len(out.prefill_rows):
            self._prefill(out, result)
        if len(out.catch_up_rows) and self._drafter is not None:
            # Also for rows that just went inactive: the scheduler counts these blocks as filled,
            # and they may be shared from now on.
            self._drafter.catch_up(
                out.catch_up_rows.astype(np.int64),
                out.catch_up_starts.astype(np.int64),
                out.catch_up_ends.astype(np.int64),
            )
        return result

    def collect(self, handle: ModelRunnerOutput) -> ModelRunnerOutput:
        """The result of a launched step."""
        return handle

    def close(self) -> None:
        """What is held goes with the runner itself."""

    def _forward(self, batch: PassInput) -> torch.Tensor:
        hidden: torch.Tensor = self._model(
            batch.input_ids, batch.positions, self._kv_caches, batch.metadata
        )
        return hidden

    # ---- decode: draft, verify, sample, advance --------------------------------------------------

    def _decode(self, out: SchedulerOutput, result: ModelRunnerOutput) -> None:
        state = self.state
        rows = out.decode_rows.astype(np.int64)
        drafts = out.num_draft_tokens.astype(np.int64)
        if not out.compute_finished:
            live = state.active[rows]
            rows, drafts = rows[live], drafts[live]
            if not len(rows):
                return
        count = state.num_tokens[rows]
        # The host may not know yet how close to its end a row has come.
        drafts = np.minimum(drafts, state.max_total[rows] - count - 1).clip(min=0)
        if self._drafter is not None and drafts.any():
            drafts = self._drafter.propose(rows, count, drafts)
        checked = drafts
        if self.grammars:
            alive, checked = self._ask_grammars(rows, drafts, result)
            rows, count = rows[alive], count[alive]
            drafts, checked = drafts[alive], checked[alive]
            if not len(rows):
                return
        runs, bad = self._verify(rows, count, checked, result)
        # A draft on which the model breaks may spoil the tokens before it: masked or not, its NaN
        # lies in their attention's sums. Such rows are computed again as if nothing was drafted.
        spoilt = bad.any(1) & (checked > 0) & state.active[rows]
        checked = np.where(spoilt, 0, checked)
        if spoilt.any():
            again, bad_again = self._verify(rows[spoilt], count[spoilt], checked[spoilt], result)
            runs[spoilt, :1], bad[spoilt, :1] = again, bad_again
        guesses = state.history[rows[:, None], count[:, None] + np.arange(runs.shape[1] - 1)]
        accepted = count_accepted(
            torch.from_numpy(runs), torch.from_numpy(guesses), torch.from_numpy(checked)
        ).numpy()
        failed = bad[:, 0]  # rows with drafts are free of bad logits by now
        counts = np.where(failed, 0, accepted + 1)
        self._finish_rows(rows, runs, counts, failed, drafts, result)

    def _ask_grammars(
        self, rows: Int64Array, drafts: Int64Array, result: ModelRunnerOutput
    ) -> tuple[BoolArray, Int64Array]:
        """Get the masks of this pass of the rows that have a grammar.

        Returns [B] which rows can go on, and how many of each row's drafts are worth verifying:
        those behind the first that leaves its grammar are not.
        """
        state = self.state
        alive = np.ones(len(rows), np.bool_)
        checked = drafts.copy()
        self._masks.clear()
        for i in np.flatnonzero(self.grammars.which(rows) & state.active[rows]).tolist():
            row, count, k = int(rows[i]), int(state.num_tokens[rows[i]]), int(drafts[i])
            start = int(state.prompt_len[row]) + self.grammars.num_tokens(row)
            tokens = state.history[row]
            filled = self.grammars.fill(row, tokens[start:count], tokens[count : count + k])
            if filled is not None:
                self._masks[row], checked[i] = filled
            else:
                alive[i] = state.active[row] = False
                fault = self.grammars.fault(row)
                result.failed.append((row, int(state.generation[row]), fault))
        return alive, checked

    def _verify(
        self, rows: Int64Array, count: Int64Array, drafts: Int64Array, result: ModelRunnerOutput
    ) -> tuple[Int64Array, BoolArray]:
        """The target's own samples after each row's last token and after each of its drafts.

        Returns [B, K] ids and where the logits behind them were not finite; entries of a row beyond
        its drafts repeat its last.
        """
        discard = ~self.state.active[rows]
        batch = build_pass(self.state, rows, count - 1, drafts + 1, discard=discard)
        logits = self._model.compute_logits(self._forward(batch))
        sampled, bad = self._sample(logits, batch, result)
        columns = np.minimum(np.arange(int(drafts.max()) + 1), drafts[:, None])
        index = (batch.ends - drafts - 1)[:, None] + columns
        return sampled[index], bad[index]

    # ---- prefill ---------------------------------------------------------------------------------

    def _prefill(self, out: SchedulerOutput, result: ModelRunnerOutput) -> None:
        state = self.state
        rows = out.prefill_rows.astype(np.int64)
        live = state.active[rows]
        if not live.any():
            return
        rows = rows[live]
        starts = out.prefill_starts.astype(np.int64)[live]
        lens = out.prefill_lens.astype(np.int64)[live]
        samples = out.prefill_samples[live]
        batch = build_pass(state, rows, starts, lens)
        hidden = self._forward(batch)
        for i in np.flatnonzero(state.num_prompt_logprobs[rows] >= 0).tolist():
            begin = int(batch.ends[i] - lens[i])
            self._prompt_logprobs(
                int(rows[i]), int(starts[i]), hidden[begin : int(batch.ends[i])], result
            )
        if not samples.any():
            return
        last = batch.ends[samples] - 1
        rows = rows[samples]
        no_drafts = np.zeros(len(rows), np.int64)
        if self.grammars:
            alive, _ = self._ask_grammars(rows, no_drafts, result)
            rows, last, no_drafts = rows[alive], last[alive], no_drafts[alive]
            if not len(rows):
                return
        logits = self._model.compute_logits(hidden[torch.from_numpy(last)])
        batch.token_rows, batch.token_positions = rows, batch.token_positions[last]
        tokens, bad = self._sample(logits, batch, result)
        counts = np.where(bad, no_drafts, 1)
        self._finish_rows(rows, tokens[:, None], counts, bad, no_drafts, result)

    def _prompt_logprobs(
        self, row: int, start: int, hidden: torch.Tensor, result: ModelRunnerOutput
    ) -> None:
        """Logprobs of the prompt tokens that follow this chunk's positions."""
        state = self.state
        end = min(start + len(hidden), int(state.prompt_len[row]) - 1)
        wanted = int(state.num_prompt_logprobs[row])
        for at in range(start, end, PROMPT_LOGITS_ROWS):
            to = min(end, at + PROMPT_LOGITS_ROWS)
            logits = self._model.compute_logits(hidden[at - start : to - start])
            following = torch.from_numpy(state.history[row, at + 1 : to + 1].astype(np.int64))
            result.prompt_logprobs[row, int(state.generation[row]), at] = token_logprobs(
                logits, following, wanted, self._sampler.vocab_limit
            )

    # ---- common to both --------------------------------------------------------------------------

    def _sample(
        self, logits: torch.Tensor, batch: PassInput, result: ModelRunnerOutput
    ) -> tuple[Int64Array, BoolArray]:
        """Sample after every token of the batch: ids [N], and [N] where logits are not finite."""
        state = self.state
        wanted = state.num_logprobs[batch.token_rows]
        asked = np.flatnonzero(wanted >= 0)
        raw = logits[torch.from_numpy(asked)] if len(asked) else None
        bad = nonfinite_rows(logits).numpy()
        ids: Int64Array = self._sampler.sample(
            logits,
            batch.token_rows,
            batch.token_positions + 1,
            state.sampling,
            allowed=self._allowed(batch.token_rows) if self.grammars else None,
        ).numpy()
        if raw is not None:
            asked_rows = batch.token_rows[asked]
            for row in np.unique(asked_rows).tolist():
                mine = np.flatnonzero(asked_rows == row)
                result.logprobs[row] = token_logprobs(
                    raw[torch.from_numpy(mine)],
                    torch.from_numpy(ids[asked[mine]]),
                    int(state.num_logprobs[row]),
                    self._sampler.vocab_limit,
                )
        return ids, bad

    def _allowed(self, token_rows: Int64Array) -> tuple[Int64Array, Int32Array] | None:
        """Which tokens of a pass have a mask, and the masks; see ``Sampler.sample``."""
        places: list[Int64Array] = []
        masks: list[Int32Array] = []
        for row, words in self._masks.items():
            mine = np.flatnonzero(token_rows == row)
            places.append(mine)
            masks.append(words[: len(mine)])
        return (np.concatenate(places), np.concatenate(masks)) if places else None

    def _finish_rows(
        self,
        rows: Int64Array,
        runs: Int64Array,
        counts: Int64Array,
        failed: BoolArray,
        drafts: Int64Array,
        result: ModelRunnerOutput,
    ) -> None:
        """Report the active rows' runs and advance them; rows that failed do not go on."""
        state = self.state
        live = state.active[rows]
        for row in rows[failed & live].tolist():
            result.failed.append((row, int(state.generation[row]), NONFINITE))
        live &= counts > 0
        result.add(rows[live], state.generation[rows[live]], runs[live], counts[live], drafts[live])
        state.advance(rows[live], runs[live], counts[live])
        state.active[rows[failed]] = False
