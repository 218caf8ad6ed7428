"""What one prompt lookup costs, by history length and kind of text.

    python benchmarks/ngram.py --lengths 1000 32000

Prints a table for people, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from paceline.spec.ngram import find_continuation


def make_history(kind: str, length: int) -> np.ndarray:
    """[length] int32. Text: ids as frequent as words (Zipf), the end repeated from the middle."""
    rng = np.random.default_rng(0)
    if kind == "constant":  # every position matches: the most work there is
        return np.full(length, 7, np.int32)
    if kind == "no match":
        return np.arange(length, dtype=np.int32)
    history = np.minimum(rng.zipf(1.3, length), 100_000).astype(np.int32)
    history[-8:] = history[length // 2 : length // 2 + 8]
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 8000, 32000])
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--lookup-max", type=int, default=5)
    parser.add_argument("--lookup-min", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=500)
    args = parser.parse_args()
    results: dict[str, dict[int, float]] = {}
    print("microseconds a lookup, median (p90)")
    print(f"{'':12s}" + "".join(f"{length:>18d}" for length in args.lengths))
    for kind in ("text", "no match", "constant"):
        line, results[kind] = f"{kind:12s}", {}
        for length in args.lengths:
            history = make_history(kind, length)
            times = []
            for _ in range(args.repeats):
                start = time.perf_counter()
                find_continuation(history, args.k, args.lookup_max, args.lookup_min)
                times.append((time.perf_counter() - start) * 1e6)
            times.sort()
            results[kind][length] = round(statistics.median(times), 2)
            line += f"{results[kind][length]:10.1f} ({times[int(0.9 * len(times))]:5.1f})"
        print(line)
    print(json.dumps({"us_per_lookup": results}))


if __name__ == "__main__":
    main()
