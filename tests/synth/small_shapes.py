"""Small shapes of every kind, and plans for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.synth.pair import PairPlan
from paceline.synth.shapes import SHAPES, Shape

TINY = SHAPES["tiny"]
# Biases, normalised heads, scaled rotary positions; the head tied or of its own.
FAMILIES = {
    "qwen2": TINY,
    "qwen2-own-head": replace(TINY, tied=False),
    "qwen3": replace(TINY, family="qwen3", head_dim=48),
    "qwen3-own-head": replace(TINY, family="qwen3", tied=False),
    "llama": replace(TINY, family="llama", rope_factor=32.0, rms_norm_eps=1e-5),
    "llama-own-head": replace(TINY, family="llama", tied=False),
}


def plan_of(
    target: Shape,
    drafter: Shape | None,
    out: Path,
    *,
    acceptance: float = 0.8,
    dtype: str = "bfloat16",
) -> PairPlan:
    """A plan on the CPU, its values not checked."""
    return PairPlan(target, drafter, out, acceptance, seed=5, dtype=dtype, device="cpu")
