"""Which attention backend a device gets. Decided once at start-up and logged with the reason."""

from __future__ import annotations

import logging

import torch

from paceline.attention.backend import AttentionBackend
from paceline.attention.cpu import CpuAttention
from paceline.attention.cpu_native import NativeAttention
from paceline.attention.reference import ReferenceAttention
from paceline.config import ModelArch
from paceline.errors import ConfigError
from paceline.ops.native import NativeKernels, load

logger = logging.getLogger(__name__)

_TORCH_BACKENDS = {backend.name: backend for backend in (CpuAttention, ReferenceAttention)}


def select_backend(
    device: str, arch: ModelArch, dtype: torch.dtype, name: str | None = None
) -> AttentionBackend:
    """A backend that runs ``arch`` on ``device``; ``name`` forces one instead of the device's own.

    Raises ConfigError when the device has none, or the name is unknown or cannot run the model;
    never falls back silently.
    """
    if name is not None and name not in _TORCH_BACKENDS and name != NativeAttention.name:
        known = sorted([*_TORCH_BACKENDS, NativeAttention.name])
        raise ConfigError(
            f"unknown attention backend {name!r}. hint: use one of {', '.join(known)}"
        )
    if name is None and torch.device(device).type != "cpu":
        raise ConfigError(f"no attention backend runs on device {device!r}. hint: use device='cpu'")
    backend: AttentionBackend
    if name in _TORCH_BACKENDS:
        backend, reason = _TORCH_BACKENDS[name](), "asked for by name"
    else:
        kernels = _native_kernels(arch, dtype)
        if isinstance(kernels, NativeKernels):
            backend = NativeAttention(kernels)
            reason = "compiled for this CPU" if name is None else "asked for by name"
        elif name is None:
            backend, reason = CpuAttention(), kernels
        else:
            raise ConfigError(f"attention backend {name!r} cannot run: {kernels}. hint: use 'cpu'")
    windows = sorted({window for window in arch.sliding_window if window is not None})
    logger.info(
        "attention backend: %s (%s); %d query heads on %d KV heads of %d%s",
        backend.name,
        reason,
        arch.num_attention_heads,
        arch.num_kv_heads,
        arch.head_dim,
        f", sliding window {', '.join(map(str, windows))}" if windows else "",
    )
    return backend


def _native_kernels(arch: ModelArch, dtype: torch.dtype) -> NativeKernels | str:
    """The compiled kernels, or why this model cannot use them."""
    reason = NativeKernels.unsupported_reason(dtype, arch.head_dim)
    if reason is not None:
        return reason
    return load() or "native kernels are off or missing"
