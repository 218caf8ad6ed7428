"""Llama 3.x and what follows its layout (SmolLM2, DeepSeek-R1-Distill-Llama): optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.family import Family, Traits, full_attention


def _read_traits(config: Mapping[str, Any], num_layers: int, source: str) -> Traits:
    bias = bool(config.get("attention_bias", False))
    return Traits(
        sliding_window=full_attention(num_layers),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


FAMILY = Family("llama", ("LlamaForCausalLM",), _read_traits)
