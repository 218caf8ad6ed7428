#!/usr/bin/env python3
"""Break the engine on purpose, one small mistake at a time, and show that some test fails on each.

Every mutant is a change to one file of a temporary copy of the sources and tests; the working tree is
never touched. First the named tests must pass on an unchanged copy, or their failing would prove
nothing. Then each mutant is applied and its tests run until the first failure. A mutant that survives
means that a promise is not tested; one whose text is no longer found must be rewritten.

    python scripts/mutants.py               # all
    python scripts/mutants.py stop penalty  # those with one of these words in their names
    python scripts/mutants.py --list
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "examples", "pyproject.toml")
TIMEOUT = 300.0  # seconds; a mutant that hangs its tests is killed too
PASSED, FAILED = 0, 1  # pytest's exit codes; any other one means that nothing was tested


@dataclass(frozen=True)
class Mutant:
    """A mistake: in ``file`` (under src/paceline) the one ``old`` becomes ``new``; ``tests`` see it."""

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
BAD = "tests/e2e/test_bad_input.py"
SAME = f"{SAMPLING}::test_same_tokens_with_any_drafter_in_any_company"

MUTANTS = [
    # ---- verification and noise ----
    Mutant(
        "accept all drafts",
        "sample/verify.py",
        "return matches.long().cumprod(dim=1).sum(dim=1)",
        "return proposed.long().sum(dim=1)",
        (f"{GREEDY}::test_equals_transformers",),
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
        (SAME, "tests/sample/test_verify.py"),
    ),
    Mutant(
        "noise position off by one, in verify passes only",
        "worker/model_runner.py",
        "        sampled, bad = self._sample(logits, batch, result)\n",
        "        state.sampling.prompt_len -= int(drafts.any())\n"
        "        sampled, bad = self._sample(logits, batch, result)\n"
        "        state.sampling.prompt_len += int(drafts.any())\n",
        (SAME,),
    ),
    Mutant(
        "noise position off by one, in the drafter only",
        "spec/draft_model.py",
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
        "spec/draft_model.py",
        "            tokens = self._sampler.sample(",
        "            state.sampling.flags &= 3\n            tokens = self._sampler.sample(",
        (SAME, f"{SELF}::test_alone"),
    ),
    # ---- the drafter's KV ----
    Mutant(
        "no catch-up in the drafter",
        "spec/draft_model.py",
        "        self._forward(rows, starts, ends - starts)\n",
        "        return\n",
        (f"{SELF}::test_after_twenty_idle_steps_of_a_policy_of_ones_own",),
    ),
    Mutant(
        "no catch-up in the scheduler",
        "core/scheduler.py",
        "            self._catch_up_decode_rows(out, catch_ups)\n",
        "            self.table.draft_lag[:] = 0\n",
        (f"{SELF}::test_after_twenty_idle_steps_of_a_policy_of_ones_own",),
    ),
    Mutant(
        "drafter feeds only the last token",
        "spec/draft_model.py",
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
        ("tests/core", f"{SELF}::test_after_a_preemption", CACHE),
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
        "parent = hashes[-1] if hashes else b\"\"",
        "parent = b\"\"",
        (CACHE, "tests/core"),
    ),
    Mutant(
        "evicted blocks still found",
        "core/block_pool.py",
        "                del self._cached[block_hash]\n                self._hashes[block] = None\n",
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
        "        else:\n            self.kv.release(row)\n            self._freed_rows.append(row)\n"
        "        sequence.status",
        "        else:\n            self.kv.pool.free(self.table.blocks(row))\n"
        "            self.table.detach(row)\n"
        "        sequence.status",
        (GREEDY,),
    ),
    Mutant(
        "blocks freed while the sequence goes on",
        "core/scheduler.py",
        "        self.kv.release(row)\n        self._freed_rows.append(row)\n        sequence.status = "
        "SequenceStatus.WAITING\n",
        "        self.kv.pool.free(self.table.blocks(row)[-1:])\n"
        "        return\n",
        (GREEDY,),
    ),
    Mutant(
        "results of a row's earlier owner kept",
        "core/commit.py",
        "(table.generation[output.rows] == output.generations)",
        "table.occupied[output.rows]",
        (f"{COMMIT}::test_reasons_do_not_depend_on_speculation", "tests/core"),
    ),
    Mutant(
        "finished row goes on on the device",
        "worker/decode_state.py",
        "self.active[rows] &= ~stopped & (end < self.max_total[rows])",
        "self.active[rows] &= ~stopped",
        (GREEDY, f"{COMMIT}::test_max_tokens_is_exact"),
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
        (f"{COMMIT}::test_max_tokens_is_exact", f"{COMMIT}::test_model_length_is_exact"),
    ),
    Mutant(
        "stop string wins over an earlier stop id",
        "core/commit.py",
        "tokens[i, : runs.kept[i] - int(by_id[i])]",
        "tokens[i, : runs.sampled[i]]",
        (f"{COMMIT}::test_the_first_stop_names_the_reason",),
    ),
    Mutant(
        "logprobs behind the cut kept",
        "core/commit.py",
        "logprobs.head(kept[row])",
        "logprobs",
        (f"{COMMIT}::test_logprobs_follow_the_cut",),
    ),
    Mutant(
        "logprobs of processed logits",
        "worker/model_runner.py",
        "raw = logits[torch.from_numpy(asked)] if len(asked) else None",
        "raw = logits if len(asked) else None",
        (f"{COMMIT}::test_logprobs",),
    ),
    Mutant(
        "prompt logprobs repeated by recomputation",
        "core/commit.py",
        "logprobs.tail(max(0, sequence.num_prompt_logprobs - start))",
        "logprobs.tail(0)",
        (f"{COMMIT}::test_logprobs_survive_preemption",),
    ),
    Mutant(
        "prompt logprobs skip what is cached",
        "core/kv_cache_manager.py",
        "if sequence.num_prompt_logprobs < self._prompt_logprobs_wanted(sequence):",
        "if False:",
        (f"{COMMIT}::test_prompt_logprobs",),
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
        (f"{BAD}::test_model_of_nan_ends_with_an_error",),
    ),
    Mutant(
        "engine not emptied after a failed step",
        "engine/llm_engine.py",
        "            self._start()\n            if not isinstance",
        "            if not isinstance",
        (f"{BAD}::test_step_that_raises",),
    ),
    Mutant(
        "abort forgets the blocks",
        "core/scheduler.py",
        "                self._finish(sequence, Ending(sequence.row, \"abort\"))\n",
        "                sequence.status = SequenceStatus.FINISHED\n",
        (f"{BAD}::test_leaving_a_stream_frees_its_blocks",),
    ),
]


def select(words: list[str]) -> list[Mutant]:
    """Mutants whose names hold one of the words; all without any."""
    return [m for m in MUTANTS if not words or any(word in m.name for word in words)]


def copy_tree(target: Path) -> None:
    """The parts of the repository that tests need."""
    ignore = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target / name)


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
    """pytest's exit code (None: too slow) and the line that says what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    if tests and not any("slow" in test for test in tests):
        command += ["-m", "not slow and not model and not gpu"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no end within {TIMEOUT:.0f} s"
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = (failed or lines or done.stderr.strip().splitlines() or [""])[-1 if not failed else 0]
    return done.returncode, last.removeprefix("FAILED ").split(" - ")[0]


def apply(mutant: Mutant, tree: Path) -> None:
    """Make the mistake. Raises ValueError unless its place is found exactly once."""
    path = tree / "src" / "paceline" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds the text {text.count(mutant.old)} times, not once")
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, str(path), "exec")
    path.write_text(changed, encoding="utf-8")


def try_mutant(mutant: Mutant) -> tuple[str, str, float]:
    """Verdict (killed, survived or invalid), why, and seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as scratch:
        tree = Path(scratch)
        copy_tree(tree)
        try:
            apply(mutant, tree)
        except (ValueError, SyntaxError) as error:
            return "invalid", str(error), 0.0
        code, line = run_tests(tree, mutant.tests)
    verdict = {PASSED: "survived", FAILED: "killed", None: "killed"}.get(code, "invalid")
    return verdict, line, time.monotonic() - start


def check_unchanged(mutants: list[Mutant]) -> None:
    """Run all named tests on an unchanged copy; exits if one fails there."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="paceline-unchanged-") as scratch:
        copy_tree(Path(scratch))
        code, line = run_tests(Path(scratch), tuple(tests))
    if code != PASSED:
        raise SystemExit(f"the tests fail without any mutant: {line}")
    print(f"{len(tests)} selections of tests pass unchanged\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show that each known mistake fails some test.")
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their names")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time")
    parser.add_argument(
        "--no-baseline", action="store_true", help="skip the run on an unchanged copy"
    )
    arguments = parser.parse_args()
    mutants = select(arguments.words)
    if not mutants:
        parser.error("no mutant has such a name; see --list")
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return
    if not arguments.no_baseline:
        check_unchanged(mutants)
    width = max(len(mutant.name) for mutant in mutants)
    counts = dict.fromkeys(("killed", "survived", "invalid"), 0)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, (verdict, line, seconds) in zip(
            mutants, pool.map(try_mutant, mutants), strict=True
        ):
            counts[verdict] += 1
            print(f"{mutant.name:{width}}  {verdict:8}  {seconds:5.1f} s  {line}", flush=True)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if counts["survived"] or counts["invalid"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
