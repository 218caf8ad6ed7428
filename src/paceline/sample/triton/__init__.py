"""Sampling on the device: truncation, choice and acceptance as Triton kernels over device rows.

Import this package only where a kernel will run: it needs Triton, which is not on every platform.
With ``TRITON_INTERPRET=1`` set before the import, the kernels run on CPU tensors, slowly.
"""

from paceline.sample.triton.commit import (
    STATUS_FAILED,
    STATUS_OK,
    STATUS_SPOILT,
    accept_and_advance,
    count_tokens,
)
from paceline.sample.triton.row_tensors import RowTensors
from paceline.sample.triton.sampler import DeviceSampler

__all__ = [
    "STATUS_FAILED",
    "STATUS_OK",
    "STATUS_SPOILT",
    "DeviceSampler",
    "RowTensors",
    "accept_and_advance",
    "count_tokens",
]
