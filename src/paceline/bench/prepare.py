"""Everything that can be refused or fixed before a model loads: checks, pools, prompts, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from paceline import hub
from paceline.bench.variants import EngineSpec
from paceline.bench.workload import Workload, WorkloadSource
from paceline.check import CheckReport, run_checks
from paceline.check.report import format_bytes
from paceline.config import EngineConfig
from paceline.engine_args import EngineArgs
from paceline.errors import CapacityError, PacelineError

# Where engines live: all in this process; each in one of its own; or each in one of its own that is
# started for its turn in a round and ends after it, because memory holds one at a time.
Placement = Literal["shared", "separate", "alternating"]


@dataclass(frozen=True)
class EnginePlan:
    """An engine that passed its checks, with what it will be asked to do.

    arguments: as the user gave them, and the size of the KV pool, which would otherwise depend on
    which engine is opened first. needed_bytes: of weights and pool, None where nobody knows.
    """

    spec: EngineSpec
    arguments: dict[str, Any]
    config: EngineConfig
    workload: Workload
    needed_bytes: int | None
    free_bytes: int | None
    warnings: list[str] = field(default_factory=list)


def prepare(specs: Sequence[EngineSpec], source: WorkloadSource) -> list[EnginePlan]:
    """Check every engine, then make the workload of each.

    Raises:
        PacelineError: what an engine or the workload could not do, with the engine's name.
    """
    reports = []
    for spec in specs:
        with _named(spec, len(specs)):
            reports.append(run_checks(EngineArgs.from_kwargs(**spec.arguments)))
            reports[-1].raise_faults()
    plans = []
    for spec, report in zip(specs, reports, strict=True):
        with _named(spec, len(specs)):
            plans.append(_plan(spec, report, source))
    return plans


@contextlib.contextmanager
def _named(spec: EngineSpec, count: int) -> Iterator[None]:
    """Put an engine's name before what went wrong, where there is more than one."""
    try:
        yield
    except PacelineError as error:
        if count == 1:
            raise
        raise type(error)(f"variant {spec.name}: {error}") from error


def _plan(spec: EngineSpec, report: CheckReport, source: WorkloadSource) -> EnginePlan:
    config = report.config
    assert config is not None  # without faults there is one
    facts = {fact.key: fact.value for fact in report.facts}
    return EnginePlan(
        spec,
        _with_fixed_pool(spec.arguments, report),
        config,
        source(config, _tokenizer(spec, config)),
        facts.get("needed_bytes"),
        facts.get("free_memory_bytes"),
        report.warnings,
    )


def _with_fixed_pool(arguments: dict[str, Any], report: CheckReport) -> dict[str, Any]:
    if arguments.get("num_gpu_blocks_override") is not None:
        return arguments
    settings = {setting.name: setting.value for setting in report.settings}
    return {**arguments, "kv_cache_memory_bytes": settings["kv_cache_memory_bytes"]}


def _tokenizer(spec: EngineSpec, config: EngineConfig) -> Any:
    if config.tokenizer.path is None:
        return None
    from paceline.engine.tokenizer import Tokenizer  # the tokenizers library

    # Not config.tokenizer.path: for a model on the hub the check's files are gone by now.
    name = spec.arguments.get("tokenizer") or spec.arguments["model"]
    return Tokenizer.load(hub.download(str(name), weights=False))


class _Demand(NamedTuple):
    needed: int
    free: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.free


def place(plans: Sequence[EnginePlan], wanted: str) -> Placement:
    """Where the engines will live. wanted: "auto", "shared" or "separate".

    Raises:
        CapacityError: "shared", but they do not fit into memory together.
    """
    demand = _demand(plans)
    fits = demand is None or demand.fits
    if fits:
        return "separate" if wanted == "separate" else "shared"
    if wanted == "shared":
        assert demand is not None
        raise CapacityError(
            f"the {len(plans)} engines need {format_bytes(demand.needed)} together, but only "
            f"{format_bytes(demand.free)} are free. hint: leave out --processes, and they take "
            "turns in processes of their own"
        )
    return "alternating"


def _demand(plans: Sequence[EnginePlan]) -> _Demand | None:
    """Bytes of all engines at once, None where it is unknown or there is only one."""
    needed = [plan.needed_bytes for plan in plans if plan.needed_bytes is not None]
    free = [plan.free_bytes for plan in plans if plan.free_bytes is not None]
    if len(plans) == 1 or len(needed) < len(plans) or not free:
        return None
    return _Demand(sum(needed), min(free))
