"""Every family against transformers: the same logits whatever way the tokens are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import PagedRun, load, oracle, reload, save_random

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-bias": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "mistral-window": ("mistral", {"sliding_window": 20, "head_dim": 12}),
    "mistral-full": ("mistral", {"sliding_window": None}),
}
LENGTHS = (1, 2, 5, 23, 47, 130, 200)
WAYS: dict[str, list[int]] = {
    "one prefill pass": [1000],
    "chunks": [33, 7, 50],
    "token by token": [1],
    "verify beside decode": [1, 4, 1, 6, 2, 3, 5],
}


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 96, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=list(MODELS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, backend: str
) -> Any:
    """(our model, sequences, transformers' logits)."""
    family, changes = MODELS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    original = save_random(path, family, **changes)
    sequences = [tokens(length) for length in LENGTHS]
    return load(path, backend=backend), sequences, oracle(original, sequences)


@pytest.mark.parametrize("way", list(WAYS))
def test_logits_equal_transformers(pair: Any, way: str) -> None:
    model, sequences, expected = pair
    found = PagedRun(model, sequences).finish(WAYS[way])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_prefill_beside_decode(pair: Any) -> None:
    """Long and short queries in one pass, in mixed order."""
    model, sequences, expected = pair
    run = PagedRun(model, sequences)
    run.step([(6, 60), (0, 1), (4, 3), (5, 90)])
    run.step([(5, 40), (4, 1), (6, 100), (3, 23), (1, 2)])
    found = run.finish([40])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_half_precision(tmp_path: Path, family: str, dtype: str, backend: str) -> None:
    """Loaded and run in half precision: as near to float32 as transformers is in that precision."""
    if dtype == "float16" and backend == "cpu-native":
        pytest.skip("there are no compiled kernels for float16")
    save_random(tmp_path, family, dtype=getattr(torch, dtype), tie_word_embeddings=True)
    model = load(tmp_path, dtype, backend)
    sequences = [tokens(length) for length in (1, 40, 90)]
    theirs = torch.cat(oracle(reload(tmp_path, getattr(torch, dtype)), sequences))
    exact = torch.cat(oracle(reload(tmp_path, torch.float32), sequences))
    ours = torch.cat(PagedRun(model, sequences).finish([30, 1, 5]))
    assert model.embedding.weight.dtype == getattr(torch, dtype)
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_checkpoint_converted_on_load(tmp_path: Path, stored: str) -> None:
    """A half-precision checkpoint in float32 gives the float32 results of its rounded weights."""
    save_random(tmp_path, "qwen2", dtype=getattr(torch, stored))
    sequences = [tokens(30)]
    expected = oracle(reload(tmp_path, torch.float32), sequences)
    found = PagedRun(load(tmp_path, "float32"), sequences).finish([1000])
    torch.testing.assert_close(found[0], expected[0], atol=5e-5, rtol=1e-5)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    original = save_random(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sequences = [tokens(30)]
    found = PagedRun(load(tmp_path), sequences).finish([1000])
    torch.testing.assert_close(found[0], oracle(original, sequences)[0], atol=5e-5, rtol=1e-5)


def test_rows_do_not_see_each_other(tmp_path: Path, backend: str) -> None:
    """A sequence whose KV became NaN spoils nobody in its batch."""
    save_random(tmp_path, "qwen2")
    model = load(tmp_path, backend=backend)
    sequences = [tokens(40), tokens(41), tokens(9)]
    run = PagedRun(model, sequences)
    run.step([(0, 30), (1, 30), (2, 8)])
    for layer in run.caches:
        for cache in layer:
            cache[run.table[1, :8].long()] = float("nan")
    run.step([(0, 1), (1, 1), (2, 1)])
    assert run.logits[1][-1].isnan().all()
    for row in (0, 2):
        assert run.logits[row][-1].isfinite().all()
