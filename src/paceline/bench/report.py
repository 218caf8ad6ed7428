"""The result of a benchmark as tables for people and as one JSON object."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import paceline
from paceline.bench.figures import Figures, Percentiles, Summary, summarise
from paceline.bench.prepare import EnginePlan, Placement
from paceline.bench.spread import Spread, bounds_name
from paceline.bench.variants import Variant
from paceline.sampling_params import SamplingParams

WIDTH = 100
_PLACEMENTS = {
    "shared": "all in one process",
    "separate": "each in a process of its own",
    "alternating": "each in a process of its own, started anew for its turn in a round: memory "
    "holds one at a time",
}


@dataclass(frozen=True)
class Result:
    """Everything measured, with what it takes to measure it again.

    machines: what each plan's engine ran on, as JSON. workload: what was asked for, as JSON.
    rounds: [rounds][variants], at least one round.
    """

    variants: Sequence[Variant]
    plans: Sequence[EnginePlan]
    placement: Placement
    machines: Sequence[dict[str, Any]]
    workload: dict[str, Any]
    rounds: Sequence[Sequence[Figures]]

    def of_variant(self, place: int) -> list[Figures]:
        """One variant's rounds."""
        return [figures[place] for figures in self.rounds]

    def temperatures(self) -> list[float]:
        """Of all requests of all engines, in order."""
        return sorted({s.temperature for plan in self.plans for s in plan.workload.sampling})

    def temperature(self) -> str:
        """The same in words."""
        values = self.temperatures()
        if len(values) > 1:
            return f"temperatures {values[0]:g} to {values[-1]:g}"
        return f"temperature {values[0]:g}" + (" (greedy)" if values == [0] else "")

    def threads(self) -> str:
        """Of the engines' passes, in words."""
        counts = sorted({machine["threads"] for machine in self.machines})
        return " or ".join(map(str, counts))

    def summaries(self) -> list[Summary]:
        """One a variant."""
        count = len(self.variants)
        return [summarise(self.of_variant(i), self.of_variant(0)) for i in range(count)]


def to_json(result: Result) -> dict[str, Any]:
    """Versions, machine, workload, and each variant's arguments, summary and rounds."""
    variants = []
    for place, (variant, summary) in enumerate(
        zip(result.variants, result.summaries(), strict=True)
    ):
        entry: dict[str, Any] = {"name": variant.name, "k": variant.k}
        entry["arguments"] = _arguments(result.plans[variant.engine], variant)
        entry["threads"] = result.machines[variant.engine]["threads"]
        entry.update(asdict(summary))
        entry["rounds"] = [asdict(one) for one in result.of_variant(place)]
        variants.append(entry)
    return {
        "paceline": paceline.__version__,
        "machine": {key: value for key, value in result.machines[0].items() if key != "threads"},
        "workload": {**result.workload, "temperatures": result.temperatures()},
        "num_rounds": len(result.rounds),
        "bounds": bounds_name(len(result.rounds)),
        "placement": result.placement,
        "variants": variants,
    }


def _arguments(plan: EnginePlan, variant: Variant) -> dict[str, Any]:
    """The engine's, but for the draft length: the engine has the largest of its variants'."""
    if variant.k is None or "num_speculative_tokens" not in plan.arguments:
        return plan.arguments
    return {**plan.arguments, "num_speculative_tokens": variant.k}


def to_text(result: Result) -> str:
    """Aligned tables of at most ``WIDTH`` columns, names of variants aside."""
    names = [variant.name for variant in result.variants]
    summaries = result.summaries()
    parts = [
        _header(result),
        "Speed\n" + _speed(names, summaries, spread_known=len(result.rounds) > 1),
        "Latency, ms\n" + _latency(names, summaries),
        "Batches\n" + _batches(result, summaries),
    ]
    if any(summary.acceptance.at_least for summary in summaries):
        parts.append(
            "Accepted drafts by position, %: of rounds, and of rounds that accepted all before\n"
            + _acceptance(names, summaries)
        )
        if result.workload["file"] is None:
            parts[-1] += (
                "\nThe prompts were random tokens. What a trained pair accepts depends on the "
                "text: measure on yours\nwith --file. A pair of `paceline synth` accepts at the "
                "rate it was made with, on any text."
            )
    parts += filter(None, [_no_drafts(result, summaries), _outputs(result, names)])
    return "\n\n".join(parts)


def _header(result: Result) -> str:
    first, work = result.plans[0], result.workload
    machine = result.machines[0]
    lines = [
        f"{first.arguments['model']} in {first.config.model.dtype} on {machine['device_name']} "
        f"({result.threads()} of {machine['cores']} cores), Paceline {paceline.__version__}, "
        f"torch {machine['torch']}"
    ]
    if len(result.plans) > 1:
        lines += _differences(result.plans)
    lines.append(
        f"{_counted(work['num_requests'], 'request')} a round, submitted at once: "
        f"{work['num_prompt_tokens']} prompt and "
        f"{_counted(result.rounds[0][0].num_tokens, 'output token')}, "
        f"{result.temperature()}{_origin_of_temperature(result)}; {_prefix_caching(result)}"
    )
    count = len(result.rounds)
    if count == 1:
        lines.append(f"one round after a warm-up: {bounds_name(count)}")
    else:
        lines.append(
            f"{count} rounds after a warm-up, interleaved: median ({bounds_name(count)}); ratios "
            "are taken within each round"
        )
    if len(result.plans) > 1:
        lines.append(f"{len(result.plans)} engines, {_PLACEMENTS[result.placement]}")
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in lines
    )


def _differences(plans: Sequence[EnginePlan]) -> list[str]:
    """A line an engine: the arguments in which the engines differ, but for what its name says."""
    given = [plan.spec.arguments for plan in plans]
    keys = dict.fromkeys(key for one in given for key in one)
    differing = [key for key in keys if any(one.get(key) != given[0].get(key) for one in given)]
    lines = []
    for plan, one in zip(plans, given, strict=True):
        shown = [key for key in differing if one.get(key) not in plan.spec.name.split()]
        settings = ("default" if one.get(key) is None else one[key] for key in shown)
        text = ", ".join(f"{key}={value}" for key, value in zip(shown, settings, strict=True))
        if text or not differing:
            lines.append(f"{plan.spec.name}: {text or 'as the other'}")
    return lines


def _origin_of_temperature(result: Result) -> str:
    """Who chose it, and how to choose another one, where the user did not."""
    if "temperature" in result.workload["sampling"]:
        return ""
    for plan in result.plans:
        default = SamplingParams(**plan.config.default_sampling).temperature
        if any(one.temperature != default for one in plan.workload.sampling):
            return ""  # lines of the file have their own
    named = ["temperature" in plan.config.default_sampling for plan in result.plans]
    if all(named):
        origin = "the model's own"
    elif any(named):
        origin = f"the model's own, or {SamplingParams().temperature:g} where it names none"
    else:
        origin = "as neither the command nor the model names one"
    return f", {origin} (choose another with --temperature)"


def _prefix_caching(result: Result) -> str:
    if not any(plan.config.cache.enable_prefix_caching for plan in result.plans):
        return "prefix caching is off"
    shares = [summary.cached_share for summary in result.summaries()]
    found = f"{max(shares):.0%}"
    if min(shares) != max(shares):
        found = f"{min(shares):.0%} to {found}"
    return f"prefix caching is on and warm: {found} of prompt tokens were found"


def _speed(names: Sequence[str], summaries: Sequence[Summary], *, spread_known: bool) -> str:
    rows = []
    for place, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        cells = [name, *_spread(summary.tokens_per_second, _rate)]
        if place == 0:
            cells += ["1", ""]
        else:
            cells += _spread(summary.ratio, lambda value: f"{value:.3f}")
        rows.append([*cells, _rate(summary.requests_per_second)])
    header = ["", "tokens/s", "", f"vs {names[0]}", "", "requests/s"]
    places = [0, 1, 2, 3, 4, 5]
    if len(names) == 1:
        places = [0, 1, 2, 5]
    if not spread_known:
        places = [place for place in places if place not in (2, 4)]
    return _table([header[i] for i in places], [[row[i] for i in places] for row in rows])


def _spread(value: Spread, text: Any) -> list[str]:
    return [text(value.median), f"({text(value.low)} to {text(value.high)})"]


def _latency(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    header = ["", "first token p50", "p95", "p99", "inter-token p50", "p95", "p99", "pause p99"]
    rows = []
    for name, one in zip(names, summaries, strict=True):
        cells = [name, *_percentiles(one.time_to_first_token_ms), *_percentiles(one.inter_token_ms)]
        rows.append([*cells, _percentiles(one.pause_ms)[2]])
    return _table(header, rows)


def _percentiles(value: Percentiles | None) -> list[str]:
    return ["-"] * 3 if value is None else [_digits(v) for v in (value.p50, value.p95, value.p99)]


def _batches(result: Result, summaries: Sequence[Summary]) -> str:
    header = ["", "tokens/step", "rows", "batched tokens", "of budget", "passes", "preemptions"]
    rows = [
        [
            variant.name,
            _optional(one.tokens_per_step, 2),
            _optional(one.rows_per_pass, 1),
            f"{one.batched_tokens_per_step:.0f}",
            f"{one.budget_share:.1%}",
            f"{one.num_decode_passes:.0f}",
            f"{one.num_preemptions:.0f}",
        ]
        for variant, one in zip(result.variants, summaries, strict=True)
    ]
    shares = [
        _percent(one.drafting_share) if _drafts(result, variant) else "-"
        for variant, one in zip(result.variants, summaries, strict=True)
    ]
    if not {"-", "100"}.issuperset(shares):
        header.insert(2, "drafting")
        for row, share in zip(rows, shares, strict=True):
            row.insert(2, share if share == "-" else f"{share}%")
    return _table(header, rows)


def _drafts(result: Result, variant: Variant) -> bool:
    """Whether a variant has been told to draft."""
    plan = result.plans[variant.engine]
    return plan.config.speculative is not None and variant.k != 0


def _no_drafts(result: Result, summaries: Sequence[Summary]) -> str:
    """The variants that were told to draft and never did; empty without any."""
    idle = [
        variant
        for variant, summary in zip(result.variants, summaries, strict=True)
        if _drafts(result, variant) and not summary.acceptance.at_least
    ]
    if not idle:
        return ""
    line = f"No drafts proposed: {', '.join(variant.name for variant in idle)}."
    configs = [result.plans[variant.engine].config.speculative for variant in idle]
    if all(config is not None and config.method == "ngram" for config in configs):
        line += " Prompt lookup found nothing in the text that its last tokens repeat."
    return textwrap.fill(line, WIDTH)


def _acceptance(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    width = max(len(summary.acceptance.at_least) for summary in summaries)
    rows = []
    for name, summary in zip(names, summaries, strict=True):
        found = summary.acceptance
        padding = [""] * (width - len(found.at_least))
        if found.at_least:
            rows.append([name, *map(_percent, found.at_least), *padding])
            rows.append(["  given all before", *map(_percent, found.conditional), *padding])
    return _table(["", *map(str, range(1, width + 1))], rows)


def _outputs(result: Result, names: Sequence[str]) -> str:
    """Whether the variants gave the same tokens, which they should if the model is the same.

    Empty where there was one run, which has nothing to be the same as.
    """
    count = result.workload["num_requests"]
    if len(names) * len(result.rounds) == 1:
        return ""
    fewest = [
        min(one.num_same_outputs for one in result.of_variant(place)) for place in range(len(names))
    ]
    if min(fewest) == count:
        outputs = "The output was" if count == 1 else f"All {count} outputs were"
        return f"{outputs} the same tokens in every run."
    listed = ", ".join(
        f"{name} {same}" for name, same in zip(names, fewest, strict=True) if same < count
    )
    line = (
        f"Of {_counted(count, 'output')}, those with the tokens of {names[0]}'s first run (worst "
        f"round): {listed}. With one model and one dtype, near-ties of rounding are the usual "
        "cause."
    )
    return textwrap.fill(line, WIDTH)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else _digits(value)


def _digits(value: float) -> str:
    """Three digits, more only left of the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}"


def _optional(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Names to the left, everything else to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
