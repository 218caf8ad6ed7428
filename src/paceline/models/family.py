"""What one model family says about itself. Standard library only.

A family is a small file: which architecture names it answers to, how its ``config.json`` differs
from the common part, and which class builds it. Reading the common part is ``hf_config``'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Traits:
    """The points in which dense decoders of this kind differ."""

    sliding_window: tuple[int | None, ...]  # one entry a layer
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = (
        None  # when config.json has none; None: hidden_size / num_attention_heads
    )


@dataclass(frozen=True)
class Family:
    """Registry entry: name, the architectures it runs, and how to read one."""

    name: str
    architectures: tuple[str, ...]
    read_traits: Callable[[Mapping[str, Any], int, str], Traits]  # (config, num_layers, source)
    model_class: str = "paceline.models.decoder:DecoderModel"  # imported when a model is built


def full_attention(num_layers: int) -> tuple[None, ...]:
    """Every layer attends to everything before it."""
    return (None,) * num_layers


def read_window(config: Mapping[str, Any], source: str) -> int | None:
    """``sliding_window``, None when absent. Raises ConfigError unless it is a positive integer."""
    window = config.get("sliding_window")
    if window is None:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(
            f"{source}: sliding_window is {window!r}. hint: a positive integer or null"
        )
    return window


def read_layer_types(
    config: Mapping[str, Any], num_layers: int, source: str
) -> tuple[bool, ...] | None:
    """``layer_types`` as one flag a layer, True where attention slides; None when absent.

    Raises ConfigError for a wrong length or a kind of layer that no family here has.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        count = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise ConfigError(
            f"{source}: layer_types has {count} entries for num_hidden_layers={num_layers}. "
            f"hint: one entry a layer"
        )
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"{source}: layer_types contains {', '.join(unknown)}; only full_attention and "
            f"sliding_attention layers are supported. hint: use a model without such layers"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def optional_windows(
    config: Mapping[str, Any], num_layers: int, source: str
) -> tuple[int | None, ...]:
    """Windows of the Qwen families: off unless ``use_sliding_window``.

    When on, ``layer_types`` says which layers slide, or else those from ``max_window_layers`` on.
    """
    slides = read_layer_types(config, num_layers, source)
    window = read_window(config, source) if config.get("use_sliding_window", False) else None
    if window is None:
        if slides is not None and any(slides):
            raise ConfigError(
                f"{source}: layer_types names {sum(slides)} sliding_attention layers but the "
                f"sliding window is off. hint: set use_sliding_window and sliding_window, or fix "
                f"layer_types"
            )
        return full_attention(num_layers)
    if slides is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ConfigError(f"{source}: max_window_layers is {first!r}, not an integer")
        slides = tuple(layer >= first for layer in range(num_layers))
    return tuple(window if slide else None for slide in slides)
