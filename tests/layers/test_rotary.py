"""Rotary frequencies against transformers for every rope type, and the angles at far positions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from paceline.config import ModelArch
from paceline.layers.rotary import RotaryEmbedding, inverse_frequencies
from paceline.models.hf_config import parse_hf_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    LLAMA3,
    {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 256},
]


def make(rope: dict[str, Any]) -> tuple[ModelArch, Any]:
    """Our architecture and transformers' rotary module of the same configuration."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            num_hidden_layers=1,
            max_position_embeddings=131072,
            rope_parameters=rope,
            architectures=["LlamaForCausalLM"],
        )
        theirs = LlamaRotaryEmbedding(config)
    return parse_hf_config(config.to_dict(), "config.json"), theirs


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies(rope: dict[str, Any]) -> None:
    arch, theirs = make(rope)
    torch.testing.assert_close(inverse_frequencies(arch), theirs.inv_freq, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rope", ROPES)
def test_tables(rope: dict[str, Any]) -> None:
    arch, theirs = make(rope)
    positions = torch.tensor([0, 1, 77, 1000, 5])
    cos, signed_sin = RotaryEmbedding(arch, torch.float32, "cpu")(positions)
    assert cos.shape == signed_sin.shape == (5, 1, 64)
    expected_cos, expected_sin = theirs(torch.zeros(1), positions[None])
    sign = torch.tensor([-1.0] * 32 + [1.0] * 32)
    torch.testing.assert_close(cos[:, 0], expected_cos[0], atol=2e-4, rtol=0.0)
    torch.testing.assert_close(signed_sin[:, 0], expected_sin[0] * sign, atol=2e-4, rtol=0.0)


def test_half_precision_tables_come_from_float32_angles() -> None:
    arch, _ = make(ROPES[0])
    positions = torch.tensor([100_000])
    exact = RotaryEmbedding(arch, torch.float32, "cpu")(positions)
    half = RotaryEmbedding(arch, torch.bfloat16, "cpu")(positions)
    for ours, reference in zip(half, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), reference, atol=4e-3, rtol=0.0)
