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
from itertools import accumulate
from typing import Any

from paceline.server.messages import Delta, Stats

_SAMPLES = 600  # seconds that the dashboard shows
_RECENT_REQUESTS = 50
_WINDOW_S = 60  # of percentiles

# Of ``Stats``, what only ever grows while an engine lives.
TOTALS = (
    *("num_steps", "num_prompt_tokens", "num_request_prompt_tokens", "num_generation_tokens"),
    *("num_prefix_queries", "num_prefix_hits", "num_preemptions", "num_batched_tokens"),
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens"),
)
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
# Bounds a tenth apart from 0.1 ms to 1000 s, so that a percentile is off by a few per cent at most.
_FINE = [round(1e-4 * 1.1**i, 9) for i in range(170)]


class Distribution:
    """A histogram since the start, and percentiles of the last minute.

    bounds: upper ends of the buckets that are shown, ascending; a last one without end follows.
    Counting is in buckets fine enough for percentiles, so that its cost and memory depend on
    neither the number of values nor their rate.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._fine = sorted({*bounds, *_FINE})
        self._counts = [0] * (len(self._fine) + 1)
        self._seconds: deque[list[int]] = deque([self._counts.copy()], maxlen=_WINDOW_S + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._fine, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Values since the start."""
        return sum(self._counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound, then all."""
        up_to = [0, *accumulate(self._counts)]
        return [up_to[bisect_left(self._fine, bound) + 1] for bound in self.bounds] + [up_to[-1]]

    def next_second(self) -> None:
        """Call it once a second: the window of the percentiles moves on."""
        self._seconds.append(self._counts.copy())

    def percentiles(self, shares: Iterable[float] = (0.5, 0.9, 0.99)) -> list[float] | None:
        """Of the values of the last minute, None without any."""
        counts = [now - then for now, then in zip(self._counts, self._seconds[0], strict=True)]
        up_to = list(accumulate(counts))
        if not up_to[-1]:
            return None
        return [self._value_at(share * up_to[-1], counts, up_to) for share in shares]

    def _value_at(self, rank: float, counts: list[int], up_to: list[int]) -> float:
        """Where the rank lies in its bucket, as if the bucket's values were spread evenly."""
        i = bisect_left(up_to, rank)
        if i == len(self._fine):
            return self._fine[-1]
        low = self._fine[i - 1] if i else 0.0
        within = (rank - up_to[i] + counts[i]) / counts[i]
        return low + (self._fine[i] - low) * within


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end. Moments are those of ``time.monotonic``."""

    request_id: str
    kind: str
    arrived: float
    submitted: float  # to the engine
    num_outputs: int
    prompt_tokens: int
    streams: bool
    num_unfinished: int  # outputs
    cached_tokens: int = 0
    output_tokens: int = 0
    scheduled: float | None = None
    first_token: float | None = None  # when the engine had it
    ended: float = 0.0  # when the engine had the last
    ttft_s: float | None = None
    total_s: float = 0.0
    status: str = ""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    latest: dict[int, float] = field(default_factory=dict)  # when each output had tokens last

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled is None else self.scheduled - self.submitted

    @property
    def decode_s(self) -> float | None:
        return None if self.first_token is None else self.ended - self.first_token

    def describe(self) -> dict[str, Any]:
        """For the dashboard; nothing of what was said."""
        return {
            "id": self.request_id,
            "kind": self.kind,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": self.queue_s,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
            # The first tokens come with the prompt, whose time is not the decoder's.
            "tokens_per_s": _share(self.output_tokens - self.num_outputs, self.decode_s or 0)
            or None,
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
        self.prefill = Distribution(SECONDS)
        self.decode = Distribution(SECONDS)
        self.inference = Distribution(SECONDS)
        self.latency = Distribution(SECONDS)
        self.per_output_token = Distribution(SECONDS)
        self.prompt_lengths = Distribution(TOKENS)
        self.output_lengths = Distribution(TOKENS)
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_REQUESTS)
        self._running: dict[str, RequestRecord] = {}
        self._past: Counter[Any] = Counter()  # totals of engines that have died
        self._sampled: Counter[Any] = Counter()
        self._sampled_at = time.monotonic()

    # ---- requests --------------------------------------------------------------------------------

    def begin(
        self,
        request_id: str,
        kind: str,
        arrived: float,
        num_outputs: int,
        prompt_tokens: int,
        *,
        stream: bool,
    ) -> None:
        """A request went to the engine. arrived: when its head had been read."""
        self._running[request_id] = RequestRecord(
            request_id,
            kind,
            arrived,
            time.monotonic(),
            num_outputs,
            prompt_tokens,
            stream,
            num_unfinished=num_outputs,
        )

    def take(self, deltas: Iterable[Delta]) -> None:
        """What is about to be written to a client."""
        now = time.monotonic()
        for delta in deltas:
            record = self._running.get(delta.request_id)
            if record is None:
                continue
            if delta.token_ids:
                record.output_tokens += len(delta.token_ids)
                if record.streams:
                    self._stream_event(record, delta.index, now)
            if delta.finish_reason is not None:
                self._finish(record, delta, now)

    def _stream_event(self, record: RequestRecord, index: int, now: float) -> None:
        before = record.latest.get(index)
        record.latest[index] = now
        if before is not None:
            self.inter_token.add(now - before)
        elif record.ttft_s is None:
            self._first_token(record, now)

    def _first_token(self, record: RequestRecord, moment: float) -> None:
        record.ttft_s = moment - record.arrived
        self.ttft.add(record.ttft_s)

    def _finish(self, record: RequestRecord, delta: Delta, now: float) -> None:
        """An output has ended."""
        reason = delta.finish_reason or ""
        record.status = reason
        # An error ends all outputs of its request.
        ended = record.num_unfinished if reason == "error" else 1
        self.finished[reason] += ended
        record.num_unfinished -= ended
        record.cached_tokens = delta.num_cached_tokens
        if delta.speculative is not None:
            record.drafts += delta.speculative.num_drafts
            record.draft_tokens += delta.speculative.num_draft_tokens
            record.accepted_tokens += delta.speculative.num_accepted_tokens
        if delta.times is not None:
            record.scheduled, record.first_token = delta.times.scheduled, delta.times.first_token
            record.ended = delta.times.ended
            if record.ttft_s is None and record.first_token is not None:
                self._first_token(record, record.first_token)
        if not record.num_unfinished:
            self._end(record, now)

    def leave(self, request_id: str, status: str) -> None:
        """A request ends before it has finished: "abort", or "error" where that is ours."""
        record = self._running.get(request_id)
        if record is not None:
            self.finished[status] += record.num_unfinished
            record.status = status
            self._end(record, time.monotonic())

    def _end(self, record: RequestRecord, now: float) -> None:
        del self._running[record.request_id]
        record.total_s = now - record.arrived
        if record.status not in ("abort", "error"):
            self.latency.add(record.total_s)
            self.prompt_lengths.add(record.prompt_tokens)
            self.output_lengths.add(record.output_tokens)
            self._add_phases(record)
        self.recent.appendleft({"finished": time.time(), **record.describe()})

    def _add_phases(self, record: RequestRecord) -> None:
        scheduled, first = record.scheduled, record.first_token
        if scheduled is None or first is None:
            return
        self.queue.add(scheduled - record.submitted)
        self.prefill.add(first - scheduled)
        self.decode.add(record.ended - first)
        self.inference.add(record.ended - scheduled)
        rest = record.output_tokens / record.num_outputs - 1
        if rest > 0:
            self.per_output_token.add((record.ended - first) / rest)

    # ---- the engine ------------------------------------------------------------------------------

    def engine(self, stats: Stats | None) -> None:
        """What the engine says of itself, None when it has died: the next counts from nothing."""
        if stats is None:
            self._past = self.totals
        self.stats = stats

    @property
    def totals(self) -> Counter[Any]:
        """By a name of ``TOTALS``, by ("proposed" or "accepted", position from 1 on), and by
        ("choice", k, why). They never go down."""
        return self._past + (Counter() if self.stats is None else _totals(self.stats))

    # ---- samples ---------------------------------------------------------------------------------

    def sample(self) -> None:
        """Remember how the last second went; call it once a second."""
        now = time.monotonic()
        totals, seconds = self.totals, max(now - self._sampled_at, 1e-3)
        new = totals - self._sampled
        self._sampled, self._sampled_at = totals, now
        stats = self.stats
        for distribution in (self.ttft, self.inter_token, self.queue):
            distribution.next_second()
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
                "prefix_hit_rate": _share(new["num_prefix_hits"], new["num_prefix_queries"]),
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
