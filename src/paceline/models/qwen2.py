"""Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen: biases on q, k and v; optional sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.family import Family, Traits, optional_windows


def _read_traits(config: Mapping[str, Any], num_layers: int, source: str) -> Traits:
    return Traits(sliding_window=optional_windows(config, num_layers, source), qkv_bias=True)


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read_traits)
