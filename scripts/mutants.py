#!/usr/bin/env python3
"""Break the engine on purpose, one small mistake at a time, and show that some test fails on each.

Every mutant is a change to one file of a temporary copy of the sources and tests; the working tree
is never touched. First the named tests must pass on an unchanged copy, or their failing would prove
nothing. Then each mutant is applied and its tests run until the first failure. A mutant that
survives means that a promise is not tested; one whose text is no longer found must be rewritten.

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
from pathlib import Path

from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "examples", "pyproject.toml")
TIMEOUT = 300.0  # seconds; a mutant that hangs its tests is killed too
PASSED, FAILED = 0, 1  # pytest's exit codes; any other one means that nothing was tested


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
    """pytest's exit code (None: the change itself is broken) and the line that says what failed."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line"]
    command = [sys.executable, "-m", "pytest", *options, "-m", "not slow and not model and not gpu"]
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
        return FAILED, f"no end within {TIMEOUT:.0f} s"
    lines = done.stdout.strip().splitlines()
    if "NameError" in done.stdout:
        return None, "the new text uses a name that is not there"
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
    verdict = {PASSED: "survived", FAILED: "killed"}.get(code, "invalid")
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
