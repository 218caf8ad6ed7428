"""Read a Hugging Face ``config.json`` into a ``ModelArch``. Standard library only.

Understands the layout of transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and 5
(``rope_parameters``, ``dtype``, ``layer_types``). Whatever would make the model compute something
else than its authors meant is refused here, before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import ModelArch
from paceline.errors import ConfigError
from paceline.models.family import Family
from paceline.models.registry import ARCHITECTURES, FAMILIES
from paceline.models.weights import refuse_gguf

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_MODEL_CLASS_KEYS = ("AutoModelForCausalLM", "AutoModel")
_DTYPES = ("float32", "bfloat16", "float16")


def read_hf_config(path: str | Path) -> ModelArch:
    """Architecture of the model in directory ``path``.

    Raises ConfigError when there is no readable ``config.json`` or the model cannot be run.
    """
    directory = Path(path)
    file = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(
            f"`{directory}` is not a directory. hint: give a model directory or hub id"
        )
    if not file.is_file():
        refuse_gguf(directory)
        raise ConfigError(
            f"`{directory}` has no config.json. hint: a model directory holds config.json and "
            f"*.safetensors files in Hugging Face layout"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"`{file}` cannot be read as JSON: {error}. hint: download it again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"`{file}` holds a {type(config).__name__}, not an object of settings")
    return parse_hf_config(config, str(file))


def parse_hf_config(config: dict[str, Any], source: str) -> ModelArch:
    """Architecture from the parsed ``config.json``; ``source`` names it in messages.

    Raises ConfigError for architectures, quantisation, rope types, activations or shapes that
    Paceline does not run.
    """
    architecture, family = _find_family(config, source)
    _refuse_remote_code(config, architecture, source)
    _refuse_quantized(config, source)
    _refuse_other_activations(config, source)
    hidden_size = _positive_int(config, "hidden_size", source)
    num_layers = _positive_int(config, "num_hidden_layers", source)
    num_heads = _positive_int(config, "num_attention_heads", source)
    num_kv_heads = _positive_int(config, "num_key_value_heads", source, default=num_heads)
    max_positions = _positive_int(config, "max_position_embeddings", source)
    traits = family.read_traits(config, num_layers, source)
    head_dim = _positive_int(
        config, "head_dim", source, default=traits.head_dim or max(hidden_size // num_heads, 1)
    )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads "
            f"({num_kv_heads}). hint: the file is damaged; download it again"
        )
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim is {head_dim}; rotary positions need an even one")
    rope_theta, rope_scaling = _read_rope(config, max_positions, source)
    return ModelArch(
        family=family.name,
        vocab_size=_positive_int(config, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size", source),
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive_float(config, "rms_norm_eps", source, default=1e-6),
        max_position_embeddings=max_positions,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        sliding_window=traits.sliding_window,
        eos_token_ids=_token_ids(config, "eos_token_id", source),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id", source)), None),
        dtype=_read_dtype(config),
    )


def _find_family(config: Mapping[str, Any], source: str) -> tuple[str, Family]:
    """The first architecture named that a family runs; by model_type when none is named."""
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise ConfigError(f"{source}: architectures is {named!r}, not a list of names")
    for architecture in named:
        if architecture in ARCHITECTURES:
            return architecture, ARCHITECTURES[architecture]
    model_type = config.get("model_type")
    if not named and isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type].architectures[0], FAMILIES[model_type]
    shown = ", ".join(str(name) for name in named) or f"model_type {model_type!r}"
    supported = ", ".join(sorted(ARCHITECTURES))
    experts = next((key for key in _EXPERT_KEYS if config.get(key)), None)
    if experts is not None:
        raise ConfigError(
            f"{source}: {shown} is a mixture of experts ({experts}={config[experts]}); only dense "
            f"models are supported. hint: use one of {supported}"
        )
    if config.get("auto_map"):
        raise ConfigError(
            f"{source}: {shown} needs its own code (auto_map), and code from model directories is "
            f"never run. hint: use one of {supported}"
        )
    raise ConfigError(f"{source}: {shown} is not supported. hint: use one of {supported}")


def _refuse_remote_code(config: Mapping[str, Any], architecture: str, source: str) -> None:
    """Weights of a known name that expect another class would give numbers nobody meant."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return
    for key in _MODEL_CLASS_KEYS:
        reference = auto_map.get(key)
        if isinstance(reference, str) and reference.rpartition(".")[2] != architecture:
            raise ConfigError(
                f"{source}: auto_map sends {architecture} to its own class `{reference}`, and code "
                f"from model directories is never run. hint: remove auto_map from config.json if "
                f"the weights are those of a plain {architecture}"
            )


def _refuse_quantized(config: Mapping[str, Any], source: str) -> None:
    for key in _QUANTIZATION_KEYS:
        settings = config.get(key)
        if settings:
            method = (
                settings.get("quant_method", "unnamed") if isinstance(settings, dict) else settings
            )
            raise ConfigError(
                f"{source}: the checkpoint is quantized ({key}: {method}), which is not supported. "
                f"hint: use the float32, bfloat16 or float16 original"
            )


def _refuse_other_activations(config: Mapping[str, Any], source: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(
            f"{source}: hidden_act is {activation!r}; these families are run with silu only. "
            f"hint: use a model with hidden_act silu"
        )


def _read_rope(
    config: Mapping[str, Any], max_positions: int, source: str
) -> tuple[float, dict[str, Any] | None]:
    """(theta, None or the scaling's parameters with "rope_type")."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(v, dict) for v in parameters.values()):
        raise ConfigError(
            f"{source}: rope parameters {parameters!r} are not one flat set for all layers. "
            f"hint: only models with the same rope in every layer are supported"
        )
    theta = _positive_float(
        parameters,
        "rope_theta",
        source,
        default=_positive_float(config, "rope_theta", source, default=10000.0),
    )
    for holder in (parameters, config):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(
                f"{source}: partial_rotary_factor is {holder['partial_rotary_factor']}; only heads "
                f"rotated as a whole are supported"
            )
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type not in ("linear", "llama3"):
        raise ConfigError(
            f"{source}: rope type {rope_type!r} is not supported (default, linear and llama3 are). "
            f"hint: without rope_scaling the model runs up to its original length"
        )
    scaling: dict[str, Any] = {
        "rope_type": rope_type,
        "factor": _positive_float(parameters, "factor", source),
    }
    if rope_type == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            scaling[key] = _positive_float(parameters, key, source)
        if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            raise ConfigError(
                f"{source}: high_freq_factor ({scaling['high_freq_factor']}) must be above "
                f"low_freq_factor ({scaling['low_freq_factor']})"
            )
        scaling["original_max_position_embeddings"] = _positive_int(
            parameters, "original_max_position_embeddings", source, default=max_positions
        )
    return theta, scaling


def _read_dtype(config: Mapping[str, Any]) -> str | None:
    """The checkpoint's dtype as it says itself; what the files hold is checked with the weights."""
    named = config.get("dtype") or config.get("torch_dtype")
    plain = str(named).removeprefix("torch.")
    return plain if plain in _DTYPES else None


def _positive_int(
    config: Mapping[str, Any], key: str, source: str, default: int | None = None
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{source}: `{key}` is missing. hint: the file is incomplete")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{source}: `{key}` is {value!r}, not a positive integer")
    return value


def _positive_float(
    config: Mapping[str, Any], key: str, source: str, default: float | None = None
) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{source}: `{key}` is missing. hint: the file is incomplete")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{source}: `{key}` is {value!r}, not a positive number")
    return float(value)


def _token_ids(config: Mapping[str, Any], key: str, source: str) -> tuple[int, ...]:
    """One id, a list of ids, or none."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(f"{source}: `{key}` is {value!r}. hint: a token id or a list of them")
    return tuple(ids)
