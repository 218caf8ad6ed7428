"""Element-wise operations of a decoder layer, by the names layers call.

Each goes to the implementation that was chosen for its tensor's device when a model was built;
without a choice, to the plain torch one. ``rotary`` has only that: faster backends of attention
rotate in kernels of their own.
"""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.ops import reference
from paceline.ops.reference import rotary

__all__ = ["Operations", "add_rms_norm", "rms_norm", "rotary", "silu_mul", "use"]


class Operations(Protocol):
    """What an implementation offers; ``reference`` says what each operation does.

    They are for tensors of the dtype and device the implementation was made for, and fall back to
    ``reference`` for forms they do not know. Rows never depend on each other.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...


_chosen: dict[str, Operations] = {}  # by device type


def use(device_type: str, operations: Operations | None) -> None:
    """Choose the implementation for tensors on such devices; None returns to plain torch."""
    _chosen[device_type] = reference if operations is None else operations


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``reference.rms_norm``."""
    return _chosen.get(x.device.type, reference).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.add_rms_norm``."""
    return _chosen.get(x.device.type, reference).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``reference.silu_mul``."""
    return _chosen.get(gate_up.device.type, reference).silu_mul(gate_up)
