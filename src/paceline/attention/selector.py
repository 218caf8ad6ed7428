"""Which attention backend a device gets. Decided once at start-up and logged with the reason."""

from __future__ import annotations

import logging

import torch

from paceline.attention.backend import AttentionBackend
from paceline.attention.cpu import CpuAttention
from paceline.attention.reference import ReferenceAttention
from paceline.config import ModelArch
from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, type[CpuAttention] | type[ReferenceAttention]] = {
    CpuAttention.name: CpuAttention,
    ReferenceAttention.name: ReferenceAttention,
}


def select_backend(device: str, arch: ModelArch, name: str | None = None) -> AttentionBackend:
    """A backend that runs ``arch`` on ``device``; ``name`` forces one instead of the device's own.

    Raises ConfigError when the device has none or the name is unknown; never falls back silently.
    """
    kind = torch.device(device).type
    if name is not None:
        if name not in _BACKENDS:
            raise ConfigError(
                f"unknown attention backend {name!r}. "
                f"hint: use one of {', '.join(sorted(_BACKENDS))}"
            )
        chosen, reason = name, "asked for by name"
    elif kind == "cpu":
        chosen, reason = CpuAttention.name, "device is a CPU"
    else:
        raise ConfigError(f"no attention backend runs on device {device!r}. hint: use device='cpu'")
    windows = sorted({window for window in arch.sliding_window if window is not None})
    logger.info(
        "attention backend: %s (%s); %d query heads on %d KV heads of %d%s",
        chosen,
        reason,
        arch.num_attention_heads,
        arch.num_kv_heads,
        arch.head_dim,
        f", sliding window {', '.join(map(str, windows))}" if windows else "",
    )
    return _BACKENDS[chosen]()
