"""Thresholds on the device against ``reference_thresholds``, by which tokens they keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_batch import DeviceBatch, peaked_logits, random_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample.truncation import reference_thresholds
from paceline.sampling_params import SamplingParams
from triton_kernels import DEVICE, load


def thresholds(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """[M] by the kernel."""
    count, vocab = logits.shape
    batch = DeviceBatch(params, [np.arange(3)] * count, [1] * count, vocab)
    sampler = load("paceline.sample.triton").DeviceSampler(count, vocab, torch.device(DEVICE))
    rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
    sampler.sample(logits.to(DEVICE), rows, batch.device)
    return sampler._thresholds.cpu()


def assert_same_kept(logits: torch.Tensor, params: list[SamplingParams]) -> None:
    """The same tokens, unless the mass at the border is top_p to within float32."""
    scaled = logits / torch.tensor([p.temperature for p in params])[:, None]
    expected = reference_thresholds(
        scaled,
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
    )
    found = thresholds(logits, params)
    for row, (values, low, high) in enumerate(zip(scaled, found, expected, strict=True)):
        kept = (values >= low) & (values > -torch.inf)
        wanted = (values >= high) & (values > -torch.inf)
        if not torch.equal(kept, wanted):
            mass = (values - values.max()).double().exp()
            both = torch.maximum(low, high)
            floor = params[row].min_p * mass.max()
            pool = mass[mass >= floor]
            if params[row].top_k:
                pool = mass[values >= values.topk(params[row].top_k).values[-1]]
            border = float(mass[values >= both].sum() / pool.sum())
            assert border == pytest.approx(params[row].top_p, abs=2e-6), (row, params[row])


def cut(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, t: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=t, top_k=top_k, top_p=top_p, min_p=min_p)


CUTS = [
    cut(1), cut(3), cut(700), cut(2499), cut(2500), cut(9999),
    cut(top_p=0.01), cut(top_p=0.5), cut(top_p=0.999), cut(top_p=0.9, t=3.0),
    cut(min_p=0.05), cut(min_p=1.0), cut(50, 0.9), cut(50, 0.9, 0.05), cut(0, 0.7, 0.01),
    cut(2000, 0.99, t=0.2), cut(20, 0.5, t=1e-3),
]  # fmt: skip


@pytest.mark.parametrize("few", [32, None])
@pytest.mark.parametrize("shape", ["peaked", "flat", "steps", "masked"])
def test_kept_tokens(shape: str, few: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """few: more values than that are searched in memory; None is what is used."""
    if few is not None:
        monkeypatch.setattr(load("paceline.sample.triton.sampler"), "_FEW", few)
        monkeypatch.setattr(load("paceline.sample.triton.sampler"), "_TILE", 512)
    logits = peaked_logits(len(CUTS), 2500, 3)
    if shape != "peaked":
        logits = random_logits(len(CUTS), 2500, 4, 2.5)
    if shape == "steps":  # many equal logits
        logits = (logits * 2).round() / 2
    if shape == "masked":
        logits[:, 40:] = -torch.inf
    assert_same_kept(logits, CUTS)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 2, 17, 300]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1e4]),
    temperature=st.sampled_from([1e-3, 0.7, 5.0]),
    step=st.sampled_from([0.0, 0.5]),
    top_k=st.sampled_from([0, 1, 5, 250]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05]),
)
def test_any_row(seed, vocab, scale, temperature, step, top_k, top_p, min_p) -> None:
    params = cut(top_k or 5, top_p, min_p, temperature)
    logits = random_logits(3, vocab, seed % 1000, scale)
    if step:
        logits = (logits / step).round() * step
    assert_same_kept(logits, [params, cut(top_k, top_p * 0.5, min_p, temperature), params])


def test_ties_are_kept_or_dropped_together() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.2]])).repeat(4, 1)
    found = thresholds(logits, [cut(2), cut(1), cut(top_p=0.3), cut(top_p=0.5)])
    kept = (logits >= found[:, None]).sum(1)
    assert kept.tolist() == [4, 1, 1, 4]


# The interpreter computes with numpy, which warns of infinity less infinity.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_end(bad: float) -> None:
    logits = torch.full((2, 300), bad)
    logits[1] = random_logits(1, 300)
    found = thresholds(logits, [cut(3, 0.5, 0.1)] * 2)
    assert torch.isfinite(found[1])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("flat", [False, True])
def test_a_real_vocabulary(flat: bool) -> None:
    params = [*CUTS, cut(20_000), cut(100_000, 0.9), cut(1000, 0.95, t=0.6)] * 4
    make = random_logits if flat else peaked_logits
    assert_same_kept(make(len(params), 151_936), params)
