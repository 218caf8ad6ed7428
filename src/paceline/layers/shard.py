"""Where a checkpoint tensor goes: which part of it, into which piece of a parameter.

Fused parameters (q, k and v in one matrix) and tensor parallelism meet here, so that the loader
only copies and neither knows of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """One checkpoint tensor's place in this rank's parameters."""

    destination: torch.Tensor  # a view into a parameter; the source may broadcast against it
    dim: int | None = None  # dimension that ranks divide; None: every rank takes all of it
    start: int = 0  # first index this rank takes along ``dim``

    def part_of(self, source: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole checkpoint tensor ``source``, a view."""
        if self.dim is None:
            return source
        return source.narrow(self.dim, self.start, self.destination.shape[self.dim])

    def copy_from(self, source: torch.Tensor) -> None:
        """Copy (and convert) this rank's part of ``source``."""
        self.destination.copy_(self.part_of(source))


def empty_parameter(
    *shape: int, dtype: torch.dtype, device: torch.device | str
) -> torch.nn.Parameter:
    """An uninitialised parameter without gradient: the loader fills every one."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
