"""Bit masks on logits: every bit means its id, whatever the width of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.sample.processing import mask_disallowed


@pytest.mark.parametrize("vocab", [37, 64, 4103])
def test_each_bit_is_one_id(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((5, vocab)).astype(np.float32))
    before = logits.clone()
    # A word more than the vocabulary needs, as a wider model's masks have for its drafter.
    words = rng.integers(-(2**31), 2**31, (2, -(-vocab // 32) + 1)).astype(np.int32)
    mask_disallowed(logits, np.array([3, 1]), words)
    for place, index in enumerate((3, 1)):
        allowed = [bool(int(words[place, i // 32]) >> (i % 32) & 1) for i in range(vocab)]
        expected = before[index].masked_fill(~torch.tensor(allowed), -torch.inf)
        assert torch.equal(logits[index], expected)
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])


def test_no_masks_change_nothing() -> None:
    logits = torch.ones(2, 40)
    mask_disallowed(logits, np.zeros(0, np.int64), np.zeros((0, 2), np.int32))
    assert torch.equal(logits, torch.ones(2, 40))
