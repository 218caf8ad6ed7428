"""Mistral: Llama's layer, every layer behind the same sliding window when the config has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.models.family import Family, Traits, read_layer_types, read_window


def _read_traits(config: Mapping[str, Any], num_layers: int, source: str) -> Traits:
    window = read_window(config, source)
    slides = read_layer_types(config, num_layers, source)
    if slides is not None and any(slide != (window is not None) for slide in slides):
        raise ConfigError(
            f"{source}: layer_types has {sum(slides)} sliding_attention layers of {num_layers} "
            f"with sliding_window={window}; in a Mistral model all layers slide, or none does. "
            f"hint: remove layer_types, or set sliding_window to match"
        )
    return Traits(sliding_window=(window,) * num_layers)


FAMILY = Family("mistral", ("MistralForCausalLM",), _read_traits)
