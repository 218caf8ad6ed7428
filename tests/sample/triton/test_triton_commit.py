"""Acceptance and advance against ``count_accepted`` and ``DecodeState.advance``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_batch import FEATURES, DeviceBatch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample.verify import count_accepted
from paceline.sampling_params import SamplingParams
from paceline.worker.decode_state import DecodeState
from triton_kernels import DEVICE, load

module = load("paceline.sample.triton")
VOCAB = 64


class Round:
    """Rows with drafts, the target's samples for them, and what the kernel makes of it."""

    def __init__(self, seed: int, k: int, count: int = 6, bad: float = 0.0) -> None:
        rng = np.random.default_rng(seed)
        self.k, self.count = k, count
        params = [list(FEATURES.values())[i] for i in rng.integers(0, len(FEATURES), count)]
        lengths = rng.integers(1, 12, count)
        histories = [rng.integers(0, 4, n) for n in lengths]
        self.batch = DeviceBatch(params, histories, [1] * count, VOCAB, stop_token_ids=(2,))
        self.drafts = rng.integers(0, 4, (count, k))
        self.batch.write_drafts(self.drafts)
        agree = rng.random((count, k + 1)) < 0.7
        self.sampled = rng.integers(0, 4, (count, k + 1))
        self.sampled[:, :k] = np.where(agree[:, :k], self.drafts, self.sampled[:, :k])
        self.num_drafts = rng.integers(0, k + 1, count)
        self.max_total = lengths + rng.integers(1, k + 4, count)
        self.active = rng.random(count) < 0.8
        self.bad = rng.random((count, k + 1)) < bad
        self.lengths = lengths
        self.params = params

    def run(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """out_tokens, out_counts, out_status. The batch is padded with the null row."""
        device = self.batch.device
        device.column("max_total")[: self.count] = torch.from_numpy(self.max_total)
        device.column("active")[: self.count] = torch.from_numpy(self.active)
        pad = ((0, 2), (0, 0))
        rows = np.append(np.arange(self.count), [self.count, self.count])
        out_tokens, out_counts, out_status = (
            torch.full(shape, -7, dtype=torch.int32, device=DEVICE)
            for shape in ((len(rows), self.k + 1), (len(rows),), (len(rows),))
        )
        module.accept_and_advance(
            on_device(np.pad(self.sampled, pad)),
            on_device(np.pad(self.bad, pad)),
            on_device(rows),
            on_device(np.append(self.num_drafts, [0, 0])),
            device,
            k=self.k,
            out_tokens=out_tokens,
            out_counts=out_counts,
            out_status=out_status,
        )
        assert out_counts[self.count :].tolist() == [0, 0]
        assert out_status[self.count :].tolist() == [0, 0]
        return tuple(x[: self.count].cpu().numpy() for x in (out_tokens, out_counts, out_status))


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).astype(np.int32)).to(DEVICE)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.integers(0, 6))
def test_rows_advance_as_on_the_cpu(seed: int, k: int) -> None:
    case = Round(seed, k)
    before = case.batch.device.history.cpu().clone()
    tokens, counts, status = case.run()
    accepted = count_accepted(
        torch.from_numpy(case.sampled),
        torch.from_numpy(case.drafts),
        torch.from_numpy(case.num_drafts),
    ).numpy()
    assert counts.tolist() == np.where(case.active, accepted + 1, 0).tolist()
    assert tokens.tolist() == case.sampled.tolist()
    assert not status.any()

    state = DecodeState(case.count, before.shape[1], 16, 0)
    state.history[:, : before.shape[1]] = before[: case.count]
    state.num_tokens[:], state.max_total[:] = case.lengths, case.max_total
    state.active[:], state.stop_ids[:] = case.active, 2
    rows = np.flatnonzero(case.active)
    state.advance(rows, case.sampled[rows], accepted[rows] + 1)
    device = case.batch.device
    assert device.column("num_tokens")[:-1].tolist() == state.num_tokens.tolist()
    assert device.column("active")[:-1].tolist() == state.active.tolist()
    assert device.history[:-1].cpu().tolist() == state.history[:, : before.shape[1]].tolist()
    counted = [i for i, p in enumerate(case.params) if p.needs_penalties]
    for row in counted:
        output = state.history[row, 1 : state.num_tokens[row]]
        kept = device.counts[row].cpu().numpy() & ((1 << 30) - 1)
        assert kept.tolist() == np.bincount(output, minlength=VOCAB).tolist()


def test_bad_logits_end_a_run_before_them() -> None:
    case = Round(1, 3, count=4)
    case.active[:] = True
    case.sampled[:] = 1
    case.drafts = np.full((4, 3), 1)
    case.batch.write_drafts(case.drafts)
    case.num_drafts[:] = 3
    case.max_total[:] = 24
    case.bad = np.array([[0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    _, counts, status = case.run()
    assert counts.tolist() == [3, 1, 0, 4]
    assert status.tolist() == [module.STATUS_OK] * 2 + [module.STATUS_SPOILT, module.STATUS_OK]
    assert case.batch.device.column("active")[:4].tolist() == [1, 1, 1, 1]
    assert case.batch.device.column("num_tokens")[:4].tolist() == (case.lengths + counts).tolist()


def test_bad_logits_without_drafts_fail_that_row_alone() -> None:
    case = Round(2, 0, count=3)
    case.active[:] = True
    case.sampled[:] = 1
    case.max_total[:] = 24
    case.bad = np.array([[0], [1], [0]])
    _, counts, status = case.run()
    assert counts.tolist() == [1, 0, 1]
    assert status.tolist() == [module.STATUS_OK, module.STATUS_FAILED, module.STATUS_OK]
    assert case.batch.device.column("active")[:3].tolist() == [1, 0, 1]


def test_counts_are_refused_where_there_are_none() -> None:
    batch = DeviceBatch([SamplingParams()], [np.arange(3)], [1], VOCAB)
    with pytest.raises(ValueError, match="counts are not allocated"):
        module.count_tokens(torch.zeros(1, dtype=torch.int32), batch.device)
