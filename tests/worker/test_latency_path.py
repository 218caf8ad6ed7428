"""Which models get a latency forward when their packed weights compete with the KV pool."""

from __future__ import annotations

import pytest

from paceline.errors import CapacityError
from paceline.worker.memory_plan import GIB, Limits, MemoryParts, count_blocks
from triton_kernels import load

module = load("paceline.worker.latency_path")

LIMITS = Limits(0.9, 1024, 2048, 8, 16)
BLOCK = 1 << 20


class Path:
    """A model's way, as far as memory is concerned."""

    def __init__(self, size: int) -> None:
        self.num_bytes = size
        self.reason = ""

    def drop(self, reason: str) -> None:
        self.num_bytes, self.reason = 0, reason


def parts(total: int, packed: int = 0) -> MemoryParts:
    """A card with 10 GiB in use."""
    return MemoryParts(
        total=total,
        elsewhere=0,
        target=8 * GIB,
        drafter=GIB,
        state=0,
        activations=GIB // 2,
        graphs=0,
        packed=packed,
    )


@pytest.mark.parametrize(
    ("total", "kept"),
    [
        (100, [8 * GIB, GIB]),  # 80 of KV without, 71 with both
        (30, [0, GIB]),  # 17; both would leave 8, the drafter's leaves 16
        (13, [0, 0]),  # 1.7
    ],
)
def test_auto_leaves_most_of_the_pool(total: int, kept: list[int]) -> None:
    paths = [Path(8 * GIB), Path(GIB)]
    module.drop_until(paths, module.leaves_pool(parts(total * GIB), LIMITS, BLOCK), "auto")
    assert [path.num_bytes for path in paths] == kept
    for path in paths:
        assert ("GiB of packed weights" in path.reason) == (not path.num_bytes)


def test_on_keeps_all_and_says_what_is_too_large() -> None:
    paths = [Path(8 * GIB), Path(GIB)]
    found = parts(13 * GIB)
    module.drop_until(paths, module.leaves_pool(found, LIMITS, BLOCK), "on")
    packed = sum(path.num_bytes for path in paths)
    assert packed == 9 * GIB
    with pytest.raises(CapacityError, match=r"packed for the latency path 9\.00.*latency_path=off"):
        count_blocks(parts(13 * GIB, packed), LIMITS, BLOCK)
