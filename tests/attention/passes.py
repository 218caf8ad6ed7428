"""Passes of every kind, as (query length, tokens cached before) of each sequence."""

from __future__ import annotations

PASSES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 0), (1, 1), (1, 30), (1, 31), (1, 32), (1, 77)],
    "one row": [(1, 50)],
    "one row, first token": [(1, 0)],
    "verify": [(5, 3), (5, 0), (5, 64), (5, 11)],
    "ragged": [(1, 9), (6, 2), (3, 40), (1, 0), (6, 33), (2, 2)],
    "prefill": [(40, 0), (90, 0)],
    "chunks": [(50, 20), (33, 1), (64, 100)],
    "mixed": [(40, 0), (1, 9), (6, 20), (70, 13), (1, 200), (32, 0)],
    "far apart": [(1, 3), (1, 500), (1, 4), (1, 260), (1, 7)],
    "nothing to do": [(1, 5), (0, 9), (2, 5)],
    "long": [(1, 1300), (5, 1100), (40, 700)],
}
