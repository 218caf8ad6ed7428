"""Qwen3 (dense): heads of q and k are normalised before the rotary step, 128 wide by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.family import Family, Traits, optional_windows


def _read_traits(config: Mapping[str, Any], num_layers: int, source: str) -> Traits:
    bias = bool(config.get("attention_bias", False))
    return Traits(
        sliding_window=optional_windows(config, num_layers, source),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        head_dim=128,
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _read_traits)
