"""Compiles every forward kernel, as its wrapper launches it, for a card that need not be there.

    python cross_compile.py SM SHARED_BYTES CASE...

The wrappers run on tensors without memory, with launches recorded instead of made; each distinct
launch is then compiled for compute capability SM. Prints one JSON line a kernel.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from paceline.attention import triton_decode, triton_prefill
from paceline.ops import triton as ops
from paceline.ops.triton.card import Card

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def run_elementwise(hidden: int, inner: int, dtype: torch.dtype) -> None:
    x, weight = empty(7, hidden, dtype=dtype), empty(hidden, dtype=dtype)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, x, weight, 1e-6)
    ops.silu_mul(empty(7, 2 * inner, dtype=dtype))
    ops.embed_rows(
        integers(9, 64), integers(7), integers(9), empty(320, hidden, dtype=dtype),
        query_len=1, offset=-1,
    )  # fmt: skip


def run_rotary(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, norm: bool) -> None:
    qkv = empty(14, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cache = empty(33, 16, kv_heads, head_dim, dtype=dtype)
    head_norm = empty(heads + kv_heads, head_dim, dtype=dtype) if norm else None
    common = (qkv, cache, cache, empty(head_dim // 2, dtype=torch.float32), head_norm, 1e-6)
    positions = empty(14, dtype=torch.int64)
    ops.rotary_kv_prefill(*common, positions, positions)
    ops.rotary_kv_decode(
        *common, integers(7), integers(9), integers(9), integers(9, 4), query_len=2, offset=-1
    )


def run_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    query_lens: tuple[int, ...] = (1, 6),
    window: int | None = None,
) -> None:
    cache = empty(33, 16, kv_heads, head_dim, dtype=dtype)
    for query_len, splits in zip(query_lens, (32, 1), strict=False):
        size = triton_decode.workspace_size(7 * query_len, heads, head_dim, splits)
        triton_decode.paged_decode_attention(
            empty(7 * query_len, heads, head_dim, dtype=dtype), cache, cache,
            integers(7), integers(9), integers(9), integers(9, 4),
            query_len=query_len, offset=-1, scale=0.1, sliding_window=window,
            num_splits=splits, workspace=empty(size, dtype=torch.float32),
        )  # fmt: skip
    triton_prefill.paged_prefill_attention(
        empty(99, heads, head_dim, dtype=dtype), cache, cache,
        integers(3), integers(2), integers(2, 4),
        max_query_len=98, scale=0.1, sliding_window=window,
    )  # fmt: skip


CASES: dict[str, Callable[[], None]] = {
    "elementwise 7B": lambda: run_elementwise(3584, 18944, torch.bfloat16),
    "elementwise float32": lambda: run_elementwise(960, 2560, torch.float32),
    "rotary D=128 norm": lambda: run_rotary(32, 8, 128, torch.bfloat16, True),
    "rotary D=64": lambda: run_rotary(14, 2, 64, torch.bfloat16, False),
    "attention D=128": lambda: run_attention(28, 4, 128),
    "attention D=64": lambda: run_attention(14, 2, 64),
    "attention D=8": lambda: run_attention(4, 2, 8),
    "attention D=96 window": lambda: run_attention(32, 32, 96, window=2047),
    "attention D=128 long run": lambda: run_attention(64, 8, 128, query_lens=(2, 17)),
    "attention D=256 float16": lambda: run_attention(8, 4, 256, torch.float16),
    "attention D=64 float32": lambda: run_attention(14, 2, 64, torch.float32),
    "attention D=128 float32": lambda: run_attention(28, 4, 128, torch.float32, (17,)),
}


def record(cases: list[str], card: Card) -> list[Launch]:
    """The launches of some cases on a card."""
    launches: list[Launch] = []
    for module in (triton_decode, triton_prefill):
        module.card_of = lambda device: card
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launches.append(
        (self, args, kwargs)
    )
    for case in cases:
        CASES[case]()
    return launches


def source_of(launch: Launch) -> ASTSource:
    """What the launch would compile: types, constants, and what is known to divide by 16."""
    kernel, args, kwargs = launch
    given = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    bound = inspect.signature(kernel.fn).bind(*args, **given).arguments
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        aligned = isinstance(value, torch.Tensor)
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def main() -> None:
    sm, shared_memory = int(sys.argv[1]), int(sys.argv[2])
    card = Card((sm // 10, sm % 10), 100, shared_memory)
    done = set()
    for launch in record(sys.argv[3:] or list(CASES), card):
        source = source_of(launch)
        options = {name: launch[2][name] for name in OPTIONS if name in launch[2]}
        key = (source.hash(), tuple(options.items()))
        if key in done:
            continue
        done.add(key)
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        facts = {"kernel": launch[0].__name__, "shared": compiled.metadata.shared, **options}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
