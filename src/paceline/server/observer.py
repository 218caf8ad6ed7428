"""What a server has seen: requests with their times, the engine's totals, a sample every second.

The API process tells it everything once, as it passes; ``metrics`` and the dashboard read it. Knows
no HTTP and no format. One event loop uses it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.server.messages import Delta, Stats

_SAMPLES = 600  # seconds that the dashboard shows
_RECENT_REQUESTS = 50
_WINDOW_S = 60.0  # of percentiles
_WINDOW_VALUES = 4096  # and no more than so many values

# Of ``Stats``, what only ever grows while an engine lives.
TOTALS = (
    *("num_steps", "num_prompt_tokens", "num_generation_tokens", "num_cached_tokens"),
    *("num_preemptions", "num_batched_tokens", "num_drafts", "num_draft_tokens"),
    "num_accepted_tokens",
)
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Distribution:
    """A histogram since the start, and the latest values for percentiles.

    bounds: upper ends of the buckets, ascending; a last one without end follows.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._latest: deque[tuple[float, float]] = deque(maxlen=_WINDOW_VALUES)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self._latest.append((time.monotonic(), value))

    def percentiles(self, shares: Iterable[float] = (0.5, 0.9, 0.99)) -> list[float] | None:
        """Of the values of the last minute, None without any."""
        since = time.monotonic() - _WINDOW_S
        values = sorted(value for moment, value in self._latest if moment >= since)
        if not values:
            return None
        return [values[min(len(values) - 1, int(share * len(values)))] for share in shares]


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end. Moments are those of ``time.monotonic``."""

    request_id: str
    kind: str
    arrived: float
    submitted: float
    num_outputs: int  # that have not finished
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    status: str = ""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    last: dict[int, float] = field(default_factory=dict)  # of each output, its latest tokens

    def describe(self) -> dict[str, Any]:
        """For the dashboard; nothing of what was said."""
        total, first = self.total_s, self.ttft_s
        decoding = None if total is None or first is None else total - first
        return {
            "id": self.request_id,
            "kind": self.kind,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": self.queue_s,
            "ttft_s": first,
            "total_s": total,
            "tokens_per_s": self.output_tokens / decoding if decoding else None,
            "acceptance": _share(self.accepted_tokens, self.draft_tokens),
            "mean_k": _share(self.draft_tokens, self.drafts),
        }


class Observer:
    """Counts what passes; see the module's docstring."""

    def __init__(self) -> None:
        self.started = time.time()
        self.stats: Stats | None = None  # the latest, None while no engine lives
        self.finished: Counter[str] = Counter()  # outputs by how they ended
        self.responses: Counter[tuple[str, int]] = Counter()  # by route and status
        self.ttft = Distribution(SECONDS)
        self.inter_token = Distribution(SECONDS)
        self.queue = Distribution(SECONDS)
        self.latency = Distribution(SECONDS)
        self.prompt_lengths = Distribution(TOKENS)
        self.output_lengths = Distribution(TOKENS)
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_REQUESTS)
        self._running: dict[str, RequestRecord] = {}
        self._past: Counter[Any] = Counter()  # totals of engines, or of their lives, that are over
        self._last: Stats | None = None
        self._sampled: Counter[Any] = Counter()
        self._sampled_at = time.monotonic()

    # ---- requests --------------------------------------------------------------------------------

    def begin(self, request_id: str, kind: str, arrived: float, num_outputs: int) -> None:
        """A request goes to the engine. arrived: when its first byte was read."""
        now = time.monotonic()
        self._running[request_id] = RequestRecord(request_id, kind, arrived, now, num_outputs)

    def take(self, deltas: Iterable[Delta]) -> None:
        """What the engine sent of one step."""
        now = time.monotonic()
        for delta in deltas:
            record = self._running.get(delta.request_id)
            if record is not None:
                self._take(record, delta, now)

    def _take(self, record: RequestRecord, delta: Delta, now: float) -> None:
        before = record.last.get(delta.index)
        if delta.token_ids:
            record.output_tokens += len(delta.token_ids)
            record.last[delta.index] = now
            # An output that is not streamed comes as a whole: its gaps are not seen.
            if before is not None:
                self.inter_token.add(now - before)
            elif record.ttft_s is None and delta.finish_reason is None:
                self._first_token(record, now - record.arrived)
        if delta.finish_reason is None:
            return
        self.finished[delta.finish_reason] += 1
        record.status = delta.finish_reason
        record.prompt_tokens, record.cached_tokens = (
            delta.num_prompt_tokens,
            delta.num_cached_tokens,
        )
        if delta.speculative is not None:
            record.drafts += delta.speculative.num_drafts
            record.draft_tokens += delta.speculative.num_draft_tokens
            record.accepted_tokens += delta.speculative.num_accepted_tokens
        if delta.times is not None:
            before_engine = record.submitted - record.arrived
            record.queue_s = delta.times.scheduled
            if record.ttft_s is None and delta.times.first_token is not None:
                self._first_token(record, before_engine + delta.times.first_token)
        record.num_outputs -= 1
        if not record.num_outputs or delta.finish_reason == "error":
            self._end(record, now)

    def _first_token(self, record: RequestRecord, seconds: float) -> None:
        record.ttft_s = seconds
        self.ttft.add(seconds)

    def leave(self, request_id: str, status: str) -> None:
        """A request ends before it has finished: "abort", or "error" where that is ours."""
        record = self._running.get(request_id)
        if record is not None:
            self.finished[status] += record.num_outputs
            record.status = status
            self._end(record, time.monotonic())

    def _end(self, record: RequestRecord, now: float) -> None:
        del self._running[record.request_id]
        record.total_s = now - record.arrived
        if record.status not in ("abort", "error"):
            self.latency.add(record.total_s)
            self.prompt_lengths.add(record.prompt_tokens)
            self.output_lengths.add(record.output_tokens)
            if record.queue_s is not None:
                self.queue.add(record.queue_s)
        self.recent.appendleft({"finished": time.time(), **record.describe()})

    # ---- the engine ------------------------------------------------------------------------------

    def engine(self, stats: Stats | None) -> None:
        """What the engine says of itself, None when it has died.

        Its totals begin anew with every engine, and after a step that failed; ours never go down.
        """
        last = self._last
        if last is not None and stats is not None and stats.num_steps < last.num_steps:
            self._past += _totals(last)
        self.stats = stats
        self._last = stats or last

    @property
    def totals(self) -> Counter[Any]:
        """By a name of ``TOTALS``, by ("proposed" or "accepted", position from 1 on), and by
        ("choice", k, why)."""
        return self._past + (Counter() if self._last is None else _totals(self._last))

    # ---- samples ---------------------------------------------------------------------------------

    def sample(self) -> None:
        """Remember how the last second went; call it once a second."""
        now = time.monotonic()
        totals, seconds = self.totals, max(now - self._sampled_at, 1e-3)
        new = totals - self._sampled
        self._sampled, self._sampled_at = totals, now
        stats = self.stats
        choices = [(key[1], key[2], n) for key, n in new.items() if key[0] == "choice"]
        self.samples.append(
            {
                "t": time.time(),
                "prompt_tokens": new["num_prompt_tokens"] / seconds,
                "generation_tokens": new["num_generation_tokens"] / seconds,
                "steps": new["num_steps"] / seconds,
                "batched_tokens": _share(new["num_batched_tokens"], new["num_steps"]) or 0.0,
                "running": 0 if stats is None else stats.num_running,
                "waiting": 0 if stats is None else stats.num_waiting,
                "kv_use": kv_use(stats),
                "preemptions": new["num_preemptions"],
                "prefix_hit_rate": _share(
                    new["num_cached_tokens"], new["num_cached_tokens"] + new["num_prompt_tokens"]
                ),
                "ttft": self.ttft.percentiles(),
                "itl": self.inter_token.percentiles(),
                "queue": self.queue.percentiles(),
                "drafted": new["num_draft_tokens"] / seconds,
                "accepted": new["num_accepted_tokens"] / seconds,
                "k": _sum_by((str(k), n) for k, _, n in choices),
                "reasons": _sum_by((why, n) for _, why, n in choices),
            }
        )

    def positions(self) -> list[dict[str, int]]:
        """Drafts proposed and accepted at each position since the start."""
        totals = self.totals
        last = max((key[1] for key in totals if key[0] == "proposed"), default=0)
        return [
            {
                "position": i,
                "proposed": totals["proposed", i],
                "accepted": totals["accepted", i],
            }
            for i in range(1, last + 1)
        ]


def kv_use(stats: Stats | None) -> float:
    """Share of the KV blocks that is in use."""
    if stats is None or not stats.num_blocks:
        return 0.0
    return 1 - stats.num_free_blocks / stats.num_blocks


def _totals(stats: Stats) -> Counter[Any]:
    totals: Counter[Any] = Counter({name: getattr(stats, name) for name in TOTALS})
    for word, counts in (
        ("proposed", stats.proposed_by_position),
        ("accepted", stats.accepted_by_position),
    ):
        totals.update({(word, i): count for i, count in enumerate(counts, 1)})
    totals.update({("choice", k, why): count for k, why, count in stats.choices})
    return totals


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _sum_by(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, count in pairs:
        sums[name] += count
    return dict(sums)
