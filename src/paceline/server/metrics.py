"""What an ``Observer`` knows, in Prometheus' text format.

Names are vLLM's with another prefix, where it has the metric, so that dashboards carry over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from paceline.server.observer import Distribution, Observer, kv_use

PREFIX = "paceline:"
_FINISH_REASONS = ("stop", "length", "abort", "error")

# Totals of the engine: name here, name there, what it is.
_COUNTERS = (
    ("generation_tokens", "num_generation_tokens", "Output tokens."),
    ("num_preemptions", "num_preemptions", "Sequences put back for lack of KV blocks."),
    (
        "prompt_tokens",
        "num_request_prompt_tokens",
        "Prompt tokens of requests that have their first token.",
    ),
    ("prefix_cache_queries", "num_prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "num_prefix_hits", "Prompt tokens found in the prefix cache."),
    ("engine_steps", "num_steps", "Steps of the engine."),
    ("batched_tokens", "num_batched_tokens", "Tokens counted against the token budget."),
    ("spec_decode_num_drafts", "num_drafts", "Rounds that proposed at least one draft token."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Draft tokens proposed."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Draft tokens accepted."),
)


class Metrics:
    """A collector of one server; ``render`` answers a scrape.

    token_budget: ``max_num_batched_tokens``.
    """

    def __init__(self, observer: Observer, model_name: str, token_budget: int) -> None:
        self._observer = observer
        self._model = {"model_name": model_name}
        self._token_budget = token_budget
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type. accept: the header of the scrape."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """All metrics; the registry calls it."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        stats = self._observer.stats
        for name, value, text in (
            ("num_requests_running", stats and stats.num_running, "Sequences that have a row."),
            ("num_requests_waiting", stats and stats.num_waiting, "Sequences that wait for a row."),
            ("kv_cache_usage_perc", kv_use(stats), "Share of the KV blocks in use, 0 to 1."),
            ("max_num_batched_tokens", self._token_budget, "Token budget of a step."),
            ("engine_up", stats is not None, "Whether an engine lives."),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._model))
            family.add_metric(list(self._model.values()), float(value or 0))
            yield family

    def _counters(self) -> Iterator[Metric]:
        observer = self._observer
        totals = observer.totals
        for name, theirs, text in _COUNTERS:
            yield self._counter(name, text, {(): totals[theirs]})
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted by position.",
            {(str(p["position"] - 1),): p["accepted"] for p in observer.positions()},
            ("position",),
        )
        yield self._counter(
            "spec_decode_choices",
            "Rounds (a sequence's share of a step) by draft length and the reason for it.",
            {(str(key[1]), key[2]): n for key, n in totals.items() if key[0] == "choice"},
            ("k", "reason"),
        )
        yield self._counter(
            "request_success",
            "Outputs by how they ended.",
            {(reason,): observer.finished[reason] for reason in _FINISH_REASONS},
            ("finished_reason",),
        )
        yield self._counter(
            "http_responses",
            "HTTP responses by route and status.",
            {(route, str(status)): n for (route, status), n in observer.responses.items()},
            ("route", "status"),
        )

    def _counter(
        self,
        name: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._model, *labels])
        for key, value in values.items():
            family.add_metric([*self._model.values(), *key], value)
        return family

    def _histograms(self) -> Iterator[Metric]:
        seen = self._observer
        for name, values, text in (
            (
                "time_to_first_token_seconds",
                seen.ttft,
                "From a request's arrival to its first token.",
            ),
            (
                "inter_token_latency_seconds",
                seen.inter_token,
                "Between two events of a stream, of one or several tokens each.",
            ),
            (
                "request_time_per_output_token_seconds",
                seen.per_output_token,
                "A request's decode time by its output tokens after the first.",
            ),
            ("e2e_request_latency_seconds", seen.latency, "From a request's arrival to its end."),
            (
                "request_queue_time_seconds",
                seen.queue,
                "From handing a request to the engine until it has a row.",
            ),
            ("request_prefill_time_seconds", seen.prefill, "From a row to the first token."),
            ("request_decode_time_seconds", seen.decode, "From the first token to the last."),
            ("request_inference_time_seconds", seen.inference, "From a row to the last token."),
            ("request_prompt_tokens", seen.prompt_lengths, "Prompt tokens of a request."),
            ("request_generation_tokens", seen.output_lengths, "Output tokens of a request."),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=list(self._model))
            family.add_metric(list(self._model.values()), _buckets(values), values.sum)
            yield family


def _buckets(values: Distribution) -> list[tuple[str, int]]:
    """Counts of values up to each bound."""
    bounds = (*(str(float(bound)) for bound in values.bounds), "+Inf")
    return list(zip(bounds, values.cumulative(), strict=True))
