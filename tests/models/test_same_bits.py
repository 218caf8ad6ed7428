"""On a CPU with packed weights a token's logits are the same bits however it is computed.

Speculation, batching, chunking and recomputation then cannot change a text, in bfloat16 either. The
kernels below decide that, so it is tested where it was found to hold: x86 with AVX-512, and for
bfloat16 without AMX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import PagedRun, load, save_random

from paceline.ops import cpu_linear

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-groups-of-3": ("qwen3", {"head_dim": 16, "num_attention_heads": 9}),
    "mistral-window": ("mistral", {"sliding_window": 70}),
}
WAYS = {"verify": [6, 1, 3], "chunks": [33, 90], "one pass": [1000]}


def skip_reason(dtype: str) -> str | None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "tried on AVX-512 only"
    if dtype == "bfloat16" and torch.cpu._is_amx_tile_supported():
        return "bfloat16 was not tried with AMX"
    if not cpu_linear.can_pack(getattr(torch, dtype), torch.device("cpu")):
        return "this CPU has no packed layout"
    return None


@pytest.fixture(scope="module", params=list(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    family, changes = MODELS[request.param]
    save_random(directory, family, **{"num_key_value_heads": 3, "num_hidden_layers": 2, **changes})
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_together_decoded_verified_prefilled(path: Path, dtype: str, backend: str) -> None:
    if reason := skip_reason(dtype):
        pytest.skip(reason)
    model = load(path, dtype, backend)
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(0, 96, (length,), generator=generator).tolist() for length in (225, 90, 7)
    ]
    alone = [PagedRun(model, [sequence]).finish([1])[0] for sequence in sequences]
    for name, lens in {"decode together": [1], **WAYS}.items():
        together = PagedRun(model, sequences).finish(lens)
        for ours, expected in zip(together, alone, strict=True):
            assert torch.equal(ours, expected), name
