"""Writes model directories whose files are true in form and tiny in size, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 40,
}
PLAIN = [chr(ord("a") + i) for i in range(26)] + ["ab", "cd", "abcd"]
MERGES = ["a b", "c d", "ab cd"]
SPECIAL = {40: "<|endoftext|>", 41: "<|im_end|>"}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen2 checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = head_dim * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{p}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{p}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{p}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{p}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{p}input_layernorm.weight"] = (hidden,)
        shapes[f"{p}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def num_parameters(config: dict[str, Any]) -> int:
    total = 0
    for shape in tensor_shapes(config).values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def safetensors_header(shapes: dict[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """The beginning of a float32 safetensors file, and how many bytes of data follow it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data, offset


def safetensors_bytes(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """A float32 safetensors file full of zeros."""
    header, size = safetensors_header(shapes)
    return header + bytes(size)


def tokenizer_json(
    plain: list[str] = PLAIN, special: dict[int, str] = SPECIAL, merges: list[Any] = MERGES
) -> dict[str, Any]:
    added = [{"id": i, "content": text, "special": True} for i, text in special.items()]
    vocab = {piece: i for i, piece in enumerate(plain)}
    return {"added_tokens": added, "model": {"type": "BPE", "vocab": vocab, "merges": merges}}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def write_tokenizer(directory: Path, **options: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "tokenizer.json", tokenizer_json(**options))
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    return directory


def write_model(
    directory: Path,
    *,
    tokenizer: bool = True,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A complete model directory; ``config`` changes entries of its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {**CONFIG, **config}
    write_json(directory / "config.json", settings)
    header, size = safetensors_header(tensor_shapes(settings))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)  # zeros that take no place on the disk
    if generation is not None:
        write_json(directory / "generation_config.json", generation)
    if tokenizer:
        write_tokenizer(directory)
    return directory
