"""The device sampler against the CPU's: same processing, same noise, same ids."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from device_batch import FEATURES, PENALTIES, DeviceBatch, peaked_logits, random_logits

from paceline.sample.noise import neg_log_exponential, row_key
from paceline.sampling_params import SamplingParams
from triton_kernels import DEVICE, load

module = load("paceline.sample.triton")
VOCAB = 2500  # three blocks of the part kernel, the last one not full


def mixed_batch(seed: int, k: int = 3, vocab: int = VOCAB) -> DeviceBatch:
    rng = np.random.default_rng(seed)
    params = list(FEATURES.values())
    prompts = rng.integers(1, 10, len(params)).tolist()
    # Few distinct ids, so that drafts repeat outputs and prompts.
    histories = [rng.integers(0, 40, n + rng.integers(0, 9)) for n in prompts]
    batch = DeviceBatch(params, histories, prompts, vocab, stop_token_ids=(5, 7))
    batch.write_drafts(rng.integers(0, 40, (len(params), k)))
    return batch


def boosted(count: int, vocab: int, seed: int) -> torch.Tensor:
    """Logits whose likely ids are those that histories, biases and stops are made of."""
    logits = random_logits(count, vocab, seed)
    logits[:, :40] += 4.0
    return logits


@pytest.mark.parametrize("seed", range(3))
def test_verify_positions_equal_the_cpu(seed: int) -> None:
    batch = mixed_batch(seed)
    rows = np.random.default_rng(seed).permutation(len(FEATURES))
    logits = boosted(4 * len(rows), VOCAB, seed)
    before = logits.clone()
    ids, status = batch.sample(logits, rows, query_len=4, limit=VOCAB - 30)
    assert ids.tolist() == batch.oracle(logits, rows, query_len=4, limit=VOCAB - 30).tolist()
    assert not status.any()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("offset", "query_len"), [(-2, 2), (-1, 1), (0, 1), (2, 1)])
def test_drafter_positions_equal_the_cpu(offset: int, query_len: int) -> None:
    batch = mixed_batch(7)
    rows = np.arange(len(FEATURES))
    logits = boosted(query_len * len(rows), VOCAB, 5)
    arguments = {"query_len": query_len, "offset": offset, "truncation": False}
    ids, _ = batch.sample(logits, rows, **arguments)
    assert ids.tolist() == batch.oracle(logits, rows, **arguments).tolist()


def test_drafts_go_behind_the_committed_tokens() -> None:
    batch = mixed_batch(3)
    batch.device.column("active")[4] = 0
    rows = np.arange(len(FEATURES))
    before = batch.device.history.clone()
    logits = boosted(2 * len(rows), VOCAB, 6)
    ids, _ = batch.sample(logits, rows, query_len=2, offset=-2, to_history=True)
    after = batch.device.history
    for row, count in enumerate(batch.num_tokens.tolist()):
        assert after[row, :count].tolist() == before[row, :count].tolist()
        assert after[row, count + 1 :].tolist() == before[row, count + 1 :].tolist()
        wrote = before[row, count] if row == 4 else ids[2 * row + 1]
        assert int(after[row, count]) == int(wrote)


def test_noise_is_the_cpus() -> None:
    """Bit patterns of the hash, and the noise to a few units in the last place."""
    noise = load("paceline.sample.triton.noise")
    kernel = load("noise_kernel").noise_kernel
    batch = DeviceBatch([SamplingParams()] * 2, [np.arange(9), np.arange(4)], [3, 4], 8)
    ids = 1 << 14
    exact, rough = (torch.empty(2, ids, device=DEVICE) for _ in range(2))
    columns = batch.device.columns
    kernel[(2,)](columns, columns.stride(0), exact, rough, ids, DEVICE == "cpu")
    keys = torch.tensor([batch.noise_key(0, 7), batch.noise_key(1, 8)])
    expected = neg_log_exponential(keys, ids)
    step = torch.finfo(torch.float32).eps * expected.abs().clamp(min=1.0)
    assert ((exact.cpu() - expected).abs() <= 4 * step).all()
    assert (rough.cpu() - expected).abs().max() < noise.ROUGH_ERROR.value
    assert batch.host.row_keys[0] == row_key(100, 0)


@pytest.mark.parametrize("name", ["sampled", "top_k", "greedy"])
def test_ids_at_ties_are_the_lowest(name: str) -> None:
    count = 6
    batch = DeviceBatch([FEATURES[name]] * count, [np.arange(4)] * count, [2] * count, VOCAB)
    logits = torch.zeros(count, VOCAB)
    logits[0, 900:] = 60.0
    logits[1, [2400, 1100, 1101]] = 90.0
    logits[2:, 1023:1026] = 1e9  # the noise is lost in rounding
    rows = np.arange(count)
    ids, status = batch.sample(logits, rows)
    assert ids.tolist() == batch.oracle(logits, rows).tolist()
    assert ids[2:].tolist() == [1023] * 4
    assert not status.any()


def test_rough_search_finds_every_rival() -> None:
    """Flat logits, where noise alone decides and near-ties are as common as they can be."""
    count = 40
    batch = DeviceBatch([FEATURES["sampled"]] * count, [np.arange(3)] * count, [1] * count, VOCAB)
    logits = torch.zeros(count, VOCAB)
    rows = np.arange(count)
    assert batch.sample(logits, rows)[0].tolist() == batch.oracle(logits, rows).tolist()


# The interpreter computes with numpy, which warns of infinity less infinity.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_bad_rows_are_marked_and_harm_nobody() -> None:
    params = [p for p in FEATURES.values() for _ in range(4)]
    histories = [np.array([1, 2, 3])] * len(params)
    batch = DeviceBatch(params, histories, [1] * len(params), VOCAB, stop_token_ids=(5,))
    logits = random_logits(len(params), VOCAB)
    rows = np.arange(len(params))
    good = batch.oracle(logits, rows, limit=2400)
    broken = logits.clone()
    broken[0::4, 3] = torch.nan
    broken[1::4, 2399] = torch.inf
    broken[2::4] = -torch.inf
    ids, status = batch.sample(broken, rows, limit=2400)
    assert status.tolist() == [1, 1, 1, 0] * len(FEATURES)
    assert torch.equal(ids[3::4], good[3::4])
    assert ((ids >= 0) & (ids < 2400)).all()


def test_only_one_token_possible() -> None:
    params = list(FEATURES.values())
    batch = DeviceBatch(params, [np.array([1, 2])] * len(params), [1] * len(params), VOCAB)
    logits = torch.full((len(params), VOCAB), -torch.inf)
    logits[:, 1300] = -3.0
    ids, status = batch.sample(logits, np.arange(len(params)))
    assert ids.tolist() == [1300] * len(params)
    assert not status.any()


def test_allowed_tokens() -> None:
    batch = mixed_batch(5)
    rows = np.arange(len(FEATURES))
    logits = boosted(len(rows), VOCAB, 8)
    rng = np.random.default_rng(1)
    free = rng.random((len(rows), VOCAB)) < 0.02
    free[0] = False
    free[0, 31] = free[1, 32] = free[2, VOCAB - 1] = True
    padded = np.pad(free, ((0, 0), (0, -VOCAB % 32 + 64)))
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    allowed = torch.from_numpy(words).to(DEVICE)
    ids, status = batch.sample(logits, rows, allowed=allowed)
    masked = logits.masked_fill(~torch.from_numpy(free), -torch.inf)
    assert ids.tolist() == batch.oracle(masked, rows).tolist()
    assert int(ids[0]) == 31
    assert not status.any()


def test_inactive_and_null_rows_cost_and_say_nothing() -> None:
    batch = mixed_batch(1)
    batch.device.column("active")[2] = 0
    rows = np.array([0, 2, len(FEATURES), len(FEATURES)])
    logits = boosted(4, VOCAB, 2)
    logits[1:] = torch.nan
    ids, status = batch.sample(logits, rows)
    assert ids[1:].tolist() == [0, 0, 0]
    assert not status.any()
    assert int(ids[0]) == int(batch.oracle(logits[:1], rows[:1]))


def test_rows_of_logits_may_be_strided() -> None:
    batch = mixed_batch(2)
    rows = np.arange(len(FEATURES))
    wide = torch.full((len(rows), VOCAB + 28), torch.nan)
    wide[:, :VOCAB] = boosted(len(rows), VOCAB, 3)
    expected = batch.oracle(wide[:, :VOCAB], rows)
    ids, status = batch.sample(wide.to(DEVICE)[:, :VOCAB], rows)
    assert ids.tolist() == expected.tolist()
    assert not status.any()


def test_too_many_entries_are_refused() -> None:
    sampler = module.DeviceSampler(2, VOCAB, torch.device(DEVICE))
    batch = mixed_batch(2)
    rows = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 tokens to sample, but memory is for 2"):
        sampler.sample(torch.zeros(3, VOCAB), rows, batch.device)


# ---- counts --------------------------------------------------------------------------------------


def test_counts_of_entering_rows() -> None:
    rng = np.random.default_rng(0)
    params = [FEATURES["greedy, penalties"], FEATURES["sampled"], FEATURES["everything"]]
    histories = [rng.integers(0, 30, n) for n in (700, 5, 9)]
    batch = DeviceBatch(params, histories, [650, 2, 9], 64)
    counts = batch.device.counts.cpu().numpy()
    for row in (0, 2):
        prompt, output = np.split(histories[row], [batch.prompt_lens[row]])
        assert (counts[row] & ((1 << 30) - 1)).tolist() == np.bincount(
            output, minlength=64
        ).tolist()
        assert (counts[row] >> 30).tolist() == np.isin(np.arange(64), prompt).tolist()
    assert not counts[1].any()


def test_a_row_that_enters_again_forgets_its_last_counts() -> None:
    batch = mixed_batch(9)
    row = 1  # with penalties
    before = batch.device.counts[row].clone()
    batch.device.counts[row, 100:] = 77
    rows = torch.tensor([row], dtype=torch.int32, device=DEVICE)
    module.count_tokens(rows, batch.device)
    assert torch.equal(batch.device.counts[row], before)


# ---- at the size of a real vocabulary ------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("repeat", range(4))
def test_a_real_vocabulary(repeat: int) -> None:
    vocab, copies = 151936, 16
    params = [p for p in FEATURES.values() for _ in range(copies)]
    params += [SamplingParams(top_p=0.95, **PENALTIES)] * copies
    rng = np.random.default_rng(repeat)
    histories = [rng.integers(0, 200, 30) for _ in params]
    batch = DeviceBatch(params, histories, [20] * len(params), vocab, stop_token_ids=(5, 7))
    batch.write_drafts(rng.integers(0, 200, (len(params), 1)))
    rows = np.arange(len(params))
    logits = peaked_logits(2 * len(params), vocab, repeat)
    ids, status = batch.sample(logits, rows, query_len=2, limit=151_665)
    expected = batch.oracle(logits, rows, query_len=2, limit=151_665)
    # A near-tie may fall either way: on a card sums and products are rounded otherwise.
    assert int((ids != expected).sum()) <= 1
    assert not status.any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("peak", "others"), [(30.0, 0.0), (math.log(150_000 / 1e-3), 1e4)])
def test_a_dominant_token_in_ten_million_draws(peak: float, others: float) -> None:
    """All draws fall on it, or as many beside it as its share leaves (five standard deviations).

    Noise that rounds to infinity would let some token win once in 2^24 tokens, that is in every
    hundredth draw.
    """
    vocab, rows, dominant = 150_000, 250, 1234
    batch = DeviceBatch([SamplingParams()] * rows, [np.arange(1)] * rows, [1] * rows, vocab)
    sampler = module.DeviceSampler(rows, vocab, torch.device(DEVICE), vocab_limit=vocab)
    logits = torch.zeros(1, vocab, device=DEVICE)
    logits[0, dominant] = peak
    names = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    ids, status = (torch.zeros(rows, dtype=torch.int32, device=DEVICE) for _ in range(2))
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(10_000_000 // rows):
        batch.device.column("num_tokens").add_(1)
        sampler.sample(logits.expand(rows, vocab), names, batch.device, out=ids, status=status)
        wrong += (ids != dominant).sum()
    assert abs(int(wrong) - others) <= 5 * math.sqrt(others)
    assert not status.any()
