"""config.json in the layouts of transformers 4 and 5, and everything that is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.models.hf_config import parse_hf_config, read_hf_config

BASE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 2,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def parse(**changes: Any) -> Any:
    config = {**BASE, **changes}
    return parse_hf_config({k: v for k, v in config.items() if v != "absent"}, "config.json")


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    return message


def test_qwen2_as_published() -> None:
    arch = parse()
    assert (arch.family, arch.head_dim, arch.num_kv_heads) == ("qwen2", 64, 2)
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias, arch.qk_norm) == (True, False, False, False)
    assert arch.sliding_window == (None,) * 4
    assert (arch.rope_theta, arch.rope_scaling) == (1e6, None)
    assert arch.tie_word_embeddings
    assert (arch.eos_token_ids, arch.bos_token_id, arch.dtype) == ((151645,), 151643, "bfloat16")
    assert arch.kv_bytes_per_token(2) == 2 * 4 * 2 * 64 * 2


def test_defaults_of_absent_keys() -> None:
    arch = parse(
        num_key_value_heads=None,
        rms_norm_eps="absent",
        rope_theta="absent",
        tie_word_embeddings="absent",
        torch_dtype="absent",
        eos_token_id=None,
        bos_token_id="absent",
    )
    assert (arch.num_kv_heads, arch.rms_norm_eps, arch.rope_theta) == (14, 1e-6, 10000.0)
    assert (arch.tie_word_embeddings, arch.dtype) == (False, None)
    assert (arch.eos_token_ids, arch.bos_token_id) == ((), None)


def test_transformers_5_layout() -> None:
    arch = parse(
        rope_theta="absent",
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        torch_dtype="absent",
        dtype="float16",
        eos_token_id=[1, 2],
        layer_types=["full_attention"] * 4,
    )
    assert (arch.rope_theta, arch.rope_scaling, arch.dtype) == (5e5, None, "float16")
    assert arch.eos_token_ids == (1, 2)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama3_rope(key: str) -> None:
    scaling = {
        key: "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    arch = parse(architectures=["LlamaForCausalLM"], rope_scaling=scaling, head_dim=64)
    assert (arch.family, arch.qkv_bias) == ("llama", False)
    assert arch.rope_scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_linear_rope() -> None:
    arch = parse(rope_scaling={"type": "linear", "factor": 2})
    assert arch.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert arch.rope_theta == 1e6


def test_windows() -> None:
    assert parse(use_sliding_window=True).sliding_window == (None, None, 32768, 32768)
    kinds = ["sliding_attention", "full_attention"] * 2
    arch = parse(use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert arch.sliding_window == (8, None, 8, None)
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert parse(**mistral, sliding_window=4096).sliding_window == (4096,) * 4
    assert parse(**mistral, sliding_window=None).sliding_window == (None,) * 4
    kinds = ["sliding_attention"] * 4
    assert parse(**mistral, sliding_window=9, layer_types=kinds).sliding_window == (9,) * 4


def test_qwen3_heads() -> None:
    arch = parse(architectures=["Qwen3ForCausalLM"])
    assert (arch.head_dim, arch.qk_norm, arch.qkv_bias) == (128, True, False)
    assert parse(architectures=["Qwen3ForCausalLM"], head_dim=64).head_dim == 64


def test_model_type_stands_in_for_architectures() -> None:
    assert parse(architectures="absent", model_type="mistral").family == "mistral"


def test_upstreamed_auto_map_is_accepted() -> None:
    auto_map = {"AutoConfig": "configuration_x.Y", "AutoModelForCausalLM": "m.Qwen2ForCausalLM"}
    assert parse(auto_map=auto_map).family == "qwen2"


SUPPORTED = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"


def test_unknown_architectures() -> None:
    message = refused(architectures=["GemmaForCausalLM"])
    assert "GemmaForCausalLM is not supported" in message
    assert SUPPORTED in message
    message = refused(architectures="absent", model_type="gpt2")
    assert "model_type 'gpt2' is not supported" in message
    message = refused(architectures=["Qwen3MoeForCausalLM"], num_experts=128)
    assert "mixture of experts (num_experts=128)" in message
    assert "hint: use one of" in message
    message = refused(architectures=["NewLM"], auto_map={"AutoModelForCausalLM": "new.NewLM"})
    assert "NewLM needs its own code (auto_map)" in message
    assert "never run" in message
    message = refused(auto_map={"AutoModelForCausalLM": "modeling_x.OtherForCausalLM"})
    assert "modeling_x.OtherForCausalLM" in message
    assert "hint: remove auto_map" in message
    assert "not a list" in refused(architectures="Qwen2ForCausalLM")


def test_quantized() -> None:
    message = refused(quantization_config={"quant_method": "awq", "bits": 4})
    assert "quantized (quantization_config: awq)" in message
    assert "hint" in message
    assert "gptq" in refused(compression_config={"quant_method": "gptq"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "`factor` is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "`factor` is -1"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            r"high_freq_factor (1.0) must be above low_freq_factor (4.0)",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "not one flat set",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"vocab_size": "many"}, "`vocab_size` is 'many'"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` is nan"),
        ({"num_key_value_heads": 4}, "(14) is not a multiple of num_key_value_heads (4)"),
        ({"head_dim": 65}, "head_dim is 65"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` is '</s>'"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers is None"),
        ({"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers=4"),
        ({"layer_types": ["linear_attention"] * 4}, "contains linear_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding window is off"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "2 sliding_attention layers of 4 with sliding_window=32768",
        ),
    ],
)
def test_refused_settings(changes: dict[str, Any], expected: str) -> None:
    assert expected in refused(**changes)


def test_read_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a directory.*hint"):
        read_hf_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config.json.*hint"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be read as JSON.*hint"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert read_hf_config(tmp_path).family == "qwen2"


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys, paceline.models.hf_config, paceline.models.weights, paceline.models.registry;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
