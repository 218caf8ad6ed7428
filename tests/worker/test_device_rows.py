"""Rows on the device as the host writes them, and the lookup over their histories."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.step import NewRow
from paceline.errors import RequestError
from paceline.sample.noise import row_key
from paceline.sampling_params import SamplingParams
from paceline.spec.ngram import find_continuation
from triton_kernels import DEVICE, load

device_rows = load("paceline.worker.device_rows")
device_ngram = load("paceline.worker.device_ngram")


def make_rows(count: int, length: int) -> device_rows.DeviceRows:
    return device_rows.DeviceRows(
        count,
        length,
        block_size=16,
        max_k=8,
        device=torch.device(DEVICE),
        max_stop_ids=3,
        max_biases=2,
    )


def new_row(row: int, tokens: list[int], **arguments: object) -> NewRow:
    values = {
        "prompt_len": len(tokens),
        "max_total_tokens": 1000,
        "sampling": SamplingParams(),
        "stop_token_ids": (),
        "seed": 3,
        "sample_index": 0,
        "block_ids": [1],
    } | arguments
    return NewRow(row, 1, np.array(tokens, np.int32), **values)


def test_what_a_row_holds() -> None:
    rows = make_rows(5, 40)
    sampling = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, min_tokens=3,
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.25,
        logit_bias={9: 1.5, 4: -2.0},
    )  # fmt: skip
    rows.allocate_counts(20)
    rows.enter(
        [
            new_row(3, [5, 6, 7, 8], prompt_len=2, sampling=sampling, stop_token_ids=(11, 12),
                    seed=-1, sample_index=2, block_ids=[4, 2], max_total_tokens=33),
            new_row(0, [1]),
        ]
    )  # fmt: skip
    integers = {"num_tokens": 4, "active": 1, "prompt_len": 2, "max_total": 33, "min_tokens": 3}
    for name, value in (integers | {"flags": 31, "top_k": 5}).items():
        assert int(rows.column(name)[3]) == value
    floats = {"temperature": 0.7, "top_p": 0.9, "log_min_p": np.log(0.1)}
    floats |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.25}
    for name, value in floats.items():
        assert float(rows.column(name)[3]) == pytest.approx(value, rel=1e-6)
    halves = [int(rows.column(name)[3]) & 0xFFFFFFFF for name in ("key_low", "key_high")]
    assert halves[0] | halves[1] << 32 == row_key(-1, 2)
    assert rows.history[3, :4].tolist() == [5, 6, 7, 8]
    assert rows.stop_ids[3].tolist() == [11, 12, -1, -1]
    assert rows.bias_ids[3].tolist() == [4, 9]
    assert rows.bias_values[3].tolist() == [-2.0, 1.5]
    assert rows.block_table[3].tolist() == [4, 2, 0, 0]
    assert rows.counts[3, 7:9].tolist() == [1, 1]
    assert int(rows.column("active").sum()) == 2
    assert rows.num_bytes > rows.counts.numel() * 4


def test_counts_are_there_while_a_row_has_penalties() -> None:
    rows = make_rows(4, 40)
    rows.allocate_counts(20)
    penalised = SamplingParams(presence_penalty=0.5)
    rows.enter([new_row(0, [1]), new_row(1, [2, 3], prompt_len=1, sampling=penalised)])
    assert rows.counts[1, 3] == 1
    rows.enter([new_row(2, [1], sampling=penalised), new_row(1, [4])])  # row 1 changed hands
    assert rows.counts is not None
    rows.deactivate([2, 0])
    assert rows.counts is None
    rows.enter([new_row(2, [4, 5, 5], prompt_len=1, sampling=penalised)])
    assert rows.counts[2, 4:6].tolist() == [1 << 30, 2]


def test_a_row_keeps_nothing_of_its_last_owner() -> None:
    rows = make_rows(2, 40)
    rows.enter([new_row(1, [5, 6], stop_token_ids=(7, 8, 9), block_ids=[3, 4, 5])])
    rows.set_blocks(np.array([1, 1]), np.array([2, 3]), np.array([8, 9]))
    assert rows.block_table[1].tolist() == [3, 4, 8, 9]
    rows.deactivate([1])
    assert not rows.column("active").any()
    rows.enter([new_row(1, [2], stop_token_ids=(4,))])
    assert rows.stop_ids[1].tolist() == [4, -1, -1, -1]
    assert rows.block_table[1].tolist() == [1, 0, 0, 0]
    assert int(rows.column("flags")[1]) == 1
    rows.deactivate([])
    rows.enter([])
    rows.set_blocks(*(np.zeros(0, np.int32) for _ in range(3)))


def test_too_many_stop_ids_or_biases() -> None:
    rows = make_rows(2, 40)
    with pytest.raises(RequestError, match="5 stop token ids, but a row on the device holds 4"):
        rows.enter([new_row(0, [1], stop_token_ids=(1, 2, 3, 4, 5))])
    sampling = SamplingParams(logit_bias={1: 1, 2: 1, 3: 1})
    with pytest.raises(RequestError, match="3 logit_bias entries, but a row on the device holds 2"):
        rows.enter([new_row(0, [1], sampling=sampling)])
    assert not rows.column("active").any()


# ---- prompt lookup -------------------------------------------------------------------------------


def look_up(
    histories: list[np.ndarray], wanted: list[int], lookup_max: int, lookup_min: int, room: int = 99
) -> list[list[int]]:
    rows = make_rows(len(histories), max(len(h) for h in histories) + 10)
    rows.enter(
        [new_row(i, h.tolist(), max_total_tokens=len(h) + room) for i, h in enumerate(histories)]
    )
    order = torch.arange(len(histories) + 1, dtype=torch.int32, device=DEVICE)
    num_drafts = torch.tensor([*wanted, 3], dtype=torch.int32, device=DEVICE)
    before = rows.history.clone()
    device_ngram.lookup_drafts(
        order, num_drafts, num_drafts, rows, max_k=8, lookup_max=lookup_max, lookup_min=lookup_min
    )
    assert int(num_drafts[-1]) == 0  # the null row
    result = []
    for i, h in enumerate(histories):
        count = int(num_drafts[i])
        result.append(rows.history[i, len(h) : len(h) + count].tolist())
        before[i, len(h) : len(h) + count] = rows.history[i, len(h) : len(h) + count]
    assert torch.equal(rows.history, before)
    return result


@settings(max_examples=60, deadline=None)
@given(
    histories=st.lists(
        st.integers(1, 4).flatmap(
            lambda top: st.lists(st.integers(0, top), min_size=1, max_size=60)
        ),
        min_size=1,
        max_size=3,
    ),
    k=st.integers(0, 8),
    lookup_min=st.integers(1, 4),
    extra=st.integers(0, 4),
    room=st.integers(1, 12),
)
def test_lookup_equals_the_host(histories, k: int, lookup_min: int, extra: int, room: int) -> None:
    arrays = [np.array(h, np.int32) for h in histories]
    found = look_up(arrays, [k] * len(arrays), lookup_min + extra, lookup_min, room)
    wanted = min(k, room - 1)
    expected = [find_continuation(h, wanted, lookup_min + extra, lookup_min) for h in arrays]
    assert found == [x.tolist() for x in expected]


@pytest.mark.parametrize("vocab", [2, 50, 100_000])
def test_lookup_in_a_long_history(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    history = rng.integers(0, vocab, 6000).astype(np.int32)
    history[-4:] = history[4090:4094]  # across a border of the kernel's blocks
    found = look_up([history, history[:777]], [5, 8], 5, 2)
    expected = [find_continuation(history, 5, 5, 2), find_continuation(history[:777], 8, 5, 2)]
    assert found == [x.tolist() for x in expected]


def test_inactive_rows_look_for_nothing() -> None:
    rows = make_rows(1, 40)
    rows.enter([new_row(0, [1, 2, 1, 2, 1])])
    rows.deactivate([0])
    num_drafts = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    order = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    device_ngram.lookup_drafts(
        order, num_drafts, num_drafts, rows, max_k=8, lookup_max=3, lookup_min=1
    )
    assert int(num_drafts[0]) == 0
