"""The noise: what it is a function of, and that it is noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sample.noise import (
    COARSE_BITS,
    COARSE_NOISE,
    MAX_NOISE,
    MIN_NOISE,
    finish_hash,
    hash_rounds,
    hash_rounds_host,
    hash_to_noise,
    hash_to_uniform,
    neg_log_exponential,
    noise_at,
    noise_key,
    noise_keys,
    row_key,
    split_keys,
    to_signed,
    token_mix,
)

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
PINNED_KEY = 1520524730833486035
PINNED_HASHES = [1781207251, 4218231549, 2028771819, 2265347625]
INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix(state: int) -> int:
    value = state & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def lowbias32(value: int) -> int:
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & MASK32
    value = ((value ^ (value >> 15)) * 0x846CA68B) & MASK32
    return value ^ (value >> 16)


def plain_hash(key: int, token: int) -> int:
    """The hash in unbounded Python integers."""
    low, high = key & MASK32, (key >> 32) | 1
    return lowbias32(((lowbias32(token) ^ low) * high) & MASK32)


def hashes(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    low, high = split_keys(keys)
    return finish_hash(hash_rounds(low[:, None], high[:, None], token_mix(vocab)))


def uniforms(seeds: list[int], indices: list[int], positions: list[int], vocab: int) -> np.ndarray:
    """w of every combination of one varying argument, [M, vocab]."""
    keys = [
        to_signed(noise_key(s, i, p)) for s, i, p in zip(seeds, indices, positions, strict=True)
    ]
    return hash_to_uniform(hashes(torch.tensor(keys), vocab)).numpy().astype(np.float64)


@given(INT64, st.integers(0, 16384), st.integers(0, 2**31), st.integers(0, 2**20))
def test_the_chain_is_as_documented(seed: int, index: int, position: int, token: int) -> None:
    gamma = 0x9E3779B97F4A7C15
    row = splitmix(splitmix(seed + gamma) + (index + 1) * gamma)
    key = splitmix(row + (position + 1) * gamma)
    assert row_key(seed, index) == row
    assert noise_key(seed, index, position) == key
    vector = noise_keys(np.array([row], np.uint64), np.array([position]))
    assert vector.dtype == np.int64
    assert int(vector[0]) == to_signed(key)
    keys = torch.from_numpy(vector)
    mix = token_mix(token + 1)[-1:]
    low, high = split_keys(keys)
    rounds = hash_rounds(low, high, mix)
    host = hash_rounds_host(*(t.numpy().view(np.uint32) for t in (low, high, mix)))
    assert (host.view(np.int32) == rounds.numpy()).all()
    assert int(finish_hash(rounds).item()) & MASK32 == plain_hash(key, token)


def test_known_values() -> None:
    """Pinned, so that a seed gives the same text in every release."""
    assert noise_key(0, 0, 0) == splitmix(row_key(0, 0) + 0x9E3779B97F4A7C15)
    keys = torch.tensor([to_signed(noise_key(1234, 1, 5))])
    expected = [plain_hash(noise_key(1234, 1, 5), token) for token in range(4)]
    assert [h & MASK32 for h in hashes(keys, 4)[0].tolist()] == expected
    assert noise_key(1234, 1, 5) == PINNED_KEY
    assert expected == PINNED_HASHES


@pytest.mark.parametrize("value", [0, 1, 2, (1 << 31) - 1, 1 << 31, MASK32 - 127, MASK32])
def test_uniform_stays_inside_and_noise_is_finite(value: int) -> None:
    h = torch.tensor([value - (1 << 32) if value >> 31 else value], dtype=torch.int32)
    w = hash_to_uniform(h).double().item()
    assert 0.0 < w < 1.0
    assert w == pytest.approx(min((value + 0.5) / 2**32, 1 - 2**-24), rel=2**-23)
    noise = hash_to_noise(h).item()
    assert MIN_NOISE <= noise <= MAX_NOISE
    # float32 has steps of 2^-24 near w = 1, which is where the noise is smallest
    assert noise == pytest.approx(-math.log(-math.log1p(-w)), rel=1e-5, abs=1e-6)


def test_coarse_bits_bound_the_noise() -> None:
    border = 1 << (32 - COARSE_BITS)
    noise = hash_to_noise(torch.tensor([border - 1, border, border + 1], dtype=torch.int32))
    assert (noise < COARSE_NOISE).all()
    assert hash_to_noise(torch.tensor([border // 2], dtype=torch.int32)).item() > COARSE_NOISE


def test_noise_falls_as_the_hash_rises() -> None:
    unsigned = np.sort(np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64))
    noise = hash_to_noise(torch.from_numpy(unsigned.astype(np.uint32).view(np.int32)))
    assert noise.isfinite().all()
    assert (noise.diff() <= 0).all()


def test_same_arguments_same_noise_whatever_the_company() -> None:
    keys = torch.tensor([to_signed(noise_key(9, 0, p)) for p in range(7)])
    together = neg_log_exponential(keys, 1000)
    mix = token_mix(1000)
    for i in range(7):
        alone = neg_log_exponential(keys[i : i + 1], 1000)
        assert torch.equal(alone[0], together[i])
        few = neg_log_exponential(keys[i : i + 1], 13, mix)
        assert torch.equal(few[0], together[i, :13])
    picked = torch.tensor([0, 999, 500, 1, 2, 3, 4])
    assert torch.equal(noise_at(keys, mix[picked]), together[torch.arange(7), picked])


def test_each_argument_changes_the_noise() -> None:
    base = (5, 0, 10)
    keys = {noise_key(*base)}
    for other in [(6, 0, 10), (5, 1, 10), (5, 0, 11), (-5, 0, 10), (10, 0, 5), (0, 5, 10)]:
        keys.add(noise_key(*other))
    assert len(keys) == 7
    all_keys = {noise_key(s, i, p) for s in range(20) for i in range(20) for p in range(50)}
    assert len(all_keys) == 20 * 20 * 50


N = 20_000
VARIATIONS = {
    "token": ([3], [0], [0], N),
    "position": ([3] * N, [0] * N, list(range(N)), 1),
    "seed": (list(range(N)), [0] * N, [4] * N, 1),
    "large seed": ([i << 40 for i in range(N)], [0] * N, [4] * N, 1),
    "sample_index": ([3] * N, list(range(N)), [4] * N, 1),
    "late position": ([77] * N, [2] * N, [100_000 + i for i in range(N)], 1),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_uniform_along_each_argument(name: str, chi_square_z) -> None:
    w = uniforms(*VARIATIONS[name]).ravel()
    assert len(w) == N
    for cells in (16, 256):
        counts = np.bincount((w * cells).astype(int), minlength=cells)
        assert abs(chi_square_z(counts, np.full(cells, 1 / cells))) < 4
    low_bits = np.bincount((w * 2**20).astype(np.int64) & 15, minlength=16)
    assert abs(chi_square_z(low_bits, np.full(16, 1 / 16))) < 4
    # Pairs of neighbours fill the square evenly.
    pairs = (w[:-1] * 16).astype(int) * 16 + (w[1:] * 16).astype(int)
    counts = np.bincount(pairs[::2], minlength=256)
    assert abs(chi_square_z(counts, np.full(256, 1 / 256))) < 4


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 4096])
@pytest.mark.parametrize("name", VARIATIONS)
def test_uncorrelated_along_each_argument(name: str, lag: int) -> None:
    w = uniforms(*VARIATIONS[name]).ravel()
    correlation = np.corrcoef(w[:-lag], w[lag:])[0, 1]
    assert abs(correlation) * math.sqrt(N - lag) < 4.5


@pytest.mark.parametrize(
    "other",
    [
        (3, 0, 1),
        (4, 0, 0),
        (3, 1, 0),
        (2, 0, 0),
        (3 + (1 << 32), 0, 0),
        (3, 0, 1 << 16),
        (3, 256, 0),
    ],
)
def test_streams_are_uncorrelated(other: tuple[int, int, int]) -> None:
    """Token for token, two keys that differ in one argument have nothing in common."""
    first = uniforms([3], [0], [0], 100_000)[0]
    second = uniforms([other[0]], [other[1]], [other[2]], 100_000)[0]
    for shift in range(-3, 4):
        correlation = np.corrcoef(first, np.roll(second, shift))[0, 1]
        assert abs(correlation) * math.sqrt(100_000) < 4.5
    # Exponential tails too: the products that decide who wins are of the extremes.
    extreme = (first < 0.01) & (second < 0.01)
    assert abs(extreme.sum() - 10) < 5 * math.sqrt(10)


def test_noise_is_gumbel() -> None:
    noise = neg_log_exponential(torch.tensor([to_signed(noise_key(1, 0, 0))]), 400_000)[0].double()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    # Kolmogorov-Smirnov on exp(-noise), which is exponential.
    ordered = np.sort(1 - np.exp(-np.exp(-noise.numpy())))
    distance = np.abs(ordered - (np.arange(400_000) + 0.5) / 400_000).max()
    assert distance * math.sqrt(400_000) < 1.95
