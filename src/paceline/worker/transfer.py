"""Copies between host and device that wait for nothing.

The host writes to pinned memory, which torch's allocator keeps until the copy has been made, and
enqueues the copy on the current stream, in order with the work that reads it.
"""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Download:
    """A copy to the host that was started; ``wait`` ends when it has arrived."""

    def __init__(self, source: torch.Tensor) -> None:
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._done: torch.cuda.Event | None = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
        else:
            self._host = source.clone()
            self._done = None

    def wait(self) -> np.ndarray:
        """The values, as an array that nobody else writes."""
        if self._done is not None:
            self._done.synchronize()
        array: np.ndarray = self._host.numpy()
        return array
