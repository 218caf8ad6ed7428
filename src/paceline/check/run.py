"""Runs every check on a set of engine arguments; ``resolve`` then fixes the configuration.

Must not load weights or import torch.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline import hub
from paceline.check.arguments import argument_faults, without_faulty
from paceline.check.describe import describe_facts, describe_settings
from paceline.check.files import ModelFiles, Sources, attempt, read_sources
from paceline.check.plan import Plan, make_plan
from paceline.check.report import CheckReport, Fault, format_bytes
from paceline.config import EngineConfig, ModelConfig
from paceline.engine_args import EngineArgs
from paceline.spec.vocab import check_pair

logger = logging.getLogger("paceline")


def run_checks(args: EngineArgs, known: Sequence[Fault] = ()) -> CheckReport:
    """Find every fault and work out the memory plan; loads nothing heavy.

    A model on the hub is read by its JSON files and weight headers. known: faults found before,
    which come first in the report; the arguments that they blame have their defaults in ``args``.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as scratch:
        return _examine(args, known, Path(scratch))


def resolve(args: EngineArgs) -> EngineConfig:
    """What ``EngineArgs.resolve`` does."""
    report = run_checks(args)
    report.raise_faults()
    config = report.config
    assert config is not None  # without faults there is one
    if config.speculative is not None and config.speculative.model is not None:
        drafter = _downloaded(config.speculative.model)
        speculative = dataclasses.replace(config.speculative, model=drafter)
        config = dataclasses.replace(config, speculative=speculative)
    model = _downloaded(config.model)
    if config.tokenizer.path == config.model.path:
        tokenizer = dataclasses.replace(config.tokenizer, path=model.path)
        config = dataclasses.replace(config, tokenizer=tokenizer)
    config = dataclasses.replace(config, model=model)
    logger.info("resolved settings: %s", report.settings_line())
    logger.info("%s", describe_drafter(config))
    for warning in report.warnings:
        logger.warning("%s", warning)
    return config


def describe_drafter(config: EngineConfig) -> str:
    """One line: which speculative model is used, and what it costs."""
    speculative = config.speculative
    if speculative is None:
        return "speculation is off: no speculative_model"
    k = speculative.num_speculative_tokens
    if speculative.model is None:
        return (
            f"speculation: k = {k}, drafts by prompt lookup of n-grams of "
            f"{speculative.prompt_lookup_min} to {speculative.prompt_lookup_max} tokens"
        )
    dtype_bytes = speculative.model.dtype_bytes
    drafter = speculative.model.arch.kv_bytes_per_token(dtype_bytes)
    total = drafter + config.model.arch.kv_bytes_per_token(dtype_bytes)
    return (
        f"speculation: k = {k}, drafts by {speculative.model.name} up to "
        f"{speculative.model.max_model_len} tokens; its KV takes {drafter / total:.0%} of the pool "
        f"({format_bytes(drafter)} a token)"
    )


def _downloaded(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, path=str(hub.download(model.name)))


def _examine(args: EngineArgs, known: Sequence[Fault], scratch: Path) -> CheckReport:
    report = CheckReport(str(args.model), [*known, *argument_faults(args, known)])
    if any(fault.argument == "model" for fault in report.faults):
        return report
    blamed = {fault.argument for fault in report.faults} - {""}
    args = without_faulty(args, report.faults)  # so that the other faults are found too
    sources = read_sources(args, scratch, report.faults, report.warnings)
    if sources.drafter is not None and sources.target is not None:
        _check_pair(sources, sources.target, sources.drafter, report)
    if sources.target is None:
        return report
    plan = make_plan(args, sources, sources.target)
    report.faults += plan.faults
    report.warnings += [*plan.warnings, *_length_warnings(plan), *_cpu_warnings(plan)]
    report.facts = describe_facts(plan)
    report.settings = describe_settings(plan, blamed)
    report.config = plan.config if report.ok else None
    return report


def _check_pair(
    sources: Sources, target: ModelFiles, drafter: ModelFiles, report: CheckReport
) -> None:
    note = attempt(
        report.faults,
        check_pair,
        sources.vocabulary,
        sources.drafter_vocabulary,
        target.arch.vocab_size,
        drafter.arch.vocab_size,
        (target.name, drafter.name),
    )
    if note:
        report.warnings.append(note)
    if sources.vocabulary is None or sources.drafter_vocabulary is None:
        report.warnings.append(
            f"the tokenizers of `{target.name}` and `{drafter.name}` are not compared, as one has "
            "no tokenizer files: with different ones no draft would be accepted"
        )


def _length_warnings(plan: Plan) -> list[str]:
    warnings = []
    vocabulary, rows = plan.sources.vocabulary, plan.target.arch.vocab_size
    if vocabulary is not None and vocabulary.size > rows:
        warnings.append(
            f"the tokenizer knows {vocabulary.size} ids, the embedding of `{plan.target.name}` has "
            f"{rows} rows: prompts with ids beyond them are refused"
        )
    config = plan.config
    reach = config and config.speculative and config.speculative.draft_max_model_len
    if config and reach and reach < config.scheduler.max_model_len:
        warnings.append(
            f"the drafter reaches {reach} of {config.scheduler.max_model_len} tokens: sequences "
            "longer than that are decoded without drafts"
        )
    return warnings


def _cpu_warnings(plan: Plan) -> list[str]:
    if plan.gpu is not None or plan.args.latency_path != "on":
        return []
    return ["latency_path='on' has no effect: the model runs on the CPU, and the path is for GPUs"]
