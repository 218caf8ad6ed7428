"""Compiles the products of few rows for a card that need not be there; see ``cross_compile.py``.

python cross_compile_skinny.py SM SHARED_BYTES [CASE...]
"""

from __future__ import annotations

import sys

import cross_compile
import torch
from cross_compile import empty

from paceline.ops.triton import skinny
from paceline.ops.triton.card import Card


def run_layer(
    hidden: int, qkv: int, inner: int, rows: int, dtype: torch.dtype, residual: bool
) -> None:
    x, scale = empty(rows, hidden, dtype=dtype), empty(hidden, dtype=dtype)
    stream = empty(rows, hidden, dtype=dtype) if residual else None
    weight, bias = empty(qkv, hidden, dtype=dtype), empty(qkv, dtype=dtype)
    skinny.norm_linear(x, scale, 1e-6, weight, bias, stream)
    gate_up = empty(2 * inner, hidden, dtype=dtype)
    skinny.norm_linear_silu_mul(x, scale, 1e-6, gate_up, None, stream)
    skinny.linear_add(x, empty(hidden, hidden, dtype=dtype), x)
    skinny.linear_add(empty(rows, inner, dtype=dtype), empty(hidden, inner, dtype=dtype), x)


CASES = {
    "0.5B": lambda: run_layer(896, 1152, 4864, 1, torch.bfloat16, False),
    "0.5B 16 rows": lambda: run_layer(896, 1152, 4864, 16, torch.bfloat16, True),
    "hidden 1024": lambda: run_layer(1024, 4096, 3072, 16, torch.float16, False),
    "7B": lambda: run_layer(3584, 4608, 18944, 16, torch.bfloat16, True),
    "float32": lambda: run_layer(896, 1152, 4864, 16, torch.float32, True),
}


def main() -> None:
    sm, shared_memory = int(sys.argv[1]), int(sys.argv[2])
    skinny.card_of = lambda device: Card((sm // 10, sm % 10), 100, shared_memory)
    cross_compile.CASES.clear()
    cross_compile.CASES.update(CASES)
    cross_compile.main()


if __name__ == "__main__":
    main()
