"""A kernel that writes out the noise of two rows, for ``test_triton_sampler``."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.sample.triton.noise import noise_halves, noise_of, rough_noise_of


@triton.jit
def noise_kernel(columns, stride, exact, rough, count: tl.constexpr, INTERPRETED: tl.constexpr):
    """Row 0 at output position 4, row 1 at 4 too (positions 7 and 8): [2, count] each."""
    row = tl.program_id(0)
    ids = tl.arange(0, count)
    low, high = noise_halves(columns, stride, row, row * 0 + 4)
    tl.store(exact + row * count + ids, noise_of(low, high, ids))
    tl.store(rough + row * count + ids, rough_noise_of(low, high, ids, INTERPRETED))
