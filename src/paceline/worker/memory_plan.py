"""What a GPU's memory is for, and how many KV blocks the rest of it holds.

Arithmetic alone, so that it serves both the estimate before anything is loaded and the figures that
start-up measured; must not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import CapacityError

GIB = 1024**3
# Kept free for what measuring cannot see: fragments, later graphs, the library's workspaces.
SPARE_BYTES = GIB // 2


@dataclass(frozen=True)
class Limits:
    """The settings that decide how memory is used; their names are the engine arguments'."""

    gpu_memory_utilization: float
    max_model_len: int  # 1 where any length will do
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int

    @property
    def blocks_needed(self) -> int:
        """Blocks of one sequence of full length (its last token needs no KV), at least one."""
        return max(1, math.ceil((self.max_model_len - 1) / self.block_size))


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of a GPU and of everything in it but the KV pool."""

    total: int
    elsewhere: int  # other processes, and what the driver keeps for this one
    target: int  # weights
    drafter: int  # weights
    state: int  # rows and scratch tensors, which grow with max_num_seqs
    activations: int  # of a prefill pass, which grow with max_num_batched_tokens
    graphs: int  # decode passes with their logits, and captured prefill passes
    packed: int = 0  # weights in the latency kernel's order, a second copy
    spare: int = SPARE_BYTES

    @property
    def weights(self) -> int:
        return self.target + self.drafter

    @property
    def used(self) -> int:
        """Everything but the KV pool."""
        rest = self.state + self.activations + self.graphs + self.packed + self.spare
        return self.elsewhere + self.weights + rest

    def left(self, utilization: float) -> int:
        """Bytes for the KV pool, below 0 where the rest is too large already."""
        return int(utilization * self.total) - self.used

    def __str__(self) -> str:
        parts = [
            ("target weights", self.target),
            ("drafter weights", self.drafter),
            ("weights packed for the latency path", self.packed),
            ("activations", self.activations),
            ("graphs and logits", self.graphs),
            ("rows and scratch", self.state),
            ("other processes and driver", self.elsewhere),
            ("spare", self.spare),
        ]
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size)


def count_blocks(parts: MemoryParts, limits: Limits, block_bytes: int) -> int:
    """Usable KV blocks of ``block_bytes`` each, beside the null block.

    Raises CapacityError, with what would fit, unless a sequence of ``max_model_len`` fits.
    """
    num_blocks = parts.left(limits.gpu_memory_utilization) // block_bytes - 1
    if num_blocks >= limits.blocks_needed:
        return num_blocks
    allowed = int(limits.gpu_memory_utilization * parts.total)
    if parts.elsewhere + parts.weights > allowed:
        what = "the weights do not fit the GPU"
    elif num_blocks < 1:
        what = "the GPU's memory leaves no room for a KV pool"
    else:
        what = (
            f"the KV pool would hold {num_blocks * limits.block_size} tokens, fewer than one "
            f"sequence of max_model_len ({limits.max_model_len})"
        )
    raise CapacityError(
        f"{what}: in GiB, {allowed / GIB:.2f} of {parts.total / GIB:.2f} may be used "
        f"(gpu_memory_utilization={limits.gpu_memory_utilization}), and {parts} take "
        f"{parts.used / GIB:.2f}. hint: " + " or ".join(_ways_out(parts, limits, block_bytes))
    )


def _ways_out(parts: MemoryParts, limits: Limits, block_bytes: int) -> list[str]:
    """Single changes that would be enough, with their numbers."""
    needed = parts.used + (limits.blocks_needed + 1) * block_bytes
    short = needed - int(limits.gpu_memory_utilization * parts.total)
    ways: list[str] = []
    num_blocks = parts.left(limits.gpu_memory_utilization) // block_bytes - 1
    if num_blocks > 0:
        ways.append(f"lower max_model_len to {num_blocks * limits.block_size + 1}")
    tokens = _reduced(limits.max_num_batched_tokens, parts.activations, short)
    if tokens >= limits.max_num_seqs:
        ways.append(f"lower max_num_batched_tokens to {tokens}")
    seqs = _reduced(limits.max_num_seqs, parts.state, short)
    if seqs > 0:
        ways.append(f"lower max_num_seqs to {seqs}")
    share = math.ceil(100 * needed / parts.total) / 100
    if share <= 1:
        ways.append(f"raise gpu_memory_utilization to {share}")
    if parts.packed >= short:
        ways.append("set latency_path=off")
    if parts.drafter >= short:
        ways.append(f"leave out the drafter ({parts.drafter / GIB:.2f} GiB)")
    if parts.elsewhere >= short + GIB:  # about 1 GiB of it is this process's own
        ways.append("end other processes on the GPU")
    return ways or [f"choose a model that is at least {short / GIB:.2f} GiB smaller"]


def _reduced(value: int, size: int, short: int) -> int:
    """A setting whose memory ``size`` is proportional to it, lowered so that ``short`` is saved."""
    return value * max(size - short, 0) // size if size else 0


def out_of_memory(doing: str, hint: str, free: int, total: int, own: int) -> CapacityError:
    """The error of an allocation that failed. free, total, own: bytes, own are this process's."""
    return CapacityError(
        f"out of GPU memory while {doing}: this process holds {own / GIB:.2f} GiB, "
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free. hint: {hint}"
    )
