"""The tensor-parallel group as layers see it, and the group of one.

Layers shard themselves by ``rank`` and ``size`` and call the two collectives; which library moves
the bytes is the group's business, so nothing above this seam imports ``torch.distributed``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.errors import ConfigError


class TPGroup(Protocol):
    """Ranks that hold one model between them; every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process's place, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """How many ranks share the model."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may work in place. Returns the sum, same shape and dtype."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors along the last dimension: [..., n] -> [..., size * n]."""


class SingleProcessGroup:
    """The whole model in this process: both collectives return their argument."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over one rank."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The concatenation of one part."""
        return tensor


def divide(count: int, tp: TPGroup, what: str) -> int:
    """One rank's share of ``count``. Raises ConfigError when it does not divide evenly."""
    if count % tp.size:
        raise ConfigError(
            f"tensor parallel size {tp.size} does not divide {what} ({count}). "
            f"hint: use a size that divides it"
        )
    return count // tp.size
