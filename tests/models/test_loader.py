"""Loading: what is logged, what is packed, and that shards of a tensor-parallel model add up."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from paged_harness import PagedRun, load, save_random

from paceline.attention.cpu import CpuAttention
from paceline.attention.reference import ReferenceAttention
from paceline.config import ModelConfig
from paceline.errors import ConfigError
from paceline.models.hf_config import read_hf_config
from paceline.models.loader import load_model
from paceline.models.registry import ARCHITECTURES, FAMILIES, model_class
from paceline.ops import cpu_linear


class ThreadGroup:
    """A tensor-parallel group whose ranks are threads that meet at a barrier."""

    def __init__(
        self, rank: int, size: int, meeting: threading.Barrier, board: list[object]
    ) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._board = meeting, board

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = tensor.clone()
        self._meeting.wait(20)
        parts = [part for part in self._board if isinstance(part, torch.Tensor)]
        self._meeting.wait(20)
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=-1)


def test_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = save_random(tmp_path, "qwen2")
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    millions = sum(p.numel() for p in original.parameters()) / 1e6
    assert f"{millions:.1f}M parameters" in caplog.text


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_replace_the_originals(tmp_path: Path, tied: bool) -> None:
    save_random(tmp_path, "qwen2", tie_word_embeddings=tied)
    model = load(tmp_path)
    if not cpu_linear.can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this CPU has no packed layout")
    names = {name for name, _ in model.named_parameters()}
    assert not any("qkv.weight" in name or "down.weight" in name for name in names)
    assert "embedding.weight" in names  # rows are looked up in it
    assert not tied or model.head.packed is not None
    assert sum(p.numel() for p in model.parameters()) < 96 * 48 + 5000
    with pytest.raises(AssertionError):
        model.weight_targets()


def test_unpacked_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path, "qwen3", tie_word_embeddings=True)
    sequences = [[5, 6, 7, 8, 9, 10], [1]]
    packed = PagedRun(load(tmp_path), sequences).finish([3])
    monkeypatch.setattr(cpu_linear, "can_pack", lambda dtype, device: False)
    model = load(tmp_path)
    assert model.head.packed is None
    plain = PagedRun(model, sequences).finish([3])
    for ours, theirs in zip(packed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_two_ranks_compute_the_same(tmp_path: Path, family: str, changes: dict[str, bool]) -> None:
    save_random(tmp_path, family, **changes)
    sequences = [[5, 90, 7, 8, 9, 10, 3], [95], [0, 47, 48]]
    expected = PagedRun(load(tmp_path), sequences).finish([4])
    arch = read_hf_config(tmp_path)
    config = ModelConfig("tiny", str(tmp_path), arch, "float32", 64)
    meeting, board = threading.Barrier(2), [None, None]

    def rank(index: int) -> list[torch.Tensor]:
        group = ThreadGroup(index, 2, meeting, board)  # type: ignore[arg-type]
        model = load_model(config, "cpu", CpuAttention(), group)
        return PagedRun(model, sequences, tp_size=2).finish([4])

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(rank, range(2)):
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_group_that_does_not_divide(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2")
    config = ModelConfig("tiny", str(tmp_path), read_hf_config(tmp_path), "float32", 64)
    group = ThreadGroup(0, 4, threading.Barrier(4), [])
    with pytest.raises(
        ConfigError, match=r"size 4 does not divide num_attention_heads \(6\).*hint"
    ):
        load_model(config, "cpu", ReferenceAttention(), group)


def test_registry_names_are_unique() -> None:
    assert sum(len(family.architectures) for family in FAMILIES.values()) == len(ARCHITECTURES)
    for name in FAMILIES:
        assert model_class(name).__name__ == "DecoderModel"
