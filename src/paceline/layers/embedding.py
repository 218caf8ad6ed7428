"""Token embedding and output head, the vocabulary divided among ranks.

Know the padded vocabulary of the checkpoint; masking of ids a tokenizer lacks is the sampler's
work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.distributed.tp_group import TPGroup, divide
from paceline.layers.layer import Layer
from paceline.layers.shard import WeightTarget, empty_parameter
from paceline.ops import cpu_linear


class VocabMatrix(Layer):
    """[vocab rows of this rank, hidden] and its place in the checkpoint."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.rows = divide(vocab_size, tp, "vocab_size")
        self.weight = empty_parameter(self.rows, hidden_size, dtype=dtype, device=device)

    def target(self) -> WeightTarget:
        """Where the whole checkpoint matrix goes."""
        return WeightTarget(self.weight, 0, self.tp.rank * self.rows)


class VocabEmbedding(VocabMatrix):
    """Rows of the embedding matrix by token id."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [N] int64 in [0, vocab_size) -> [N, hidden], a fresh tensor."""
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.tp.rank * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(found.masked_fill_(elsewhere[:, None], 0))


class OutputHead(Layer):
    """Logits over the padded vocabulary; reads the embedding's matrix when they are tied."""

    def __init__(self, matrix: VocabMatrix, *, tied: bool) -> None:
        super().__init__()
        self.matrix: VocabMatrix | None = matrix
        self.tied = tied
        self.tp = matrix.tp
        self.packed: torch.Tensor | None = None

    def target(self) -> WeightTarget | None:
        """Where the checkpoint's own head goes (before ``pack``); None when it has none."""
        return None if self.tied or self.matrix is None else self.matrix.target()

    def pack(self) -> None:
        """Pack the matrix where possible; the embedding keeps its own copy of a tied one."""
        if self.matrix is None:
            return
        weight = self.matrix.weight
        if cpu_linear.can_pack(weight.dtype, weight.device):
            self.packed = cpu_linear.pack_weight(weight)
            if not self.tied:
                self.matrix = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [M, hidden] -> logits [M, vocab_size] float32."""
        if self.packed is not None:
            logits = cpu_linear.packed_linear(hidden, self.packed, None)
        else:
            assert self.matrix is not None  # given up only for the packed form
            weight = self.matrix.weight
            if hidden.is_cuda and hidden.dtype is not torch.float32:
                # Rounded to 16 bits many logits would tie.
                logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            else:
                logits = F.linear(hidden, weight)
        return self.tp.all_gather(logits).float()
