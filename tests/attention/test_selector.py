"""Backend selection says what it chose, and refuses instead of falling back."""

from __future__ import annotations

import logging

import pytest

from paceline.attention.cpu import CpuAttention
from paceline.attention.reference import ReferenceAttention
from paceline.attention.selector import select_backend
from paceline.config import ModelArch
from paceline.errors import ConfigError
from paceline.models.hf_config import parse_hf_config


@pytest.fixture
def arch() -> ModelArch:
    return parse_hf_config(
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "sliding_window": 77,
        },
        "config.json",
    )


def test_cpu(arch: ModelArch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(select_backend("cpu", arch), CpuAttention)
    assert "cpu (device is a CPU)" in caplog.text
    assert "4 query heads on 2 KV heads of 8" in caplog.text
    assert "sliding window 77" in caplog.text


def test_by_name(arch: ModelArch) -> None:
    assert isinstance(select_backend("cpu", arch, "reference"), ReferenceAttention)


def test_refusals(arch: ModelArch) -> None:
    with pytest.raises(ConfigError, match=r"no attention backend runs on device 'cuda'.*hint"):
        select_backend("cuda", arch)
    with pytest.raises(ConfigError, match=r"unknown attention backend 'flash'.*cpu, reference"):
        select_backend("cpu", arch, "flash")
