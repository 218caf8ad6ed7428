"""The compiled kernels as Python functions over tensors.

    kernels = load()
    if kernels is not None:
        ops.use("cpu", kernels)

A call costs a few microseconds, so arguments go as plain addresses, and what does not change from
call to call is kept in C structures: ``Heads`` (of a layer) and ``Plan`` (of a pass).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.ops import reference
from paceline.ops.native.build import BuildError, build, openmp_runtimes
from paceline.ops.native.self_test import wrong_results

logger = logging.getLogger(__name__)

_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_MAX_HEAD_DIM = 256  # as in kernels.c
# Query tokens that one thread takes at a time: enough to pay for converting K and V, few enough to
# keep many threads busy.
_TILE_TOKENS = 16


class Heads(ctypes.Structure):
    """``struct heads`` of kernels.c: a layer's attention."""

    _fields_ = (
        ("norm", c_void_p),
        ("scale", c_float),
        ("eps", c_float),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("bf16", c_int32),
    )


class _Pass(ctypes.Structure):
    """``struct pass`` of kernels.c: what all layers of a pass share."""

    _fields_ = (
        ("tiles", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("slots", c_void_p),
        ("pairs", c_int64),
        ("table_width", c_int32),
        ("num_tokens", c_int32),
        ("num_tiles", c_int32),
        ("tile_tokens", c_int32),
        ("block_size", c_int32),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """A pass in C, and the tensors it points into."""

    struct: _Pass
    alive: tuple[torch.Tensor, ...]


class NativeKernels:
    """``ops.Operations`` for float32 and bfloat16 on a CPU, and attention.

    Tensors of other dtypes or forms go to ``reference``. Weights must have the dtype of x.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file is not a library with these functions."""
        library = ctypes.CDLL(str(path))
        try:
            self._rms_norm = library.paceline_rms_norm
            self._silu_mul = library.paceline_silu_mul
            self._attend = library.paceline_attend
        except AttributeError as error:
            raise OSError(str(error)) from error
        pointer = c_void_p
        self._rms_norm.argtypes = [
            *[pointer] * 4, c_int64, c_int64, c_float, c_int, c_int,
        ]  # fmt: skip
        self._silu_mul.argtypes = [pointer, pointer, c_int64, c_int64, c_int, c_int]
        self._attend.argtypes = [*[pointer] * 8, c_int64, c_int]
        for function in (self._rms_norm, self._silu_mul, self._attend):
            function.restype = None

    @staticmethod
    def unsupported_reason(dtype: torch.dtype, head_dim: int) -> str | None:
        """Why a model's attention cannot be computed here, None if it can."""
        if dtype not in _BF16:
            return f"no native kernels for {str(dtype).removeprefix('torch.')}"
        if head_dim > _MAX_HEAD_DIM:
            return f"native kernels take heads up to {_MAX_HEAD_DIM}"
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``reference.rms_norm``."""
        if x.dim() != 2 or weight.dim() != 1 or not _known(x):
            return reference.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        self._norm(x, None, weight, out, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``reference.add_rms_norm``."""
        if not (_known(x) and residual.is_contiguous()):
            return reference.add_rms_norm(x, residual, weight, eps)
        out = torch.empty_like(x)
        self._norm(x, residual.data_ptr(), weight, out, eps)
        return out, residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``reference.silu_mul``."""
        if not _known(gate_up):
            return reference.silu_mul(gate_up)
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._silu_mul(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            _BF16[gate_up.dtype],
            torch.get_num_threads(),
        )
        return out

    @staticmethod
    def describe_heads(
        shape: tuple[int, int, int],  # query heads, KV heads, size of one
        scale: float,
        window: int | None,
        norm: torch.Tensor | None,  # [query and KV heads, size]; the caller keeps it
        eps: float,
        dtype: torch.dtype,
    ) -> Heads:
        """A layer for ``attend``."""
        address = None if norm is None else norm.data_ptr()
        return Heads(address, scale, eps, *shape, window or 0, _BF16[dtype])

    @staticmethod
    def plan_pass(
        query_start_loc: torch.Tensor,  # [S + 1] int32
        seq_lens: torch.Tensor,  # [S] int32
        block_table: torch.Tensor,  # [S, blocks] int32
        slot_mapping: torch.Tensor,  # [N] int64
        block_size: int,
    ) -> Plan:
        """A pass for ``attend``: its query tokens cut into tiles."""
        starts = query_start_loc.numpy()
        lens = np.diff(starts)
        counts = -(-lens // _TILE_TOKENS)
        sequences = np.repeat(np.arange(len(lens)), counts)
        within = np.arange(len(sequences)) - (counts.cumsum() - counts)[sequences]
        first = starts[sequences] + within * _TILE_TOKENS
        tiles = torch.from_numpy(np.stack((sequences, first), 1).astype(np.int32))
        given = (query_start_loc, seq_lens, block_table, slot_mapping)
        alive = (tiles, *(tensor.contiguous() for tensor in given))
        pairs = int(lens.astype(np.int64) @ seq_lens.numpy())
        struct = _Pass(
            *(tensor.data_ptr() for tensor in alive),
            pairs,
            block_table.shape[1],
            slot_mapping.shape[0],
            len(tiles),
            _TILE_TOKENS,
            block_size,
        )
        return Plan(struct, alive)

    def attend(
        self,
        heads: Heads,
        plan: Plan,
        qkv: torch.Tensor,  # [N or more, (Hq + 2 * Hkv) * D], contiguous; q and k are overwritten
        rotary: tuple[torch.Tensor, torch.Tensor],  # cos, signed sin: [N, 1, D]
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Head norms, rotation, K and V to their slots, attention; [N or more, Hq * D].

        A block of the caches holds, head after head, K as [D, block_size] and V as
        [block_size, D]. Rows of qkv beyond the pass are padding; zeros come out.
        """
        rows = qkv.shape[0]
        out = qkv.new_empty(rows, heads.num_heads * heads.head_dim)
        self._attend(
            ctypes.addressof(heads),
            ctypes.addressof(plan.struct),
            qkv.data_ptr(),
            out.data_ptr(),
            rotary[0].data_ptr(),
            rotary[1].data_ptr(),
            caches[0].data_ptr(),
            caches[1].data_ptr(),
            rows,
            torch.get_num_threads(),
        )
        return out

    def _norm(
        self,
        x: torch.Tensor,
        residual: int | None,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
    ) -> None:
        rows, size = x.shape
        self._rms_norm(
            x.data_ptr(),
            residual,
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            eps,
            _BF16[x.dtype],
            torch.get_num_threads(),
        )


def _known(x: torch.Tensor) -> bool:
    return x.dtype in _BF16 and x.is_contiguous()


def load() -> NativeKernels | None:
    """The kernels of this machine, compiled if need be; None where there are none.

    Says once, in one log line, what was found or why not. ``PACELINE_NATIVE=0`` turns them off.
    """
    if os.environ.get("PACELINE_NATIVE", "1") == "0":
        return None
    return _load()


@functools.lru_cache
def _load() -> NativeKernels | None:
    start = time.perf_counter()
    try:
        path = build(_check)
        kernels = NativeKernels(path)
    except BuildError as error:
        level = logging.WARNING if error.unexpected else logging.INFO
        logger.log(level, "native CPU kernels: none, torch's are used (slower): %s", error)
        return None
    except OSError as error:
        logger.warning(
            "native CPU kernels: none, torch's are used (slower): %s. hint: delete the file", error
        )
        return None
    logger.info("native CPU kernels: %s, %.1f s", path, time.perf_counter() - start)
    return kernels


def _check(path: Path) -> None:
    """Refuse a new library that loads a second OpenMP runtime or computes something else."""
    before = openmp_runtimes()
    try:
        kernels = NativeKernels(path)
    except OSError as error:
        raise BuildError(f"the compiled file cannot be loaded: {error}", unexpected=True) from error
    if openmp_runtimes() - before:
        raise BuildError("the compiled file loads a second OpenMP runtime", unexpected=True)
    wrong = wrong_results(kernels)
    if wrong:
        raise BuildError(f"wrong results from {', '.join(wrong)}", unexpected=True)
