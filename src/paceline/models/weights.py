"""What the safetensors files of a model hold, and whether it fits the architecture.

Reads headers only, with the standard library: a check of a 100 GB model takes milliseconds and
needs no torch. Copying tensors is ``loader``'s work. (Format: 8 bytes of little-endian header
length, a JSON header with dtype, shape and byte range of every tensor, then the data without gaps.)
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config import ModelArch
from paceline.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER = 100_000_000
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_LOADABLE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SHOWN = 3  # names listed in a message


class WeightInfo(NamedTuple):
    """One tensor as a file's header describes it."""

    dtype: str  # safetensors name, e.g. "BF16"
    shape: tuple[int, ...]
    nbytes: int


def list_weights(path: str | Path) -> dict[str, WeightInfo]:
    """Every tensor of the model in directory ``path``, by name.

    Raises ConfigError when there are no safetensors files, a shard is missing, or a file is not
    whole.
    """
    return {
        name: info for tensors in _read_files(Path(path)).values() for name, info in tensors.items()
    }


def check_weights(path: str | Path, arch: ModelArch) -> dict[str, list[str]]:
    """The file of each tensor the architecture needs, as {file path: names}; all shapes are right.

    Raises ConfigError as ``list_weights`` does, and when tensors are missing, left over, of another
    shape, or of a dtype that cannot be loaded. Leftovers count because a tensor nobody reads means
    that the checkpoint is not of the architecture its config.json names.
    """
    directory = Path(path)
    files = _read_files(directory)
    found = {name: info for tensors in files.values() for name, info in tensors.items()}
    expected = expected_weights(arch)
    missing = [name for name in expected if name not in found]
    unexpected = [n for n in found if n not in expected and not _ignorable(n, arch)]
    if missing:
        raise ConfigError(
            f"`{directory}` lacks {len(missing)} of the {len(expected)} tensors of a {arch.family} "
            f"model with {arch.num_layers} layers: {_some(missing)}. hint: download the missing "
            f"files, or correct config.json"
        )
    if unexpected:
        raise ConfigError(
            f"`{directory}` holds {len(unexpected)} tensors that a {arch.family} model with "
            f"{arch.num_layers} layers does not have: {_some(unexpected)}. hint: the checkpoint is "
            f"quantized, has adapters, or is of another architecture than its config.json says"
        )
    wrong = [
        f"{name} is {list(found[name].shape)} and should be {list(shape)}"
        for name, shape in expected.items()
        if found[name].shape != shape
    ]
    if wrong:
        raise ConfigError(
            f"`{directory}` has {len(wrong)} tensors whose shape differs from config.json: "
            f"{_some(wrong)}. hint: config.json and weights are of different models"
        )
    unloadable = [f"{n} is {found[n].dtype}" for n in expected if found[n].dtype not in _LOADABLE]
    if unloadable:
        raise ConfigError(
            f"`{directory}` has {len(unloadable)} tensors of a dtype that is not supported: "
            f"{_some(unloadable)}. hint: use the float32, bfloat16 or float16 checkpoint"
        )
    needed = {file: [n for n in tensors if n in expected] for file, tensors in files.items()}
    return {str(file): names for file, names in needed.items() if names}


def expected_weights(arch: ModelArch) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the architecture, as Hugging Face checkpoints name them."""
    hidden, inner = arch.hidden_size, arch.intermediate_size
    query = arch.num_attention_heads * arch.head_dim
    kv = arch.num_kv_heads * arch.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    products = (
        ("self_attn.q_proj", query, hidden, arch.qkv_bias),
        ("self_attn.k_proj", kv, hidden, arch.qkv_bias),
        ("self_attn.v_proj", kv, hidden, arch.qkv_bias),
        ("self_attn.o_proj", hidden, query, arch.o_bias),
        ("mlp.gate_proj", inner, hidden, arch.mlp_bias),
        ("mlp.up_proj", inner, hidden, arch.mlp_bias),
        ("mlp.down_proj", hidden, inner, arch.mlp_bias),
    )
    for name, outputs, inputs, bias in products:
        layer[f"{name}.weight"] = (outputs, inputs)
        if bias:
            layer[f"{name}.bias"] = (outputs,)
    if arch.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (arch.head_dim,)
    weights: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for index in range(arch.num_layers):
        weights.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    weights["model.norm.weight"] = (hidden,)
    if not arch.tie_word_embeddings:
        weights["lm_head.weight"] = (arch.vocab_size, hidden)
    return weights


def count_parameters(arch: ModelArch) -> int:
    """Number of weights of the architecture; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_weights(arch).values())


def _ignorable(name: str, arch: ModelArch) -> bool:
    """Tensors that old or careless tools save although they are derived or shared."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and arch.tie_word_embeddings
    )


def _read_files(directory: Path) -> dict[Path, dict[str, WeightInfo]]:
    """The tensors of each file, after the index when there is one."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        return {single: _read_header(single)}
    if index.is_file():
        return _read_shards(directory, index)
    pickled = sorted(file.name for pattern in _PICKLED for file in directory.glob(pattern))
    if pickled:
        raise ConfigError(
            f"`{directory}` has its weights only as pickled files ({_some(pickled)}), which can "
            f"run code when opened and are never loaded. hint: convert them to safetensors "
            f"(load in transformers, then save_pretrained), or use a repository that has them"
        )
    refuse_gguf(directory)
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    if others:
        raise ConfigError(
            f"`{directory}` has {len(others)} safetensors files ({_some(others)}) but neither "
            f"{_SINGLE} nor {_INDEX}. hint: download the missing index, or rename a single file"
        )
    raise ConfigError(
        f"`{directory}` has no weights: neither {_SINGLE} nor {_INDEX}. "
        f"hint: download the model's *.safetensors files"
    )


def refuse_gguf(directory: Path) -> None:
    """Raise ConfigError if ``directory``, in which no other weights were found, has GGUF files."""
    found = sorted(file.name for file in directory.glob("*.gguf"))
    if found:
        raise ConfigError(
            f"`{directory}` has its weights as GGUF ({_some(found)}), and GGUF is not supported. "
            "hint: give the model that they were made from: a directory or hub id with config.json "
            "and *.safetensors files in float32, bfloat16 or float16"
        )


def _read_shards(directory: Path, index: Path) -> dict[Path, dict[str, WeightInfo]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names_of: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            names_of.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(
            f"`{index}` is not a safetensors index ({type(error).__name__}: {error}). "
            f"hint: download it again"
        ) from error
    outside = [file for file in names_of if Path(str(file)).name != file]
    if outside:
        raise ConfigError(
            f"`{index}` points outside its directory: {_some(outside)}. hint: list plain file names"
        )
    absent = sorted(file for file in names_of if not (directory / file).is_file())
    if absent:
        raise ConfigError(
            f"`{directory}` lacks {len(absent)} of {len(names_of)} weight files: {_some(absent)}. "
            f"hint: finish the download"
        )
    shards = {}
    for file in sorted(names_of):
        header = _read_header(directory / file)
        shards[directory / file] = {name: header[name] for name in names_of[file] if name in header}
    return shards


def _read_header(file: Path) -> dict[str, WeightInfo]:
    """The tensors of one file. Raises ConfigError unless header and data are whole and agree."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ConfigError(
                f"`{file}` is a Git LFS pointer, not the weights. hint: run `git lfs pull` in its "
                f"repository"
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MAX_HEADER or 8 + length > size:
            raise ConfigError(
                f"`{file}` ({size} bytes) is truncated or not a safetensors file: its header "
                f"should have {length} bytes. hint: download it again"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        tensors = {n: _read_entry(entry) for n, entry in header.items() if n != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"`{file}` has a damaged header ({type(error).__name__}: {error}). "
            f"hint: download it again"
        ) from error
    described = 8 + length + max((end for _, end in tensors.values()), default=0)
    if described != size:
        state = "is truncated" if described > size else "has bytes that do not belong to it"
        raise ConfigError(
            f"`{file}` {state}: its header describes {described} bytes and the file has {size}. "
            f"hint: download it again"
        )
    return {name: info for name, (info, _) in tensors.items()}


def _read_entry(entry: Mapping[str, Any]) -> tuple[WeightInfo, int]:
    """(tensor, end of its data); raises one of the errors ``_read_header`` turns into a message."""
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    dtype = str(entry["dtype"])
    item = _ITEM_BYTES.get(dtype)
    if begin < 0 or (item is not None and end - begin != item * math.prod(shape)):
        raise ValueError(f"{end - begin} bytes for {dtype} of shape {list(shape)}")
    return WeightInfo(dtype, shape, end - begin), end


def _some(names: Iterable[str]) -> str:
    """The first few names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
