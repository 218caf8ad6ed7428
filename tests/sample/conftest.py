"""Oracles and builders shared by the sampler's tests: slow, float64, one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.sample.rows import SamplingRows
from paceline.sampling_params import SamplingParams


def _build_state(
    params: Sequence[SamplingParams],
    histories: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    seeds: Sequence[int] | None = None,
    stop_token_ids: Sequence[int] = (),
    spare: int = 32,
) -> SamplingRows:
    """Row i holds params[i] and histories[i], padded with zeros."""
    length = max(len(h) for h in histories) + spare
    history = torch.zeros(len(params), length, dtype=torch.int32)
    for row, tokens in enumerate(histories):
        history[row, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32)
    state = SamplingRows(len(params), history, torch.device("cpu"))
    for row, sampling in enumerate(params):
        seed = row if seeds is None else seeds[row]
        state.set_row(row, sampling, prompt_lens[row], seed, 0, stop_token_ids)
    return state


def _oracle_logits(
    logits: np.ndarray,
    sampling: SamplingParams,
    context: Sequence[int],
    prompt_len: int,
    stop_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """Processed logits of one position in float64, token by token from the definitions."""
    result = [float(x) for x in logits]
    prompt, output = list(context[:prompt_len]), list(context[prompt_len:])
    if len(output) < sampling.min_tokens:
        for token in stop_token_ids:
            result[token] = -math.inf
    for token, bias in (sampling.logit_bias or {}).items():
        result[token] += bias
    counts = Counter(output)
    for token in set(prompt) | set(output):
        if result[token] > 0:
            result[token] /= sampling.repetition_penalty
        else:
            result[token] *= sampling.repetition_penalty
    for token, count in counts.items():
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return np.array(result)


def _oracle_probs(processed: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Exact distribution of one position, float64, by the sort-free definitions."""
    scaled = processed / sampling.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs = np.where(probs >= sampling.min_p * probs.max(), probs, 0.0)
    if sampling.top_k:
        more = np.array([(probs > p).sum() for p in probs])
        probs = np.where(more < sampling.top_k, probs, 0.0)
    if sampling.top_p < 1:
        probs = probs / probs.sum()
        above = np.array([probs[probs > p].sum() for p in probs])
        probs = np.where(above < sampling.top_p, probs, 0.0)
    return probs / probs.sum()


def _chi_square_z(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square goodness of fit as a standard normal (Wilson and Hilferty, 1931).

    Impossible outcomes must not occur; cells that expect fewer than 5 are merged.
    """
    assert counts[probs == 0].sum() == 0, "a token of probability zero was drawn"
    total = counts.sum()
    expected = probs * total
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return 0.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    cube_root = (statistic / freedom) ** (1 / 3)
    return float((cube_root - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


@pytest.fixture(scope="session")
def build_state() -> Callable[..., SamplingRows]:
    return _build_state


@pytest.fixture(scope="session")
def oracle_logits() -> Callable[..., np.ndarray]:
    return _oracle_logits


@pytest.fixture(scope="session")
def oracle_probs() -> Callable[..., np.ndarray]:
    return _oracle_probs


@pytest.fixture(scope="session")
def chi_square_z() -> Callable[[Any, Any], float]:
    return _chi_square_z
