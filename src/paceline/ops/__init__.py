"""Element-wise operations of a decoder layer, by the names layers call."""

from paceline.ops.reference import add_rms_norm, rms_norm, rotary, silu_mul

__all__ = ["add_rms_norm", "rms_norm", "rotary", "silu_mul"]
