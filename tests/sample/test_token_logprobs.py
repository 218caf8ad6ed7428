"""Reported log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample import logprobs as logprobs_module
from paceline.sample.logprobs import token_logprobs


def oracle(logits: np.ndarray, token: int, count: int) -> tuple[list[int], list[float], int]:
    values = logits.astype(np.float64)
    normal = values - values.max()
    normal -= np.log(np.exp(normal).sum())
    top = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    ids = [token, *top]
    return ids, [float(normal[i]) for i in ids], 1 + int((values > values[token]).sum())


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 40),
    rows=st.integers(0, 5),
    count=st.integers(0, 8),
    step=st.sampled_from([0.0, 1.0, 4.0]),
    chunk=st.sampled_from([1, 50, 1 << 22]),
)
def test_against_sorting(seed, vocab, rows, count, step, chunk) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    tokens = rng.integers(0, vocab, rows)
    before = logits.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "_CHUNK", chunk)
        got = token_logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), count)
    assert (logits == before).all()
    assert got.ids.shape == got.logprobs.shape == (rows, 1 + min(count, vocab))
    assert (got.ids.dtype, got.logprobs.dtype, got.ranks.dtype) == (np.int32, np.float32, np.int32)
    for row in range(rows):
        ids, values, rank = oracle(logits[row], int(tokens[row]), count)
        assert got.ids[row].tolist() == ids
        np.testing.assert_allclose(got.logprobs[row], values, rtol=1e-5, atol=1e-5)
        assert got.ranks[row] == rank


def test_vocab_limit_leaves_padding_out() -> None:
    logits = torch.tensor([[1.0, 2.0, 90.0, 91.0]])
    got = token_logprobs(logits, torch.tensor([0]), 5, vocab_limit=2)
    assert got.ids.tolist() == [[0, 1, 0]]
    assert np.exp(got.logprobs[0, 1:]).sum() == pytest.approx(1.0)
    assert got.ranks.tolist() == [2]


def test_a_batch_equals_its_rows() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(6)
    together = token_logprobs(logits, tokens, 5)
    for row in range(6):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], 5)
        assert (alone.ids[0] == together.ids[row]).all()
        assert (alone.logprobs[0] == together.logprobs[row]).all()
