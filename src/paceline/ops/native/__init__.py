"""Kernels in C for a CPU, compiled on first use with the compiler the machine has."""

from paceline.ops.native.library import Heads, NativeKernels, load

__all__ = ["Heads", "NativeKernels", "load"]
