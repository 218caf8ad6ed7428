"""Triton versions of the element-wise operations, by the names that ``ops.reference`` uses.

Import this package only where a kernel will run: it needs Triton, which is not on every platform.
With ``TRITON_INTERPRET=1`` set before the import, the kernels run on CPU tensors, slowly.
"""

from paceline.ops.triton.activation import silu_mul
from paceline.ops.triton.embedding import embed_rows
from paceline.ops.triton.norm import add_rms_norm, rms_norm
from paceline.ops.triton.rotary import rotary_kv_decode, rotary_kv_prefill

__all__ = [
    "add_rms_norm",
    "embed_rows",
    "rms_norm",
    "rotary_kv_decode",
    "rotary_kv_prefill",
    "silu_mul",
]
