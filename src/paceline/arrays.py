"""Names for the numpy arrays that cross module borders, and the one record made of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = Int32Array | Int64Array
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


@dataclass(slots=True)
class TokenLogprobs:
    """Raw log-softmax at T positions: the chosen token first, then the top N.

    ids, logprobs: [T, 1 + N]; ranks: [T], rank of the chosen token counted from 1.
    """

    ids: Int32Array
    logprobs: Float32Array
    ranks: Int32Array

    def __len__(self) -> int:
        return len(self.ranks)

    def head(self, count: int) -> TokenLogprobs:
        """The first ``count`` positions."""
        return TokenLogprobs(self.ids[:count], self.logprobs[:count], self.ranks[:count])

    def tail(self, start: int) -> TokenLogprobs:
        """The positions from ``start`` on."""
        return TokenLogprobs(self.ids[start:], self.logprobs[start:], self.ranks[start:])
