"""When each sequence got how many tokens: kept for benchmarks, in a few array copies a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.arrays import Int64Array
from paceline.core.rows import RowTable

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between consecutive commits of the same sequence, preemptions included. Both [M]."""

    seconds: Float64Array
    num_tokens: Int64Array  # committed at the end of the gap, at least 1


@dataclass(slots=True)
class CommitLog:
    """One entry a step that committed anything. Times are seconds of ``time.monotonic``."""

    _times: list[float] = field(default_factory=list)
    _generations: list[Int64Array] = field(default_factory=list)  # of the rows that committed
    _counts: list[Int64Array] = field(default_factory=list)  # tokens each of them got
    # Generation -> its sequence, as (request number, index): a preempted one has several.
    _owners: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(
        self, table: RowTable, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> None:
        """Note one step's runs. All [M]: the row, its tokens before the run, the run's length."""
        generations = table.generation[rows]
        self._times.append(time.monotonic())
        self._generations.append(generations)
        self._counts.append(counts)
        for i in np.flatnonzero(starts == table.prefill_end[rows]).tolist():
            sequence = table.sequence(int(rows[i]))
            self._owners[int(generations[i])] = (sequence.request.number, sequence.index)

    def gaps(self) -> Gaps:
        """Every gap so far; a sequence's first commit ends none."""
        if not self._times:
            return Gaps(np.zeros(0), np.zeros(0, np.int64))
        numbers: dict[tuple[int, int], int] = {}
        sequences = np.array(
            [
                # Without an owner: it had begun before the log did.
                numbers.setdefault(self._owners.get(generation, (-1, generation)), len(numbers))
                for generation in np.concatenate(self._generations).tolist()
            ]
        )
        times = np.repeat(self._times, [len(counts) for counts in self._counts])
        counts = np.concatenate(self._counts)
        order = np.argsort(sequences, kind="stable")  # steps stay in order within a sequence
        sequences, times, counts = sequences[order], times[order], counts[order]
        follows = (sequences[1:] == sequences[:-1]) & (counts[1:] > 0)
        return Gaps(np.diff(times)[follows], counts[1:][follows])
