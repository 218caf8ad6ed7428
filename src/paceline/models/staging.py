"""Copies of weights to a GPU through pinned memory: one buffer is filled while the other is sent.

A copy straight from a mapped file would go through a buffer of the driver, and wait for it each
time. The mapped pages stay the system's to reclaim, so that a model larger than the host's memory
loads too.
"""

from __future__ import annotations

import torch

_BUFFER_BYTES = 64 * 1024**2


class Staging:
    """Two buffers on the way to ``device``; for another device than a GPU (tests) not pinned."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [
            torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(2)
        ]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Enqueue ``destination.copy_(source)``, converting on the host; ``source`` may go then.

        source: on the host, broadcast against the destination where the shapes differ.
        """
        row_bytes = destination.nbytes // max(1, len(destination)) if destination.dim() else 0
        if not 0 < row_bytes <= _BUFFER_BYTES:
            destination.copy_(source)
            return
        source = source.expand_as(destination)
        rows = _BUFFER_BYTES // row_bytes
        for start in range(0, len(destination), rows):
            self._send(source[start : start + rows], destination[start : start + rows])

    def _send(self, part: torch.Tensor, destination: torch.Tensor) -> None:
        turn = self._turn
        self._turn = 1 - turn
        before = self._sent[turn]
        if before is not None:
            before.synchronize()  # what the buffer held has been sent
        staged = self._buffers[turn][: destination.nbytes].view(destination.dtype)
        staged = staged.view(destination.shape)
        staged.copy_(part)
        destination.copy_(staged, non_blocking=True)
        if self._pinned:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._sent[turn] = event
