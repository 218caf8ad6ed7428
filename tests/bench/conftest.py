"""Plans of small engines of the pair in the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.bench.lengths import parse_lengths
from paceline.bench.prepare import EnginePlan, prepare
from paceline.bench.variants import make_comparison
from paceline.bench.workload import SyntheticRequests

MakePlans = Callable[..., list[EnginePlan]]


@pytest.fixture
def make_plans() -> MakePlans:
    """Plans of one or two sides; ``options`` are those of the requests."""

    def make(
        sides: dict[str, dict[str, Any]] | None = None, ks: tuple[int, ...] = (), **options: Any
    ) -> list[EnginePlan]:
        common = {
            "model": "paceline/demo",
            "dtype": "float32",
            "max_num_seqs": 4,
            "max_model_len": 64,
            "kv_cache_memory_bytes": 8 * 1024**2,
            "enable_prefix_caching": False,
        }
        if ks:
            common["speculative_model"] = "paceline/demo-draft"
        source = SyntheticRequests(
            options.get("count", 4),
            parse_lengths(options.get("input_len", "8")),
            parse_lengths(options.get("output_len", "6")),
            options.get("seed", 0),
            options.get("sampling", {}),
        )
        return prepare(make_comparison(common, sides or {}, [], ks).engines, source)

    return make
