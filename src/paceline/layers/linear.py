"""The linear layer: fused outputs, tensor parallelism, packed weights on a CPU.

Knows its shard and how checkpoint tensors fill it; does not know what its outputs mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from paceline.distributed.tp_group import TPGroup, divide
from paceline.layers.layer import Layer
from paceline.layers.shard import WeightTarget, empty_parameter
from paceline.ops import cpu_linear

# torch gives a product with a bias to cuBLASLt and one without to cuBLAS, whose kernels for some
# tokens and mid-sized outputs are up to a fifth slower (``benchmarks/products.py``, H200): there
# zeros are added.
_BETTER_WITH_BIAS = range(48, 129)  # tokens
_MID_SIZED = range(3072, 8193)  # outputs


class Linear(Layer):
    """``x W^T + b`` where W stacks the matrices of several checkpoint tensors (*parts*).

    ``split="out"`` gives each rank a slice of every part's outputs (the input is whole);
    ``split="in"`` a slice of the inputs, and the ranks' results are summed (Shoeybi et al.,
    "Megatron-LM", 2019).

    Raises ConfigError when the group's size does not divide the split dimension.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        *,
        split: Literal["out", "in"],
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.split = split
        if split == "out":
            self.in_features = in_features
            self.parts = [divide(part, tp, "a layer's output size") for part in parts]
        else:
            self.in_features = divide(in_features, tp, "a layer's input size")
            self.parts = list(parts)
        self.out_features = sum(self.parts)
        self.weight: nn.Parameter | None = empty_parameter(
            self.out_features, self.in_features, dtype=dtype, device=device
        )
        self.bias = empty_parameter(self.out_features, dtype=dtype, device=device) if bias else None
        self._zeros: torch.Tensor | None = None
        on_gpu = torch.device(device).type == "cuda" and dtype.itemsize == 2
        if on_gpu and not bias and self.out_features in _MID_SIZED:
            self._zeros = torch.zeros(self.out_features, dtype=dtype, device=device)
        self.packed: torch.Tensor | None = None
        self._reduce = split == "in" and tp.size > 1

    def targets(self, part: int) -> dict[str, WeightTarget]:
        """Where the ``weight`` and ``bias`` of one part go (before ``pack``)."""
        first = sum(self.parts[:part])
        size = self.parts[part]
        assert self.weight is not None  # only the loader calls this, before it packs
        rows = self.weight[first : first + size]
        if self.split == "out":
            found = {"weight": WeightTarget(rows, 0, self.tp.rank * size)}
        else:
            found = {"weight": WeightTarget(rows, 1, self.tp.rank * self.in_features)}
        if self.bias is not None:
            bias = self.bias[first : first + size]
            whole = self.split == "in"
            found["bias"] = WeightTarget(
                bias, None if whole else 0, 0 if whole else self.tp.rank * size
            )
        return found

    def pack(self) -> None:
        """Replace the weight by its packed form, where the device and dtype have one."""
        if self.weight is not None and cpu_linear.can_pack(self.weight.dtype, self.weight.device):
            self.packed = cpu_linear.pack_weight(self.weight)
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in_features of this rank] -> [N, out_features of this rank]."""
        if self._reduce:  # the bias is added once, after the sum
            summed = self.tp.all_reduce(self._multiply(x, None))
            return summed if self.bias is None else summed + self.bias
        return self._multiply(x, self.bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.packed is not None:
            return cpu_linear.packed_linear(x, self.packed, bias)
        assert self.weight is not None  # packed or not, one of them is there
        if bias is None and x.shape[0] in _BETTER_WITH_BIAS:
            bias = self._zeros
        return F.linear(x, self.weight, bias)
