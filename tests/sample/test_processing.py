"""Bias, min_tokens and penalties: against a slow oracle, and at verify positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample.processing import process_logits
from paceline.sampling_params import SamplingParams

VOCAB = 24
STOPS = (2, 7, 2)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    bias = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3)
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.0])),
        min_tokens=draw(st.sampled_from([0, 0, 3, 8])),
        logit_bias=draw(bias) or None,
    )


def process(logits: np.ndarray, rows: list[int], positions: list[int], state) -> np.ndarray:
    tensor = torch.from_numpy(logits.astype(np.float32))
    process_logits(tensor, np.array(rows), np.array(positions), state)
    return tensor.numpy()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_verify_positions_equal_the_oracle_token_by_token(
    build_state, oracle_logits, data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(1, 4))
    params = [data.draw(sampling()) for _ in range(num_rows)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    histories = [rng.integers(0, VOCAB, 20).tolist() for _ in range(num_rows)]
    prompt_lens = [data.draw(st.integers(1, 8)) for _ in range(num_rows)]
    state = build_state(params, histories, prompt_lens, stop_token_ids=STOPS)
    entries = []
    for row in range(num_rows):
        first = prompt_lens[row] + data.draw(st.integers(0, 8))
        count = data.draw(st.integers(0, 4))
        entries += [(row, p) for p in range(first, min(first + count, 20))]
    if not entries:
        return
    order = rng.permutation(len(entries))
    entries = [entries[i] for i in order]
    logits = rng.normal(0, 3, (len(entries), VOCAB)).astype(np.float32)
    rows, positions = [r for r, _ in entries], [p for _, p in entries]
    got = process(logits, rows, positions, state)
    for i, (row, position) in enumerate(entries):
        expected = oracle_logits(
            logits[i], params[row], histories[row][:position], prompt_lens[row], STOPS
        )
        np.testing.assert_allclose(got[i], expected, rtol=1e-5, atol=1e-5)
        alone = process(logits[i : i + 1], [row], [position], state)
        assert (alone[0] == got[i]).all()  # bit for bit


def test_rows_without_features_are_not_touched(build_state) -> None:
    params = [SamplingParams(), SamplingParams(presence_penalty=1.0)]
    state = build_state(params, [[1, 2, 3]] * 2, [1, 1])
    logits = np.random.default_rng(0).normal(0, 1, (3, VOCAB)).astype(np.float32)
    got = process(logits, [0, 1, 0], [3, 3, 3], state)
    assert (got[[0, 2]] == logits[[0, 2]]).all()
    assert np.flatnonzero(got[1] != logits[1]).tolist() == [2, 3]


def test_penalties_count_drafts_before_the_position(build_state) -> None:
    """The mutant that counts only committed tokens, or all drafts, fails here."""
    state = build_state([SamplingParams(frequency_penalty=1.0)], [[9, 5, 6, 6, 5]], [1])
    got = process(np.zeros((4, VOCAB)), [0] * 4, [2, 3, 4, 5], state)
    assert got[:, 5].tolist() == [-1, -1, -1, -2]
    assert got[:, 6].tolist() == [0, -1, -2, -2]
    assert (got[:, 9] == 0).all()  # the prompt does not count


def test_repetition_counts_the_prompt(build_state) -> None:
    state = build_state([SamplingParams(repetition_penalty=2.0)], [[9, 9, 5]], [2])
    logits = np.full((2, VOCAB), -1.0)
    logits[1] = 4.0
    got = process(logits, [0, 0], [2, 3], state)
    assert got[0, 9] == -2.0
    assert got[0, 5] == -1.0
    assert got[1, 9] == 2.0
    assert got[1, 5] == 2.0
    assert got[1, 0] == 4.0


def test_the_prompt_of_the_next_sequence_in_a_row_is_read_anew(build_state) -> None:
    sampling_params = SamplingParams(repetition_penalty=2.0)
    state = build_state([sampling_params], [[9, 9, 9, 9]], [3])
    assert process(np.ones((1, VOCAB)), [0], [3], state)[0, 9] == 0.5
    state.history[0, :4] = 4
    state.set_row(0, sampling_params, 3, 0, 0, ())
    got = process(np.ones((1, VOCAB)), [0], [3], state)
    assert got[0, 9] == 1.0
    assert got[0, 4] == 0.5


def test_min_tokens_masks_stop_ids_until_enough_are_out(build_state) -> None:
    state = build_state([SamplingParams(min_tokens=2)], [[1, 1, 1, 1, 1]], [2], stop_token_ids=[3])
    got = process(np.zeros((3, VOCAB)), [0] * 3, [2, 3, 4], state)
    assert np.isneginf(got[:, 3]).tolist() == [True, True, False]
    assert np.isfinite(np.delete(got, 3, axis=1)).all()


def test_ids_beyond_a_smaller_vocabulary_are_left_out(build_state) -> None:
    """A drafter padded less than its target meets the target's ids."""
    params = SamplingParams(
        logit_bias={1: 2.0, 100: 5.0}, min_tokens=5, presence_penalty=1.0, repetition_penalty=1.5
    )
    state = build_state([params], [[99, 1, 98, 2]], [2], stop_token_ids=[101, 3])
    got = process(np.ones((1, VOCAB)), [0], [4], state)
    assert got[0, 1] == pytest.approx(2.0)
    assert got[0, 2] == pytest.approx(1 / 1.5 - 1)
    assert np.isneginf(got[0, 3])


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_extreme_parameters_do_not_overflow(build_state, value: float) -> None:
    params = SamplingParams(temperature=max(value, 1e-4), repetition_penalty=value)
    state = build_state([params], [[1, 2]], [1])
    got = process(np.ones((1, VOCAB)), [0], [2], state)
    assert not np.isnan(got).any()
