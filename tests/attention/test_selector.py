"""Backend selection says what it chose, and refuses instead of falling back."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from native_kernels import kernels
from paceline.attention.cpu import CpuAttention
from paceline.attention.cpu_native import NativeAttention
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
    kernels()
    with caplog.at_level(logging.INFO):
        assert isinstance(select_backend("cpu", arch, torch.bfloat16), NativeAttention)
    assert "cpu-native (compiled for this CPU)" in caplog.text
    assert "4 query heads on 2 KV heads of 8" in caplog.text
    assert "sliding window 77" in caplog.text


def test_cpu_without_native_kernels(
    arch: ModelArch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    with caplog.at_level(logging.INFO):
        assert isinstance(select_backend("cpu", arch, torch.bfloat16), CpuAttention)
    assert "cpu (native kernels are off or missing)" in caplog.text
    with pytest.raises(ConfigError, match=r"'cpu-native' cannot run: native kernels are off.*hint"):
        select_backend("cpu", arch, torch.bfloat16, "cpu-native")


def test_what_native_kernels_do_not_take(arch: ModelArch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(select_backend("cpu", arch, torch.float16), CpuAttention)
        wide = replace(arch, head_dim=320)
        assert isinstance(select_backend("cpu", wide, torch.float32), CpuAttention)
    assert "cpu (no native kernels for float16)" in caplog.text
    assert "cpu (native kernels take heads up to 256)" in caplog.text


def test_by_name(arch: ModelArch) -> None:
    found = select_backend("cpu", arch, torch.float32, "reference")
    assert isinstance(found, ReferenceAttention)
    assert isinstance(select_backend("cpu", arch, torch.float32, "cpu"), CpuAttention)


def test_refusals(arch: ModelArch) -> None:
    with pytest.raises(ConfigError, match=r"no attention backend runs on device 'cuda'.*hint"):
        select_backend("cuda", arch, torch.float32)
    unknown = r"unknown attention backend 'flash'.*cpu, cpu-native, reference"
    with pytest.raises(ConfigError, match=unknown):
        select_backend("cpu", arch, torch.float32, "flash")
