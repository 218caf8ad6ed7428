"""The published shapes are the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.models.hf_config import parse_hf_config
from paceline.synth.shapes import SHAPES, find_shape

# Weights in the published checkpoints, a tied head counted once.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
}


def test_every_published_shape_has_its_number_of_parameters() -> None:
    found = {name: shape.num_parameters for name, shape in SHAPES.items()}
    del found["tiny"]
    assert found == PUBLISHED


@pytest.mark.parametrize("name", SHAPES)
def test_the_engine_reads_what_the_shape_says(name: str) -> None:
    shape = SHAPES[name]
    arch = parse_hf_config(json.loads(json.dumps(shape.config("bfloat16"))), name)
    assert arch.family == shape.family
    assert arch.head_dim == shape.head_dim
    assert arch.tie_word_embeddings == shape.tied
    assert arch.qkv_bias == (shape.family == "qwen2")
    assert arch.qk_norm == (shape.family == "qwen3")
    assert arch.max_position_embeddings == shape.max_positions
    assert (arch.rope_scaling or {}).get("factor") == shape.rope_factor
    assert set(arch.sliding_window) == {None}
    assert arch.dtype == "bfloat16"
    assert shape.vocabulary.size <= shape.rows


def test_the_special_ids_are_the_published_ones() -> None:
    qwen, llama = SHAPES["qwen2.5-7b"].vocabulary, SHAPES["llama-3-8b"].vocabulary
    assert [qwen.special_id(text) for text in qwen.special] == [151643, 151644, 151645]
    assert qwen.stop_ids == [151645, 151643]
    assert llama.special_id("<|begin_of_text|>") == 128000
    assert llama.stop_ids == [128009, 128001]
    assert llama.size == SHAPES["llama-3-8b"].rows == 128256


def test_a_shape_by_name() -> None:
    assert find_shape("Qwen2.5-7B") is SHAPES["qwen2.5-7b"]
    with pytest.raises(ConfigError, match=r"no shape `qwen2\.5-8b`.*did you mean `qwen2\.5-\w+`"):
        find_shape("qwen2.5-8b")
    with pytest.raises(ConfigError, match="did you mean `llama-3-8b`"):
        find_shape("meta/Llama-3-8B-it")
    with pytest.raises(ConfigError, match=r"no shape `xyz`\. hint: shapes: qwen2\.5-0\.5b, .*tiny"):
        find_shape("xyz")


def test_transformers_reads_every_config(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for name, shape in SHAPES.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(shape.config("bfloat16")))
        config = AutoConfig.from_pretrained(directory)
        assert config.model_type == shape.family
        assert config.rope_parameters["rope_theta"] == shape.rope_theta
        assert config.rope_parameters.get("factor") == shape.rope_factor
        assert config.head_dim == shape.head_dim
