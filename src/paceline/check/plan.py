"""The memory plan: dtype, KV pool, lengths and token budget, and the ``EngineConfig`` made of them.

Arithmetic on what was read; must not read files, and asks the machine only for native bfloat16 and
free memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from paceline.check import gpu, machine
from paceline.check.arguments import lookup_lengths
from paceline.check.files import ModelFiles, Sources
from paceline.check.gpu import Gpu
from paceline.check.gpu_memory import count_host_blocks, estimate_parts
from paceline.check.report import Fault, format_bytes
from paceline.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    TokenizerConfig,
)
from paceline.engine_args import NGRAM, EngineArgs
from paceline.errors import CapacityError
from paceline.worker.memory_plan import Limits, MemoryParts, count_blocks

Dtype = Literal["float32", "bfloat16", "float16"]

DEFAULT_TOKEN_BUDGET = 2048
GPU_TOKEN_BUDGET = 8192
DEFAULT_POOL_BYTES = 4 * 1024**3
DEFAULT_POOL_SHARE = 0.4
MIN_DEFAULT_SEQUENCES = 64
_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}


@dataclass(frozen=True)
class Demand:
    """Bytes that the models ask for, each as (target, drafter)."""

    dtype: Dtype
    weights: tuple[int, int]
    packed_heads: tuple[int, int]  # a tied head's second copy, in the layout the CPU reads fastest
    kv_per_token: tuple[int, int]

    @property
    def resident(self) -> int:
        """Bytes of everything but the KV pool."""
        return sum(self.weights) + sum(self.packed_heads)


@dataclass(frozen=True)
class Pool:
    """The KV pool: usable blocks; one null block comes on top."""

    num_blocks: int
    block_size: int
    block_bytes: int
    why: str
    is_estimate: bool = False  # start-up measures and takes what there is

    @property
    def total_bytes(self) -> int:
        return (self.num_blocks + 1) * self.block_bytes

    @property
    def longest_sequence(self) -> int:
        """Prompt + output of the longest sequence; the last token needs no KV."""
        return self.num_blocks * self.block_size + 1

    def blocks_for(self, length: int) -> int:
        """Blocks that a sequence of ``length`` tokens ends with."""
        return math.ceil((length - 1) / self.block_size)


@dataclass
class Plan:
    """What ``make_plan`` worked out. ``notes`` says by setting why it has its value.

    pool and config are None where a fault leaves nothing to say.
    """

    args: EngineArgs
    sources: Sources
    target: ModelFiles
    demand: Demand
    free_memory: int | None
    gpu: Gpu | None = None  # where the model runs; None is the CPU
    notes: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    pool: Pool | None = None
    config: EngineConfig | None = None

    @property
    def k(self) -> int:
        """Draft length, 0 without a drafter."""
        return self.args.num_speculative_tokens or 0


def make_plan(args: EngineArgs, sources: Sources, target: ModelFiles) -> Plan:
    """Fix every value that depends on the models or the machine.

    ``args`` must have passed ``argument_faults``.
    """
    faults: list[Fault] = []
    card, why_device = resolve_device(args.device, faults)
    dtype, why = resolve_dtype(args.dtype, card)
    packs = card is None and machine.packs_weights(dtype)
    plan = Plan(args, sources, target, _demand(dtype, target, sources.drafter, packs), None, card)
    plan.faults += faults
    plan.notes["device"], plan.notes["dtype"] = why_device, why
    plan.free_memory = machine.available_memory() if card is None else card.free_bytes
    plan.pool = pool = _plan_pool(plan)
    if pool is None:
        return plan
    _check_memory(plan, pool)
    length = _plan_length(plan, pool)
    budget = _plan_budget(plan, length)
    if plan.k >= length:
        plan.faults.append(
            Fault(
                f"`num_speculative_tokens` ({plan.k}) must be below the model length ({length})",
                "5 is a good start",
            )
        )
    plan.config = _engine_config(plan, pool, length, budget, _plan_host_blocks(plan))
    return plan


def resolve_device(setting: str, faults: list[Fault]) -> tuple[Gpu | None, str]:
    """The GPU to run on, None for the CPU, and why; adds a fault if "cuda" cannot be had."""
    if setting == "cpu":
        return None, ""
    card = gpu.find_gpu()
    problem: tuple[str, str] | None
    if card is None:
        problem = "no NVIDIA GPU is seen (nvidia-smi lists none)", "set `device='cpu'`"
    elif card.capability < gpu.MIN_CAPABILITY:
        has, needs = (".".join(map(str, pair)) for pair in (card.capability, gpu.MIN_CAPABILITY))
        problem = (
            f"{card.name} has compute capability {has}, {needs} is needed",
            "set `device='cpu'`",
        )
    else:
        problem = gpu.software_fault()
        if problem is None:
            return card, card.name
    if setting == "cuda":
        faults.append(Fault(f"`device='cuda'` cannot be had: {problem[0]}", problem[1]))
    return None, f"auto: {problem[0]}"


def resolve_dtype(setting: str, card: Gpu | None = None) -> tuple[Dtype, str]:
    """The dtype weights and KV are kept in, and why."""
    if setting != "auto":
        return _DTYPES[setting], ""
    if card is not None:
        return "bfloat16", "auto: a GPU"
    if machine.has_native_bfloat16():
        return "bfloat16", "auto: this CPU has native bfloat16"
    return "float32", "auto: this CPU has no native bfloat16"


def _demand(dtype: Dtype, target: ModelFiles, drafter: ModelFiles | None, packs: bool) -> Demand:
    size = 4 if dtype == "float32" else 2

    def of_both(count: Callable[[ModelFiles], int]) -> tuple[int, int]:
        return count(target) * size, 0 if drafter is None else count(drafter) * size

    def packed_head(files: ModelFiles) -> int:
        arch = files.arch
        return arch.vocab_size * arch.hidden_size if packs and arch.tie_word_embeddings else 0

    return Demand(
        dtype,
        weights=of_both(lambda files: files.num_parameters),
        packed_heads=of_both(packed_head),
        kv_per_token=of_both(lambda files: files.arch.kv_bytes_per_token(1)),
    )


# --- the KV pool ---


def _plan_pool(plan: Plan) -> Pool | None:
    args = plan.args
    block_bytes = args.block_size * sum(plan.demand.kv_per_token)
    if args.num_gpu_blocks_override is not None:
        why = "as num_gpu_blocks_override says"
        return Pool(args.num_gpu_blocks_override, args.block_size, block_bytes, why)
    if args.kv_cache_memory_bytes is not None:
        size, why = args.kv_cache_memory_bytes, "as kv_cache_memory_bytes says"
    elif plan.gpu is not None:
        fitting = _gpu_blocks(plan, plan.gpu, block_bytes, length=1)
        if fitting is None:
            return None
        why = f"what {args.gpu_memory_utilization:.0%} of {plan.gpu.name} leaves, an estimate"
        return Pool(fitting, args.block_size, block_bytes, why, is_estimate=True)
    else:
        size, why = _default_pool(plan, block_bytes)
    num_blocks = size // block_bytes - 1
    if num_blocks < 1:
        plan.faults.append(
            Fault(
                f"the KV pool of {format_bytes(size)} ({why}) holds no block: a block of "
                f"{args.block_size} tokens takes {format_bytes(block_bytes)}, and the null block "
                "as much",
                f"set `kv_cache_memory_bytes` to at least {2 * block_bytes}",
                about_memory=True,
            )
        )
        return None
    return Pool(num_blocks, args.block_size, block_bytes, why)


def _gpu_blocks(plan: Plan, card: Gpu, block_bytes: int, length: int) -> int | None:
    """Blocks of the pool on a GPU, as far as they can be told before start-up measures them.

    None, and a fault, where a sequence of ``length`` tokens does not fit.
    """
    args = plan.args
    limits = Limits(
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=length,
        max_num_batched_tokens=args.max_num_batched_tokens or _token_budget(plan),
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
    )
    try:
        return count_blocks(_gpu_parts(plan, card), limits, block_bytes)
    except CapacityError as error:
        fault = Fault.from_error(error)
        hint = fault.hint
        if plan.demand.dtype == "float32":
            hint += ' or set dtype="bfloat16"'
        plan.faults.append(Fault(f"{fault.cause}, as estimated from {card.name}", hint, True))
        return None


def _gpu_parts(plan: Plan, card: Gpu) -> MemoryParts:
    """What everything but the KV pool will take on a GPU, an estimate."""
    args, arch = plan.args, plan.target.arch
    return estimate_parts(
        card,
        arch,
        plan.demand.weights,
        dtype_bytes=4 if plan.demand.dtype == "float32" else 2,
        num_rows=args.max_num_seqs + 1,
        row_tokens=(args.max_model_len or arch.max_position_embeddings) + plan.k + 1,
        budget=args.max_num_batched_tokens or _token_budget(plan),
    )


def _token_budget(plan: Plan) -> int:
    """The token budget that holds when nothing is said."""
    return DEFAULT_TOKEN_BUDGET if plan.gpu is None else GPU_TOKEN_BUDGET


def _default_pool(plan: Plan, block_bytes: int) -> tuple[int, str]:
    """Bytes of the pool when nothing is said, and why."""
    size, why = DEFAULT_POOL_BYTES, "the default of 4 GiB"
    if plan.free_memory is not None:
        free = f"{format_bytes(plan.free_memory)} free memory"
        share = int(plan.free_memory * DEFAULT_POOL_SHARE)
        if share < size:
            size, why = share, f"{DEFAULT_POOL_SHARE:.0%} of {free}"
        beside = plan.free_memory - plan.demand.resident
        if 0 < beside < size:
            size, why = beside, f"what the weights leave of {free}"
    # Small models would get a pool that they could hardly fill.
    limit = plan.target.arch.max_position_embeddings
    length = min(plan.args.max_model_len or limit, limit)
    sequences = max(plan.args.max_num_seqs, MIN_DEFAULT_SEQUENCES)
    blocks = sequences * math.ceil(length / plan.args.block_size)
    if (blocks + 1) * block_bytes < size:
        return (blocks + 1) * block_bytes, f"enough for {sequences} sequences of {length} tokens"
    return size, why


def _check_memory(plan: Plan, pool: Pool) -> None:
    weights = plan.demand.resident
    if plan.free_memory is None or weights + pool.total_bytes <= plan.free_memory:
        if plan.gpu is not None and not pool.is_estimate:
            _warn_of_tight_pool(plan, plan.gpu, pool)
        return
    override = plan.args.num_gpu_blocks_override is not None
    size = "num_gpu_blocks_override" if override else "kv_cache_memory_bytes"
    ways_out = [f"lower `{size}`", "choose a smaller model"]
    if plan.demand.dtype == "float32":
        ways_out.insert(1, 'set `dtype="bfloat16"`')
    if plan.sources.drafter is not None:
        ways_out.append('use `speculative_model="[ngram]"`, which needs no memory')
    plan.faults.append(
        Fault(
            f"not enough memory: the weights take {format_bytes(weights)} in {plan.demand.dtype}, "
            f"the KV pool {format_bytes(pool.total_bytes)} ({pool.why}), but only "
            f"{format_bytes(plan.free_memory)} are free",
            ", ".join(ways_out[:-1]) + f" or {ways_out[-1]}",
            about_memory=True,
        )
    )


def _plan_host_blocks(plan: Plan) -> int:
    """Blocks of preempted sequences that host memory holds, 0 where they are recomputed."""
    args = plan.args
    if args.preemption_mode != "swap":
        plan.notes["swap_space"] = "unused: preempted sequences are recomputed"
        return 0
    if plan.gpu is None:
        if args.device == "cuda":  # that there is none is said already
            return 0
        plan.faults.append(
            Fault(
                "`preemption_mode='swap'` copies KV blocks from a GPU to host memory, but the "
                "model runs on the CPU, whose KV lies in host memory already",
                "use 'recompute', which the prefix cache makes cheap",
            )
        )
        return 0
    block_bytes = args.block_size * plan.demand.kv_per_token[0]
    num_blocks = count_host_blocks(
        args.swap_space, block_bytes, machine.available_memory(), plan.faults
    )
    plan.notes["swap_space"] = f"{num_blocks} KV blocks of preempted sequences"
    return num_blocks


def _warn_of_tight_pool(plan: Plan, card: Gpu, pool: Pool) -> None:
    """A pool of a given size is taken at its word, though steps need memory beside it."""
    parts = _gpu_parts(plan, card)
    if parts.used + pool.total_bytes > parts.total:
        beside = card.free_bytes - parts.weights - pool.total_bytes
        needed = parts.state + parts.activations + parts.graphs
        plan.warnings.append(
            f"the KV pool of {format_bytes(pool.total_bytes)} ({pool.why}) leaves "
            f"{format_bytes(beside)} of GPU memory beside the weights, and steps may need "
            f"{format_bytes(needed)}: they may run out of memory"
        )


# --- lengths and budget ---


def _plan_length(plan: Plan, pool: Pool) -> int:
    limit = plan.target.arch.max_position_embeddings
    explicit = plan.args.max_model_len
    if explicit is None:
        if limit <= pool.longest_sequence:
            plan.notes["max_model_len"] = "the model's maximum"
            return limit
        plan.notes["max_model_len"] = f"lowered from {limit} to what the KV pool holds"
        plan.warnings.append(
            f"max_model_len is lowered from {limit} (the model's maximum) to "
            f"{pool.longest_sequence}, the longest sequence that the KV pool of "
            f"{format_bytes(pool.total_bytes)} holds"
        )
        return pool.longest_sequence
    if explicit > limit:
        plan.faults.append(
            Fault(
                f"`max_model_len` ({explicit}) is above the {limit} positions that "
                f"`{plan.target.name}` was made for",
                f"set it to {limit} or less",
            )
        )
    needed = pool.blocks_for(explicit)
    if pool.is_estimate and plan.gpu is not None:
        _gpu_blocks(plan, plan.gpu, pool.block_bytes, explicit)
    elif needed > pool.num_blocks:
        enlarge = (
            f"raise `num_gpu_blocks_override` to {needed}"
            if plan.args.num_gpu_blocks_override is not None
            else f"raise `kv_cache_memory_bytes` to {(needed + 1) * pool.block_bytes}"
        )
        plan.faults.append(
            Fault(
                f"`max_model_len` ({explicit}) does not fit the KV pool: it needs {needed} blocks "
                f"of {pool.block_size} tokens, the pool of {format_bytes(pool.total_bytes)} "
                f"({pool.why}) has {pool.num_blocks}",
                f"lower `max_model_len` to {pool.longest_sequence} or {enlarge}",
                about_memory=True,
            )
        )
    return explicit


def _plan_budget(plan: Plan, length: int) -> int:
    args = plan.args
    full_batch = args.max_num_seqs * (plan.k + 1)
    explicit = args.max_num_batched_tokens
    if explicit is None:
        budget, why = _token_budget(plan), "the default"
        if full_batch > budget:
            budget, why = full_batch, f"max_num_seqs × (k + 1) with k = {plan.k}"
        if not args.enable_chunked_prefill and length > budget:
            budget, why = length, "a whole prompt, as chunked prefill is off"
        plan.notes["max_num_batched_tokens"] = why
        return budget
    if explicit < args.max_num_seqs:
        plan.faults.append(
            Fault(
                f"`max_num_batched_tokens` ({explicit}) is below `max_num_seqs` "
                f"({args.max_num_seqs}): a step could not serve every running sequence",
                f"raise it, or lower `max_num_seqs` to {explicit} or less",
            )
        )
    elif explicit < full_batch:
        plan.notes["max_num_batched_tokens"] = (
            f"below max_num_seqs × (k + 1) = {full_batch}: k shrinks when many sequences run"
        )
    if not args.enable_chunked_prefill and explicit < length:
        plan.faults.append(
            Fault(
                f"`max_num_batched_tokens` ({explicit}) is below the model length ({length}) while "
                "chunked prefill is off: a long prompt could never run",
                f"raise it to {length}, lower `max_model_len`, or enable chunked prefill",
            )
        )
    return explicit


# --- the result ---


def _engine_config(
    plan: Plan, pool: Pool, length: int, budget: int, host_blocks: int
) -> EngineConfig:
    args, sources = plan.args, plan.sources
    vocabulary = None if sources.tokenizer_path is None else sources.vocabulary
    stop_ids = {*plan.target.arch.eos_token_ids, *sources.generation_eos}
    if vocabulary is not None and vocabulary.eos_token_id is not None:
        stop_ids.add(vocabulary.eos_token_id)
    return EngineConfig(
        model=_model_config(plan, plan.target, length),
        tokenizer=TokenizerConfig(
            path=None if sources.tokenizer_path is None else str(sources.tokenizer_path),
            vocab_size=None if vocabulary is None else vocabulary.size,
        ),
        cache=CacheConfig(
            args.block_size,
            pool.num_blocks,
            args.enable_prefix_caching,
            args.gpu_memory_utilization if pool.is_estimate else 0.0,
            lowers_model_len=pool.is_estimate and args.max_model_len is None,
            num_host_blocks=host_blocks,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=length,
            enable_chunked_prefill=args.enable_chunked_prefill,
            batching="static" if args.batching == "static" else "continuous",
        ),
        speculative=_speculative_config(plan),
        device="cpu" if plan.gpu is None else "cuda",
        enforce_eager=args.enforce_eager,
        latency_path="off" if plan.gpu is None else args.latency_path,
        seed=args.seed,
        stop_token_ids=tuple(sorted(stop_ids)),
        default_sampling=sources.default_sampling,
        max_logprobs=args.max_logprobs,
    )


def _model_config(plan: Plan, files: ModelFiles, length: int) -> ModelConfig:
    return ModelConfig(files.name, str(files.path), files.arch, plan.demand.dtype, length)


def _speculative_config(plan: Plan) -> SpeculativeConfig | None:
    args, files = plan.args, plan.sources.drafter
    if args.speculative_model is None:
        return None
    low, high = lookup_lengths(args)
    drafter = None
    if files is not None:
        reach = files.arch.max_position_embeddings
        drafter = _model_config(plan, files, min(reach, args.speculative_max_model_len or reach))
    return SpeculativeConfig(
        method="ngram" if args.speculative_model == NGRAM else "draft_model",
        num_speculative_tokens=plan.k,
        model=drafter,
        prompt_lookup_max=high,
        prompt_lookup_min=low,
        disable_by_batch_size=args.speculative_disable_by_batch_size or 0,
    )
