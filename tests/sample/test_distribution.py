"""What comes out follows the exact distribution; and where naive noise does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.sample.noise import (
    finish_hash,
    hash_rounds,
    neg_log_exponential,
    noise_key,
    split_keys,
    to_signed,
    token_mix,
)
from paceline.sample.sampler import Sampler
from paceline.sampling_params import SamplingParams

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2}
CASES = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "truncations": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "penalties": PENALTIES,
    "bias": {"logit_bias": {0: 1.5, 5: -2.0}},
    "min_tokens": {"min_tokens": 10},
    "everything": {
        "temperature": 0.8,
        "top_k": 7,
        "top_p": 0.95,
        "min_p": 0.01,
        "min_tokens": 10,
        "logit_bias": {0: 1.5, 5: -2.0},
        **PENALTIES,
    },
}
CONTEXT = [3, 1, 4, 1, 5, 2, 6]
STOPS = (7,)
DRAWS = 12_000


@pytest.mark.parametrize("vocab", [5, 12])
@pytest.mark.parametrize("name", CASES)
def test_exact_distribution_over_seeds(
    build_state, oracle_logits, oracle_probs, chi_square_z, name: str, vocab: int
) -> None:
    """One position of many requests: noise is independent from seed to seed."""
    values = dict(CASES[name])
    stops = tuple(t for t in STOPS if t < vocab)
    if "logit_bias" in values:
        values["logit_bias"] = {t: b for t, b in values["logit_bias"].items() if t < vocab}
    params = SamplingParams(**values)
    context = [t % vocab for t in CONTEXT]
    logits = np.random.default_rng(vocab).normal(0, 1.2, vocab).astype(np.float32)
    expected = oracle_probs(oracle_logits(logits, params, context, 3, stops), params)
    counts = np.zeros(vocab, np.int64)
    sampler = Sampler()
    many = build_state([params] * 500, [context] * 500, [3] * 500, stop_token_ids=stops)
    rows, positions = np.arange(500), np.full(500, len(context))
    for batch in range(DRAWS // 500):
        many.row_keys[:] = [noise_key(batch, 0, i) for i in range(500)]
        tokens = sampler.sample(torch.from_numpy(logits).repeat(500, 1), rows, positions, many)
        counts += np.bincount(tokens.numpy(), minlength=vocab)
    assert abs(chi_square_z(counts, expected)) < 4


@pytest.mark.parametrize("name", ["plain", "cold", "truncations"])
def test_exact_distribution_over_positions(
    build_state, oracle_probs, chi_square_z, name: str
) -> None:
    """One request of many positions; successive pairs are independent too."""
    params = SamplingParams(**CASES[name])
    state = build_state([params], [[0]], [1], seeds=[42])
    logits = np.random.default_rng(3).normal(0, 1.2, 6).astype(np.float32)
    tokens = (
        Sampler()
        .sample(
            torch.from_numpy(logits).repeat(DRAWS, 1),
            np.zeros(DRAWS, int),
            np.arange(1, DRAWS + 1),
            state,
        )
        .numpy()
    )
    expected = oracle_probs(logits, params)
    assert abs(chi_square_z(np.bincount(tokens, minlength=6), expected)) < 4
    pairs = np.bincount(tokens[0::2] * 6 + tokens[1::2], minlength=36)
    assert abs(chi_square_z(pairs, np.outer(expected, expected).ravel())) < 4


def test_a_large_vocabulary_keeps_its_tail(build_state) -> None:
    """The mass of 150,000 rare tokens together is drawn as often as it should be."""
    vocab, draws = 150_000, 1500
    logits = torch.zeros(1, vocab)
    logits[0, 77] = 12.0
    tail = (vocab - 1) / (vocab - 1 + math.exp(12.0))
    state = build_state([SamplingParams()], [[0]], [1], seeds=[7])
    sampler = Sampler()
    tokens = [
        int(sampler.sample(logits.clone(), np.array([0]), np.array([p]), state))
        for p in range(1, draws + 1)
    ]
    outside = np.array([t for t in tokens if t != 77])
    deviation = (len(outside) - draws * tail) / math.sqrt(draws * tail * (1 - tail))
    assert abs(deviation) < 4
    assert len(set(outside.tolist())) > 0.98 * len(outside)
    assert outside.mean() == pytest.approx(vocab / 2, rel=0.15)


def _naive_is_infinite(hashes: np.ndarray) -> np.ndarray:
    """Which tokens the usual -log(-log u) makes infinite, u a float32 of 24 random bits."""
    u = ((hashes >> np.uint32(8)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    return torch.isposinf(-torch.log(-torch.log(torch.from_numpy(u)))).numpy()


def test_naive_noise_is_infinite_where_ours_is_largest_or_smallest() -> None:
    extremes = np.array([0, -1, -2, -128, -129, 1 << 20], np.int32).view(np.uint32)
    assert _naive_is_infinite(extremes).tolist() == [False, True, True, True, True, False]


@pytest.mark.slow
def test_a_dominant_token_wins_at_full_size(build_state) -> None:
    """3 * 10^4 draws from 150,000 tokens of which one has all but 10^-8 of the mass.

    Others may come up with probability 0.0004 in all draws together. Naive noise lets them win
    whenever it rounds to infinity, once in 2^24 tokens.
    """
    vocab, draws, dominant = 150_000, 30_000, 1234
    logits = torch.zeros(1, vocab)
    logits[0, dominant] = 30.0
    mix = token_mix(vocab)
    wrong = naive_wrong = 0
    state = build_state([SamplingParams()], [[0]], [1], seeds=[11])
    sampler = Sampler()
    for position in range(draws):
        key = torch.tensor([to_signed(noise_key(11, 0, position))])
        scores = logits + neg_log_exponential(key, vocab, mix)
        token = int(scores.argmax())
        wrong += token != dominant
        sampled = sampler.sample(logits.clone(), np.array([0]), np.array([position + 1]), state)
        assert int(sampled) == token
        low, high = split_keys(key)
        hashes = finish_hash(hash_rounds(low[:, None], high[:, None], mix))
        values = hashes[0].numpy().view(np.uint32)
        # The highest of them decide; logarithms of all would take most of the test's time.
        highest = np.flatnonzero(values > np.uint32(0xFFF00000))
        infinite = highest[_naive_is_infinite(values[highest])]
        naive_wrong += bool((infinite != dominant).any())
    assert wrong == 0
    assert naive_wrong >= 200
