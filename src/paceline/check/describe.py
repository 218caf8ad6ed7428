"""A plan as facts and resolved settings, in words and in values.

Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from paceline.check.files import ModelFiles
from paceline.check.plan import Plan, Pool
from paceline.check.report import Fact, Setting, format_bytes, format_count
from paceline.config import EngineConfig
from paceline.engine_args import EngineArgs
from paceline.latency.plan import CardLimits, LatencyPlan
from paceline.latency.plan import plan as latency_plan

# Of the smallest card that the latency path runs on; start-up asks the card itself.
_FEWEST_SMS = 114
_SHARED_MEMORY = 232_448
_ONLY_ON_A_GPU = ("gpu_memory_utilization", "enforce_eager", "latency_path")


def describe_facts(plan: Plan) -> list[Fact]:
    """Models, memory and how much fits."""
    weights, kv = plan.demand.weights, plan.demand.kv_per_token
    facts = _model_facts("target", plan.target, plan.demand.dtype, weights[0])
    if plan.sources.drafter is not None:
        facts += _model_facts("drafter", plan.sources.drafter, plan.demand.dtype, weights[1])
    facts.append(Fact("kv_bytes_per_token", sum(kv), "KV a token", _kv_text(kv)))
    if plan.pool is not None and plan.config is not None:
        facts += _pool_facts(plan, plan.pool, plan.config)
        facts += _latency_facts(plan, plan.config)
    return facts


def _model_facts(role: str, files: ModelFiles, dtype: str, weight_bytes: int) -> list[Fact]:
    arch = files.arch
    text = f"{files.name}: {arch.family}, {arch.num_layers} layers, "
    text += f"{format_count(files.num_parameters)} parameters"
    value = {
        "name": files.name,
        "family": arch.family,
        "num_layers": arch.num_layers,
        "num_parameters": files.num_parameters,
        "max_position_embeddings": arch.max_position_embeddings,
        "checkpoint_dtype": arch.dtype,
        "dtype": dtype,
    }
    return [
        Fact(role, value, role, text),
        Fact(
            f"{role}_weight_bytes",
            weight_bytes,
            f"{role} weights",
            f"{format_bytes(weight_bytes)} in {dtype}",
        ),
    ]


def _kv_text(kv: tuple[int, int]) -> str:
    if not kv[1]:
        return format_bytes(kv[0])
    return f"{format_bytes(sum(kv))}, {kv[1] / sum(kv):.0%} of it the drafter's"


def _pool_facts(plan: Plan, pool: Pool, config: EngineConfig) -> list[Fact]:
    length = config.scheduler.max_model_len
    budget = config.scheduler.max_num_batched_tokens
    needed = plan.demand.resident + pool.total_bytes
    facts = [
        Fact("kv_pool_bytes", pool.total_bytes, "KV pool", f"{format_bytes(pool.total_bytes)}"),
        Fact(
            "num_blocks",
            pool.num_blocks,
            "KV blocks",
            f"{pool.num_blocks} of {pool.block_size} tokens ({format_bytes(pool.block_bytes)})",
        ),
        Fact("max_model_len", length, "longest sequence", f"{length} tokens"),
    ]
    if plan.free_memory is not None:
        text = f"{format_bytes(needed)} needed, {format_bytes(plan.free_memory)} free"
        packed = sum(plan.demand.packed_heads)
        if packed:
            text += f" ({format_bytes(packed)} for tied heads, kept a second time for speed)"
        facts.append(Fact("needed_bytes", needed, "memory", text))
        facts.append(Fact("free_memory_bytes", plan.free_memory))
    for key, tokens in (("max_model_len", length), ("1024", 1024)):
        if tokens > length:
            continue
        held = pool.num_blocks // pool.blocks_for(tokens)
        count = min(held, plan.args.max_num_seqs)
        text = f"{count} at a time"
        if held > count:
            text += " (max_num_seqs)"
        facts.append(Fact(f"fits_sequences_of_{key}", count, f"fits of {tokens} tokens", text))
    decode = min(budget, plan.args.max_num_seqs * (plan.k + 1))
    facts.append(
        Fact(
            "token_budget",
            budget,
            "token budget",
            f"{budget} a step, {budget - decode} left for prefill beside a full batch",
        )
    )
    return facts


def _latency_facts(plan: Plan, config: EngineConfig) -> list[Fact]:
    """Whether each model can take the latency path; start-up measures whether it pays."""
    if plan.gpu is None or config.latency_path == "off":
        return []
    card = CardLimits(plan.gpu.capability, _FEWEST_SMS, _SHARED_MEMORY)
    facts = []
    for role, files in (("target", plan.target), ("drafter", plan.sources.drafter)):
        if files is None:
            continue
        found = latency_plan(
            files.arch,
            card,
            dtype=config.model.dtype,
            block_size=config.cache.block_size,
            max_positions=config.scheduler.max_model_len,
        )
        if isinstance(found, LatencyPlan):
            text = f"applies, with {format_bytes(found.packed_bytes)} of packed weights"
            value = found.packed_bytes
        else:
            text, value = f"does not apply: {found.reason}", 0
        facts.append(Fact(f"{role}_latency_bytes", value, f"{role} latency path", text))
    return facts


def describe_settings(plan: Plan, blamed: Collection[str] = ()) -> list[Setting]:
    """Every engine argument with what it resolved to.

    blamed: arguments that are wrong by themselves; they resolved to nothing.
    """
    if plan.config is None or plan.pool is None:
        return []
    resolved = _resolved_values(plan.args, plan.pool, plan.config)
    notes = plan.notes if plan.gpu is not None else {**plan.notes, **_unused_notes(plan.args)}
    settings = []
    for f in fields(EngineArgs):
        value = resolved.get(f.name, getattr(plan.args, f.name))
        if f.name in blamed:
            instead = "without it" if value is None else f"with {value}"
            note = f"see the faults; the plan is made {instead}"
            settings.append(Setting(f.name, None, note))
        else:
            settings.append(Setting(f.name, value, notes.get(f.name, "")))
    return settings


def _unused_notes(args: EngineArgs) -> dict[str, str]:
    """Notes on what was set, but is for GPUs, where the model runs on a CPU."""
    return {
        f.name: "unused on a CPU"
        for f in fields(EngineArgs)
        if f.name in _ONLY_ON_A_GPU and getattr(args, f.name) != f.default
    }


def _resolved_values(args: EngineArgs, pool: Pool, config: EngineConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokenizer": config.tokenizer.path and (args.tokenizer or args.model),
        "dtype": config.model.dtype,
        "device": config.device,
        "max_model_len": config.scheduler.max_model_len,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "kv_cache_memory_bytes": pool.total_bytes,
    }
    if config.speculative is not None:
        values["speculative_max_model_len"] = config.speculative.draft_max_model_len
        values["speculative_disable_by_batch_size"] = config.speculative.disable_by_batch_size
        if config.speculative.method == "ngram":
            values["ngram_prompt_lookup_max"] = config.speculative.prompt_lookup_max
            values["ngram_prompt_lookup_min"] = config.speculative.prompt_lookup_min
    return values
