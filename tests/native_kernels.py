"""The compiled CPU kernels for tests; what needs them is skipped, loudly, where there are none."""

from __future__ import annotations

import pytest

from paceline.ops.native import NativeKernels, load


def kernels() -> NativeKernels:
    """Compiled for this machine; skips the calling test where there is no C compiler."""
    found = load()
    if found is None:
        pytest.skip("NO NATIVE KERNELS: no working C compiler here, or PACELINE_NATIVE=0")
    return found
