"""Headers of safetensors files: listed, compared with the architecture, and every fault refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import load, save_random
from safetensors.torch import load_file, save_file

from paceline.attention.reference import ReferenceAttention
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.errors import ConfigError
from paceline.models.decoder import DecoderModel
from paceline.models.hf_config import read_hf_config
from paceline.models.weights import (
    check_weights,
    count_parameters,
    expected_weights,
    list_weights,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"attention_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
}
NAME = "model.safetensors"


def check(path: Path) -> dict[str, list[str]]:
    return check_weights(path, read_hf_config(path))


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check(path)
    message = str(caught.value)
    assert "hint: " in message
    with pytest.raises(ConfigError):  # the loader stops at the same point
        load(path)
    return message


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_random(tmp_path, "qwen2")
    return tmp_path


def rewrite(path: Path, change: Any) -> None:
    tensors = load_file(path / NAME)
    change(tensors)
    save_file(tensors, path / NAME)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_expected_names_and_shapes(tmp_path: Path, family: str) -> None:
    """Three descriptions agree: the saved file, the architecture's list, the model's parameters."""
    original = save_random(tmp_path, family, **FAMILIES[family])
    arch = read_hf_config(tmp_path)
    expected = expected_weights(arch)
    assert {name: info.shape for name, info in list_weights(tmp_path).items()} == expected
    assert count_parameters(arch) == sum(p.numel() for p in original.parameters())
    model = DecoderModel(arch, ReferenceAttention(), SingleProcessGroup(), torch.float32, "cpu")
    targets = model.weight_targets()
    assert targets.keys() == expected.keys()
    for name, target in targets.items():
        target.copy_from(torch.zeros(expected[name]))  # fits, or raises
    assert check(tmp_path) == {str(tmp_path / NAME): list(list_weights(tmp_path))}


def test_sizes_and_dtypes(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2", dtype=torch.bfloat16)
    info = list_weights(tmp_path)["model.embed_tokens.weight"]
    assert info == ("BF16", (96, 48), 96 * 48 * 2)


def test_derived_and_shared_tensors_may_lie_about(tmp_path: Path) -> None:
    save_random(tmp_path, "llama", tie_word_embeddings=True)

    def change(tensors: Any) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = torch.ones(96, 48)

    rewrite(tmp_path, change)
    (names,) = check(tmp_path).values()
    assert "lm_head.weight" not in names
    load(tmp_path)


def test_truncated(saved: Path) -> None:
    data = (saved / NAME).read_bytes()
    (saved / NAME).write_bytes(data[:-1000])
    message = refused(saved)
    assert "is truncated" in message
    assert f"describes {len(data)} bytes and the file has {len(data) - 1000}" in message
    (saved / NAME).write_bytes(data[:100])
    assert "truncated or not a safetensors file" in refused(saved)
    (saved / NAME).write_bytes(b"")
    assert "(0 bytes) is truncated" in refused(saved)
    (saved / NAME).write_bytes(data + b"123")
    assert "bytes that do not belong to it" in refused(saved)


def test_damaged_headers(saved: Path) -> None:
    for header in (b"{nonsense!}", b'{"a": 3}', b"[]", b'{"a": {"dtype": "F32"}}'):
        (saved / NAME).write_bytes(struct.pack("<Q", len(header)) + header)
        assert "damaged header" in refused(saved)
    entry = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    header = json.dumps(entry).encode()
    (saved / NAME).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "8 bytes for F32 of shape [3]" in refused(saved)


def test_git_lfs_pointer(saved: Path) -> None:
    (saved / NAME).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "Git LFS pointer" in refused(saved)


def test_missing_tensor(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    message = refused(saved)
    assert "lacks 1 of the 39 tensors of a qwen2 model with 3 layers" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_unexpected_tensors(saved: Path) -> None:
    def change(tensors: Any) -> None:
        for layer in range(5):
            tensors[f"model.layers.{layer}.mlp.up_proj.scales"] = torch.ones(2)

    rewrite(saved, change)
    message = refused(saved)
    assert "holds 5 tensors that a qwen2 model with 3 layers does not have" in message
    assert "and 2 more" in message


def test_wrong_shape(saved: Path) -> None:
    def change(tensors: Any) -> None:
        tensors["model.norm.weight"] = torch.ones(47)

    rewrite(saved, change)
    assert "model.norm.weight is [47] and should be [48]" in refused(saved)


def test_unsupported_dtype(saved: Path) -> None:
    def change(tensors: Any) -> None:
        tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)

    rewrite(saved, change)
    assert "model.norm.weight is I8" in refused(saved)


def test_only_pickled(saved: Path) -> None:
    (saved / NAME).rename(saved / "pytorch_model.bin")
    message = refused(saved)
    assert "only as pickled files (pytorch_model.bin)" in message
    assert "hint: convert them to safetensors" in message


def test_no_weights(saved: Path) -> None:
    (saved / NAME).rename(saved / "consolidated.safetensors")
    assert "1 safetensors files (consolidated.safetensors) but neither" in refused(saved)
    (saved / "consolidated.safetensors").unlink()
    assert "has no weights" in refused(saved)


def test_shards(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2", max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    files = check(tmp_path)
    assert sorted(files) == [str(shard) for shard in shards]
    assert sorted(name for names in files.values() for name in names) == sorted(
        expected_weights(read_hf_config(tmp_path))
    )
    shards[1].unlink()
    message = refused(tmp_path)
    assert f"lacks 1 of {len(shards)} weight files: {shards[1].name}" in message


def test_bad_index(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2", max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for damaged in ("{", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": [1]}}'):
        index.write_text(damaged)
        assert "is not a safetensors index" in refused(tmp_path)
    first = next(iter(content["weight_map"]))
    index.write_text(json.dumps({"weight_map": {first: "../elsewhere.safetensors"}}))
    assert "points outside its directory" in refused(tmp_path)
    del content["weight_map"][first]
    index.write_text(json.dumps(content))
    assert f"lacks 1 of the 39 tensors of a qwen2 model with 3 layers: {first}" in refused(tmp_path)
