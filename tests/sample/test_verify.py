"""Acceptance counting."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sample.verify import count_accepted


def test_leading_matches_only() -> None:
    sampled = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3]] * 4)
    accepted = count_accepted(sampled, drafts, torch.tensor([3, 3, 3, 1]))
    assert accepted.tolist() == [3, 1, 0, 1]
    assert accepted.dtype == torch.int64


def test_no_drafts() -> None:
    none = count_accepted(
        torch.tensor([[5], [6]]), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0])
    )
    assert none.tolist() == [0, 0]
    padded = count_accepted(torch.tensor([[7, 7]]), torch.tensor([[7]]), torch.tensor([0]))
    assert padded.tolist() == [0]


@given(st.data(), st.integers(1, 4), st.integers(0, 6))
def test_against_a_loop(data: st.DataObject, batch: int, k: int) -> None:
    token = st.integers(0, 2)
    sampled = [data.draw(st.lists(token, min_size=k + 1, max_size=k + 1)) for _ in range(batch)]
    drafts = [data.draw(st.lists(token, min_size=k, max_size=k)) for _ in range(batch)]
    num = [data.draw(st.integers(0, k)) for _ in range(batch)]
    expected = []
    for row in range(batch):
        count = 0
        while count < num[row] and sampled[row][count] == drafts[row][count]:
            count += 1
        expected.append(count)
    drafts_tensor = torch.tensor(drafts, dtype=torch.int32).view(batch, k)
    got = count_accepted(torch.tensor(sampled), drafts_tensor, torch.tensor(num, dtype=torch.int32))
    assert got.tolist() == expected
