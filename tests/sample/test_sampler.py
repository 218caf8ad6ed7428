"""The sampler: fast paths, masks, bad rows, company, and verification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample import choose
from paceline.sample.sampler import Sampler, nonfinite_rows
from paceline.sampling_params import SamplingParams

FEATURES = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.4),
    "sampled": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "top_p": SamplingParams(top_p=0.8),
    "top_k": SamplingParams(top_k=3, temperature=1.5),
    "min_p": SamplingParams(min_p=0.2),
    "bias": SamplingParams(logit_bias={3: 2.0, 4: -100}),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        min_tokens=4,
        logit_bias={1: 1.0},
    ),
}
ALL = list(FEATURES.values())


def random_logits(count: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_takes_the_lowest_id_of_ties(build_state) -> None:
    state = build_state([SamplingParams(temperature=0.0)], [[0]], [1])
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [7.0, 7.0, 0.0, 7.0]])
    tokens = Sampler().sample(logits, np.array([0, 0]), np.array([1, 2]), state)
    assert tokens.tolist() == [1, 0]
    assert tokens.dtype == torch.int64
    large = torch.zeros(3, 150_000)
    large[1, 77_777:] = 1.0
    large[2, [149_999, 40_001]] = 2.0
    tokens = Sampler().sample(large, np.array([0, 0, 0]), np.array([1, 1, 1]), state)
    assert tokens.tolist() == [0, 77_777, 40_001]


def test_greedy_batch_calls_nothing_but_argmax(build_state, monkeypatch) -> None:
    state = build_state([SamplingParams(temperature=0.0)] * 3, [[0]] * 3, [1] * 3)
    for name in ("process_logits", "choose_pruned", "choose_full", "noise_keys", "token_mix"):
        monkeypatch.setattr(f"paceline.sample.sampler.{name}", None)
    logits = random_logits(3, 50)
    tokens = Sampler(vocab_limit=40).sample(logits.clone(), np.arange(3), np.ones(3, int), state)
    assert tokens.tolist() == logits[:, :40].argmax(1).tolist()


def test_cleared_row_is_greedy(build_state) -> None:
    state = build_state([FEATURES["everything"]], [[1, 2]], [1])
    state.clear_row(0)
    logits = random_logits(1, 50)
    assert Sampler().sample(logits.clone(), np.array([0]), np.array([2]), state).tolist() == [
        int(logits.argmax())
    ]


def test_a_temperature_near_zero_is_greedy(build_state) -> None:
    params = [SamplingParams(temperature=t, top_k=2) for t in (0.0, 9e-6, 1.1e-5)]
    state = build_state(params, [[0]] * 3, [1] * 3)
    assert (state.flags[:2] == 0).all()
    logits = random_logits(3, 1000)
    tokens = Sampler().sample(logits.clone(), np.arange(3), np.ones(3, int), state)
    assert torch.equal(tokens, logits.argmax(1))


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("name", FEATURES)
def test_vocab_limit_masks_padding(build_state, name: str, prune: bool) -> None:
    state = build_state([FEATURES[name]], [[1, 2, 3]], [1])
    sampler = Sampler(vocab_limit=10, prune=prune)
    logits = random_logits(200, 16)
    logits[:, 10:] += 50.0
    logits[3, 12] = torch.nan
    tokens = sampler.sample(logits, np.zeros(200, int), np.full(200, 3), state)
    assert int(tokens.max()) < 10


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("vocab", [40, 40_000])
def test_bad_rows_are_seen_and_harm_nobody(build_state, vocab: int, prune: bool) -> None:
    params = [p for p in ALL for _ in range(4)]
    state = build_state(params, [[1, 2, 3]] * len(params), [1] * len(params), stop_token_ids=[5])
    logits = random_logits(len(params), vocab)
    rows, positions = np.arange(len(params)), np.full(len(params), 3)
    good = Sampler(prune=prune).sample(logits.clone(), rows, positions, state)
    broken = logits.clone()
    broken[0::4, 3] = torch.nan
    broken[1::4, 7] = torch.inf
    broken[2::4] = -torch.inf
    assert nonfinite_rows(broken).tolist() == [True, True, True, False] * len(ALL)
    assert not nonfinite_rows(logits).any()
    tokens = Sampler(prune=prune).sample(broken, rows, positions, state)
    assert torch.equal(tokens[3::4], good[3::4])
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_a_row_may_have_minus_infinity(build_state) -> None:
    logits = torch.full((len(ALL), 50), -torch.inf)
    logits[:, 13] = -3.0
    assert not nonfinite_rows(logits).any()
    state = build_state(ALL, [[1, 2]] * len(ALL), [1] * len(ALL))
    tokens = Sampler().sample(logits, np.arange(len(ALL)), np.full(len(ALL), 2), state)
    assert tokens.tolist() == [13] * len(ALL)


def test_no_rows(build_state) -> None:
    state = build_state(ALL, [[1]] * len(ALL), [1] * len(ALL))
    none = np.zeros(0, np.int64)
    assert Sampler().sample(torch.zeros(0, 9), none, none, state).shape == (0,)
    assert nonfinite_rows(torch.zeros(0, 9)).shape == (0,)


def test_tensors_and_arrays_are_taken_alike(build_state) -> None:
    state = build_state(ALL, [[1, 2]] * len(ALL), [1] * len(ALL))
    rows, positions = np.arange(len(ALL), dtype=np.int32), np.full(len(ALL), 2, np.int32)
    logits = random_logits(len(ALL), 50)
    arrays = Sampler().sample(logits.clone(), rows, positions, state)
    tensors = Sampler().sample(
        logits.clone(), torch.from_numpy(rows), torch.from_numpy(positions), state
    )
    assert torch.equal(arrays, tensors)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([2, 30, 700]),
    k=st.integers(0, 5),
    chunk=st.sampled_from([1, 64, 1 << 18]),
)
def test_verify_positions_equal_one_at_a_time(
    build_state, seed: int, vocab: int, k: int, chunk: int
) -> None:
    """One call over shuffled rows and positions gives what single calls in any company give."""
    rng = np.random.default_rng(seed)
    params = [ALL[i] for i in rng.integers(0, len(ALL), 6)]
    if vocab < 8:
        params = [p for p in params if not (p.logit_bias or p.min_tokens)] or [FEATURES["sampled"]]
    count = len(params)
    histories = [rng.integers(0, vocab, 40).tolist() for _ in range(count)]
    prompts = rng.integers(1, 10, count).tolist()
    state = build_state(params, histories, prompts, stop_token_ids=[1])
    rows = np.repeat(np.arange(count), k + 1)
    positions = np.repeat(np.array(prompts) + rng.integers(0, 20, count), k + 1)
    positions = positions + np.tile(np.arange(k + 1), count)
    logits = random_logits(len(rows), vocab, seed=seed % 1000)
    order = rng.permutation(len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_CHUNK", chunk)
        together = Sampler().sample(logits[order].clone(), rows[order], positions[order], state)
    for slot, i in enumerate(order):
        alone = Sampler().sample(
            logits[i : i + 1].clone(), rows[i : i + 1], positions[i : i + 1], state
        )
        assert int(alone) == int(together[slot])


def test_noise_belongs_to_the_output_position(build_state) -> None:
    """Position off by one, or counted from the start of the prompt, fails here."""
    state = build_state([SamplingParams()] * 2, [[0] * 40, [0] * 40], [4, 20], seeds=[5, 5])
    logits = random_logits(1, 500, scale=0.1).expand(16, 500)
    rows, steps = np.zeros(16, int), np.arange(16)
    short = Sampler().sample(logits.clone(), rows, 4 + steps, state)
    long = Sampler().sample(logits.clone(), rows + 1, 20 + steps, state)
    assert torch.equal(short, long)
    assert len(set(short.tolist())) > 10
    shifted = Sampler().sample(logits.clone(), rows, 5 + steps, state)
    assert torch.equal(shifted[:-1], short[1:])


def test_seeds_and_samples_differ(build_state) -> None:
    state = build_state([SamplingParams()] * 3, [[0] * 9] * 3, [1] * 3, seeds=[1, 2, 1])
    state.set_row(2, SamplingParams(), 1, 1, 1, ())
    logits = random_logits(1, 5000, scale=0.1).expand(24, 5000)
    rows, positions = np.repeat(np.arange(3), 8), np.tile(np.arange(1, 9), 3)
    tokens = Sampler().sample(logits.clone(), rows, positions, state).view(3, 8)
    assert (tokens[0] != tokens[1]).sum() >= 7
    assert (tokens[0] != tokens[2]).sum() >= 7


def test_truncate_false_leaves_only_truncation_out(build_state) -> None:
    base = {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {2: 1.0}}
    cut = SamplingParams(top_k=2, top_p=0.5, min_p=0.3, **base)
    state = build_state([cut, SamplingParams(**base)], [[1, 2]] * 2, [1] * 2, seeds=[3, 3])
    logits = random_logits(1, 100, scale=1.0).expand(300, 100)
    rows, positions = np.zeros(300, int), np.arange(2, 302) % 20 + 2
    kept = Sampler().sample(logits.clone(), rows, positions, state, truncate=False)
    plain = Sampler().sample(logits.clone(), rows + 1, positions, state)
    assert torch.equal(kept, plain)
    truncated = Sampler().sample(logits.clone(), rows, positions, state)
    assert len(set(truncated.tolist())) <= 2 < len(set(kept.tolist()))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 2, 17, 300, 5000, 33_000]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 100.0]),
    temperature=st.sampled_from([1.1e-5, 1e-3, 0.2, 0.7, 1.0, 5.0, 1e4]),
    step=st.sampled_from([0.0, 0.5]),
    masked=st.booleans(),
    top_k=st.sampled_from([0, 0, 1, 5, 400]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
)
def test_pruning_changes_no_id(
    build_state, seed, vocab, scale, temperature, step, masked, top_k, top_p, min_p
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    state = build_state([params], [[0]], [1], seeds=[seed])
    count = 4 if vocab > 1000 else 30
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, scale, (count, vocab))
    if step:
        logits = np.round(logits / step) * step
    if masked:
        logits[rng.random((count, vocab)) < 0.4] = -np.inf
        logits[:, 0] = 0.0
    tensor = torch.from_numpy(logits.astype(np.float32))
    rows, positions = np.zeros(count, int), np.arange(1, count + 1)
    pruned = Sampler().sample(tensor.clone(), rows, positions, state)
    full = Sampler(prune=False).sample(tensor.clone(), rows, positions, state)
    assert torch.equal(pruned, full)


@pytest.mark.parametrize("peak", [None, 0.0, 5.0, 12.0, 25.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_pruning_changes_no_id_at_full_size(build_state, peak, temperature: float) -> None:
    vocab = 151_936
    state = build_state([SamplingParams(temperature=temperature)], [[0]], [1])
    logits = random_logits(8, vocab, scale=2.5)
    if peak is not None:
        logits[:, 1234] = peak
    rows, positions = np.zeros(8, int), np.arange(1, 9)
    pruned = Sampler().sample(logits.clone(), rows, positions, state)
    full = Sampler(prune=False).sample(logits.clone(), rows, positions, state)
    assert torch.equal(pruned, full)


def test_equal_scores_go_to_the_lowest_id() -> None:
    owners = np.array([0, 0, 0, 2, 2, 3])
    ids = np.array([4, 6, 9, 1, 2, 5])
    scores = np.array([1.0, 3.0, 3.0, 2.0, 2.0, -np.inf], np.float32)
    result = np.array([0, 77, 0, 0])
    choose._take_best(owners, ids, scores, result)
    assert result.tolist() == [6, 77, 1, 5]  # owner 1 has no candidate and keeps what it had
    single = np.array([0])
    choose._take_best(owners[:3] * 0, ids[:3], scores[:3], single)
    assert single.tolist() == [6]
