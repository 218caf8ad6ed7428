"""A GPU's memory, and the host's beside it, before anything is loaded: estimates.

Sizes of weights come from the files' headers, the rest from the model's shape. Errs on the large
side, so that a plan that is found to fit does.
"""

from __future__ import annotations

import math

from paceline.check.gpu import Gpu
from paceline.check.report import Fault, format_bytes
from paceline.config import GPU_MAX_LOGIT_BIAS, ModelArch
from paceline.worker.memory_plan import GIB, MemoryParts

_CONTEXT_BYTES = GIB // 2  # what the driver keeps for a process: its context and loaded kernels
_GRAPH_BYTES = GIB // 4
_LOGITS_ROWS = 512  # tokens whose logits a decode pass holds at once
_SCRATCH_ROWS = 144  # rows of the sampler's scratch memory: about one a multiprocessor


def estimate_parts(
    card: Gpu,
    arch: ModelArch,
    weights: tuple[int, int],
    *,
    dtype_bytes: int,
    num_rows: int,
    row_tokens: int,
    budget: int,
) -> MemoryParts:
    """What everything but the KV pool will take.

    arch: the target's; weights: bytes of target and drafter; num_rows: rows on the device, each
    with room for row_tokens token ids; budget: tokens of a step.
    """
    width = 3 * arch.intermediate_size + 4 * arch.hidden_size
    # History ids, penalties' counts, biases; then the sampler's scratch.
    state = num_rows * 4 * (row_tokens + arch.vocab_size + 2 * GPU_MAX_LOGIT_BIAS)
    state += _SCRATCH_ROWS * arch.vocab_size * 4
    return MemoryParts(
        total=card.total_bytes,
        elsewhere=card.total_bytes - card.free_bytes + _CONTEXT_BYTES,
        target=weights[0],
        drafter=weights[1],
        state=state,
        activations=budget * width * dtype_bytes,
        graphs=_LOGITS_ROWS * arch.vocab_size * 4 + _GRAPH_BYTES,
    )


def count_host_blocks(
    swap_space: float, block_bytes: int, free: int | None, faults: list[Fault]
) -> int:
    """KV blocks that ``swap_space`` GiB of host memory hold.

    free: bytes of host memory, None if unknown. Adds a fault where that is too little, or the space
    holds no block.
    """
    num_blocks = int(swap_space * GIB) // block_bytes
    if num_blocks < 1:
        faults.append(
            Fault(
                f"`swap_space` ({swap_space} GiB) holds no KV block, which takes "
                f"{format_bytes(block_bytes)}",
                "raise it; 4 is the default",
                about_memory=True,
            )
        )
    elif free is not None and num_blocks * block_bytes > free:
        faults.append(
            Fault(
                f"`swap_space` ({swap_space} GiB) does not fit into host memory, of which "
                f"{format_bytes(free)} are free",
                f"lower it to {math.floor(90 * free / GIB) / 100} or less, or use "
                "preemption_mode='recompute'",
                about_memory=True,
            )
        )
    return num_blocks
