"""Which runner a configuration gets."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.core.runner import Runner


@dataclass(frozen=True, slots=True)
class Started:
    """A runner, and what its start-up settled."""

    runner: Runner
    config: EngineConfig  # with the KV pool that was measured
    delay: int  # launched steps that may be uncollected while the next is planned


def start_runner(config: EngineConfig, max_k: int) -> Started:
    """Load weights, allocate the KV pool, and be ready to run.

    max_k: the largest draft length a policy may choose. Raises ConfigError (files that do not fit
    their configuration) or CapacityError (no memory).
    """
    if config.device == "cuda":
        from paceline.worker.device_build import DeviceBuilder  # Triton loads only for a GPU

        builder = DeviceBuilder(config, max_k)
        return Started(builder.build(), builder.config, delay=1)
    from paceline.worker.build import build_runner

    return Started(build_runner(config, max_k), config, delay=0)
