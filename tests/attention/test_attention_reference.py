"""The oracle itself against dense attention written out with one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.attention.reference import ReferenceAttention


@pytest.mark.parametrize("window", [None, 4])
def test_equals_dense_attention(random_pass: Callable[..., Any], window: int | None) -> None:
    made = random_pass([(9, 0)], heads=4, kv_heads=2, window=window)
    length = 9
    k = made.key.double().repeat_interleave(2, dim=1)
    v = made.value.double().repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", made.query.double(), k) * 16**-0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v)
    found = made.run(ReferenceAttention())
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_chunks_equal_one_pass(random_pass: Callable[..., Any]) -> None:
    """The last token sees the same whether its prefix was computed now or before."""
    made = random_pass([(6, 0)])
    whole = made.run(ReferenceAttention())
    caches = (made.key_cache.clone(), made.value_cache.clone())
    for cache, new in zip(caches, (made.key, made.value), strict=True):
        cache.flatten(0, 1)[made.metadata.slot_mapping[:5]] = new[:5]
    made.key_cache, made.value_cache = caches
    made.query, made.key, made.value = made.query[5:], made.key[5:], made.value[5:]
    made.metadata.slot_mapping = made.metadata.slot_mapping[5:]
    made.metadata.query_lens = [1]
    torch.testing.assert_close(made.run(ReferenceAttention()), whole[5:])
