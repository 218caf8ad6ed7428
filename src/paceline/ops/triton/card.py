"""What kernels must know of the card they run on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Card:
    """Properties of one device that choose tile sizes and grids."""

    capability: tuple[int, int]
    num_sms: int  # streaming multiprocessors
    shared_memory: int  # bytes that one program may use


@functools.cache
def card_of(device: torch.device) -> Card:
    """The card behind a device; for a CPU (Triton's interpreter) one of the smallest supported."""
    if device.type != "cuda":
        return Card((8, 6), 8, 99 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return Card(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )
