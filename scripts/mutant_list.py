"""The known mistakes that ``mutants.py`` makes, and the tests that must notice.

An entry's ``old`` text occurs exactly once in its file. Name the narrowest tests that fail: they
are run until the first failure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A mistake: in ``file`` of the package ``old`` becomes ``new``; one of ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


GREEDY = "tests/e2e/test_exact_greedy.py"
SAMPLING = "tests/e2e/test_exact_sampling.py"
SELF = "tests/e2e/test_self_draft.py"
COMMIT = "tests/e2e/test_commit.py"
CACHE = "tests/e2e/test_prefix_cache.py"
LOGPROBS = "tests/e2e/test_logprobs.py"
FAILURES = "tests/e2e/test_failures.py"
SAME = f"{SAMPLING}::test_same_tokens_with_any_drafter_in_any_company"

MUTANTS = [
    # ---- verification and noise ----
    Mutant(
        "accept all drafts",
        "sample/verify.py",
        "return matches.long().cumprod(dim=1).sum(dim=1)",
        "return proposed.long().sum(dim=1)",
        (SAME,),
    ),
    Mutant(
        "accept drafts behind a rejected one",
        "sample/verify.py",
        "return matches.long().cumprod(dim=1).sum(dim=1)",
        "return matches.long().sum(dim=1)",
        (SAME,),
    ),
    Mutant(
        "compare padding with samples",
        "sample/verify.py",
        "(sampled[:, :k] == drafts) & proposed",
        "sampled[:, :k] == drafts",
        ("tests/sample/test_verify.py",),
    ),
    Mutant(
        "noise position off by one, in verify passes only",
        "worker/model_runner.py",
        "        sampled, bad = self._sample(logits, batch, result)\n",
        "        self.state.sampling.prompt_len -= int(drafts.any())\n"
        "        sampled, bad = self._sample(logits, batch, result)\n"
        "        self.state.sampling.prompt_len += int(drafts.any())\n",
        (SAME,),
    ),
    Mutant(
        "noise position off by one, in the drafter only",
        "worker/draft_model.py",
        "sample(logits, chosen, count + i, state.sampling, truncate=False)",
        "sample(logits, chosen, count + i + 1, state.sampling, truncate=False)",
        (f"{SELF}::test_alone",),
    ),
    Mutant(
        "noise counted from the end of a recomputed sequence",
        "core/scheduler.py",
        "prompt_len=request.prompt_len,\n            max_total",
        "prompt_len=len(sequence.token_ids),\n            max_total",
        (SAME,),
    ),
    Mutant(
        "one noise for all outputs of a request",
        "core/scheduler.py",
        "sample_index=sequence.index",
        "sample_index=0",
        (f"{SAMPLING}::test_outputs_of_one_request_differ_and_do_not_depend_on_speculation",),
    ),
    Mutant(
        "engine seed ignored",
        "core/scheduler.py",
        "derive_seed(self._seed, request.number)",
        "derive_seed(0, request.number)",
        (f"{SAMPLING}::test_unseeded_requests_repeat_from_run_to_run",),
    ),
    Mutant(
        "unknown ids not masked",
        "sample/sampler.py",
        "if self.vocab_limit is not None and self.vocab_limit < logits.shape[1]:",
        "if False:",
        (f"{GREEDY}::test_ids_the_tokenizer_does_not_know_are_masked",),
    ),
    # ---- processing ----
    Mutant(
        "penalty counts without the draft prefix",
        "sample/processing.py",
        "    lengths = np.maximum(positions - prompt_len, 0)\n",
        "    lengths = np.maximum(np.full_like(positions, positions[0]) - prompt_len, 0)\n",
        (SAME,),
    ),
    Mutant(
        "min_tokens counted from the step instead of the token",
        "sample/processing.py",
        "    too_short = positions - state.prompt_len[rows] < state.min_tokens[rows]\n",
        "    starts = np.array([positions[rows == row].min() for row in rows], np.int64)\n"
        "    too_short = starts - state.prompt_len[rows] < state.min_tokens[rows]\n",
        (SAME, f"{COMMIT}::test_reasons_do_not_depend_on_speculation"),
    ),
    Mutant(
        "drafter ignores penalties and bias",
        "worker/draft_model.py",
        "            tokens = self._sampler.sample(",
        "            state.sampling.flags &= 3\n            tokens = self._sampler.sample(",
        (SAME, f"{SELF}::test_alone"),
    ),
    # ---- the drafter's KV ----
    Mutant(
        "no catch-up in the drafter",
        "worker/draft_model.py",
        "        self._forward(rows, starts, ends - starts)\n",
        "        return\n",
        (f"{SELF}::test_after_twenty_idle_steps_of_a_policy_of_ones_own",),
    ),
    Mutant(
        "no catch-up in the scheduler",
        "core/scheduler.py",
        "            catch_up.add_decode_rows(out)\n",
        "            self.table.draft_lag[:] = 0\n",
        (f"{SELF}::test_after_twenty_idle_steps_of_a_policy_of_ones_own",),
    ),
    Mutant(
        "drafter feeds only the last token",
        "worker/draft_model.py",
        "np.full(len(chosen), 2 if i == 0 else 1, np.int64)",
        "np.full(len(chosen), 1, np.int64)",
        (f"{SELF}::test_alone",),
    ),
    Mutant(
        "last draft taken for fed",
        "core/commit.py",
        "np.minimum(accepted, proposed - 1)",
        "np.minimum(accepted, proposed)",
        (f"{SELF}::test_after_idle_steps_again_and_again_in_company",),
    ),
    Mutant(
        "cached blocks taken for known to the drafter",
        "core/kv_cache_manager.py",
        "self._drafter_filled(row, prefix.num_tokens)",
        "prefix.num_tokens",
        (f"{SELF}::test_after_a_prefix_hit_on_blocks_the_drafter_has_not_seen",),
    ),
    Mutant(
        "reused blocks taken for known to the drafter",
        "core/block_pool.py",
        "        self.drafter_filled[blocks] = 0\n",
        "",
        ("tests/core/test_block_pool.py", CACHE),
    ),
    Mutant(
        "copied block without the drafter's half",
        "worker/model_runner.py",
        "                self._drafter.copy_blocks(out.block_copies)\n",
        "                pass\n",
        (f"{SELF}::test_outputs_of_one_request_share_drafter_kv",),
    ),
    Mutant(
        "drafts beyond the drafter's context",
        "core/scheduler.py",
        "np.minimum(drafts, self._drafter_context - at_most)",
        "np.minimum(drafts, 1 << 30)",
        (f"{SELF}::test_drafter_with_a_shorter_context",),
    ),
    # ---- blocks and the prefix cache ----
    Mutant(
        "stale drafts registered in the prefix cache",
        "core/commit.py",
        "    computed = start + kept - 1\n",
        "    computed = start + runs.proposed\n",
        (f"{CACHE}::test_generated_tokens_are_found_and_drafts_are_not",),
    ),
    Mutant(
        "last token registered in the prefix cache",
        "core/commit.py",
        "    computed = start + kept - 1\n",
        "    computed = start + kept\n",
        (f"{CACHE}::test_generated_tokens_are_found_and_drafts_are_not",),
    ),
    Mutant(
        "prompt registered before it is computed",
        "core/scheduler.py",
        "self.kv.register_full_blocks(row, end)",
        "self.kv.register_full_blocks(row, goal)",
        (f"{CACHE}::test_prompt_given_up_half_way",),
    ),
    Mutant(
        "hashes of blocks without what precedes them",
        "core/kv_cache_manager.py",
        'parent = hashes[-1] if hashes else b""',
        'parent = b""',
        (f"{CACHE}::test_equal_blocks_behind_other_tokens_are_others",),
    ),
    Mutant(
        "evicted blocks still found",
        "core/block_pool.py",
        "                del self._cached[block_hash]\n"
        "                self._hashes[block] = None\n",
        "                pass\n",
        (f"{CACHE}::test_blocks_that_were_handed_out_again_are_not_found",),
    ),
    Mutant(
        "partial block shared instead of copied",
        "worker/model_runner.py",
        "            copy_blocks(self._kv_caches, out.block_copies)\n",
        "            pass\n",
        (f"{SAMPLING}::test_outputs_of_one_request_differ_and_do_not_depend_on_speculation",),
    ),
    Mutant(
        "blocks freed but the row not deactivated",
        "core/scheduler.py",
        "        else:\n"
        "            self.kv.release(row)\n"
        "            self._freed_rows.append(row)\n"
        "        sequence.status",
        "        else:\n            self.kv.pool.free(self.table.blocks(row))\n"
        "            self.table.detach(row)\n"
        "        sequence.status",
        (GREEDY,),
    ),
    Mutant(
        "blocks freed while the sequence goes on",
        "core/scheduler.py",
        "        self.kv.release(row)\n"
        "        self._freed_rows.append(row)\n"
        "        sequence.status = SequenceStatus.WAITING\n",
        "        self.kv.pool.free(self.table.blocks(row)[-1:])\n        return\n",
        (GREEDY,),
    ),
    Mutant(
        "results of a row's earlier owner kept",
        "core/commit.py",
        "(table.generation[output.rows] == output.generations)",
        "table.occupied[output.rows]",
        (f"{COMMIT}::test_results_of_an_earlier_owner_of_a_row_are_dropped",),
    ),
    Mutant(
        "finished row goes on on the device",
        "worker/decode_state.py",
        "self.active[rows] &= ~stopped & (end < self.max_total[rows])",
        "self.active[rows] &= ~stopped",
        (f"{COMMIT}::test_device_knows_stop_ids_and_lengths",),
    ),
    Mutant(
        "row that met a stop id goes on on the device",
        "worker/decode_state.py",
        "self.active[rows] &= ~stopped & (end < self.max_total[rows])",
        "self.active[rows] &= end < self.max_total[rows]",
        (f"{COMMIT}::test_device_knows_stop_ids_and_lengths",),
    ),
    # ---- scheduling ----
    Mutant(
        "static batch admits newcomers",
        "core/scheduler.py",
        " or not self.table.has_free_row or self._static_batch_closed:",
        " or not self.table.has_free_row:",
        (f"{GREEDY}::test_closed_static_batch_lets_nobody_in",),
    ),
    Mutant(
        "finished row of a static batch not computed",
        "worker/model_runner.py",
        "np.minimum(drafts, state.max_total[rows] - count - 1).clip(min=0)",
        "np.minimum(drafts, state.max_total[rows] - count - 1)",
        (f"{GREEDY}::test_static_batch_computes_finished_rows_to_its_end",),
    ),
    Mutant(
        "oldest sequence preempted",
        "core/scheduler.py",
        "newest = int(order[-1])",
        "newest = int(order[0])",
        ("tests/core/test_scheduler.py::test_oldest_sequence_is_never_preempted",),
    ),
    Mutant(
        "prompt sampled from before its end",
        "core/scheduler.py",
        "samples = starts + lens == table.prefill_end[rows]",
        "samples = lens > 0",
        (f"{GREEDY}::test_equals_transformers",),
    ),
    Mutant(
        "bonus token thrown away",
        "sample/verify.py",
        "return matches.long().cumprod(dim=1).sum(dim=1)",
        "return (matches.long().cumprod(dim=1).sum(dim=1) - 1).clamp(min=0)",
        (f"{SELF}::test_alone",),
    ),
    # ---- the commit ----
    Mutant(
        "stop id checked per step instead of per token",
        "core/commit.py",
        "    runs.kept = np.where(by_id, hits.argmax(1) + 1, runs.kept)\n",
        "",
        (f"{COMMIT}::test_each_position_can_be_the_stop",),
    ),
    Mutant(
        "stop string checked per step instead of per token",
        "core/commit.py",
        "            runs.kept[i] = kept\n",
        "",
        (f"{COMMIT}::test_stop_strings_cut_to_the_token",),
    ),
    Mutant(
        "length checked per step instead of per token",
        "core/commit.py",
        "np.minimum(runs.sampled, table.max_total[rows] - runs.start)",
        "runs.sampled",
        (f"{COMMIT}::test_max_tokens_does_not_rest_on_the_device",),
    ),
    Mutant(
        "stop string wins over an earlier stop id",
        "core/commit.py",
        "tokens[i, : runs.kept[i] - int(by_id[i])]",
        "tokens[i, : runs.sampled[i]]",
        (f"{COMMIT}::test_the_first_stop_names_the_reason",),
    ),
    Mutant(
        "stop strings searched in the first min_tokens tokens",
        "engine/stop_checker.py",
        "self._unsearched = min_tokens if stop else 0",
        "self._unsearched = 0",
        (f"{COMMIT}::test_min_tokens",),
    ),
    Mutant(
        "logprobs behind the cut kept",
        "core/commit.py",
        "logprobs.head(kept[row])",
        "logprobs",
        (f"{LOGPROBS}::test_logprobs_follow_the_cut",),
    ),
    Mutant(
        "logprobs of processed logits",
        "worker/model_runner.py",
        "raw = logits[torch.from_numpy(asked)] if len(asked) else None",
        "raw = logits if len(asked) else None",
        (f"{LOGPROBS}::test_logprobs",),
    ),
    Mutant(
        "prompt logprobs repeated by recomputation",
        "core/commit.py",
        "logprobs.tail(max(0, sequence.num_prompt_logprobs - start))",
        "logprobs.tail(0)",
        (f"{LOGPROBS}::test_logprobs_survive_preemption",),
    ),
    Mutant(
        "prompt logprobs skip what is cached",
        "core/kv_cache_manager.py",
        "if sequence.num_prompt_logprobs < self._prompt_logprobs_wanted(sequence):",
        "if False:",
        (f"{LOGPROBS}::test_prompt_logprobs",),
    ),
    Mutant(
        "drafts behind the cut counted",
        "core/commit.py",
        "np.where(kept < runs.sampled, np.minimum(runs.proposed, kept), runs.proposed)",
        "runs.proposed",
        (f"{COMMIT}::test_accepted_tokens_of_a_cut_run", f"{COMMIT}::test_counters_follow_the_cut"),
    ),
    # ---- failures ----
    Mutant(
        "NaN taken for a token",
        "worker/model_runner.py",
        "bad = nonfinite_rows(logits).numpy()",
        "bad = np.zeros(len(logits), np.bool_)",
        (f"{FAILURES}::test_model_of_nan_ends_with_an_error",),
    ),
    Mutant(
        "engine not emptied after a failed step",
        "engine/llm_engine.py",
        "            self._start()\n            if not isinstance",
        "            if not isinstance",
        (f"{FAILURES}::test_step_that_raises",),
    ),
    Mutant(
        "abort forgets the blocks",
        "core/scheduler.py",
        '                self._finish(sequence, Ending(sequence.row, "abort"))\n',
        "                sequence.status = SequenceStatus.FINISHED\n",
        (f"{FAILURES}::test_leaving_a_stream_frees_its_blocks",),
    ),
]
