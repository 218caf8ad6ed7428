"""Matrix products on a CPU with weights in oneDNN's blocked layout.

Decoding reads every weight once a pass, so layout decides the speed: packed weights stream about
twice as fast as row-major ones (up to five times for float32 at a few rows). A result row is also
the same bits however many rows there are (from two rows on), which keeps plain decoding and
verification together. Fewer than ``MIN_ROWS`` rows are computed as that many: a single row takes a
kernel of its own that sums in another order, and with two or three the weights stream more slowly.
Uses torch's own oneDNN operators; knows nothing of layers.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F

# The layout is chosen for about this many rows; other row counts run well in it too.
_ROWS_HINT = 16
# Rows a product is padded to. A caller with many products on the same rows pads them once instead.
MIN_ROWS = 4


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype can be packed here (x86 CPU with a oneDNN build of torch)."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy of ``weight`` [out, in]; opaque, only ``packed_linear`` can read it."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [N, in] times a packed weight [out, in], plus bias [out]. Returns [N, out] like x."""
    rows = x.shape[0]
    if rows < MIN_ROWS:
        return packed_linear(pad_rows(x, MIN_ROWS), packed, bias)[:rows]
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [N, ...] with zeros below, [rows, ...]; rows is at least N."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))
