"""One pass's inputs: from rows and token ranges to ids, positions and attention metadata."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.arrays import BoolArray, Int64Array
from paceline.attention.backend import AttentionMetadata
from paceline.worker.decode_state import DecodeState


@dataclass(slots=True)
class PassInput:
    """N tokens of S rows, in row order."""

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    metadata: AttentionMetadata
    token_rows: Int64Array  # [N] row of each token
    token_positions: Int64Array  # [N]
    ends: Int64Array  # [S] index after each row's last token


def build_pass(
    state: DecodeState,
    rows: Int64Array,
    starts: Int64Array,
    lens: Int64Array,
    discard: BoolArray | None = None,
) -> PassInput:
    """Inputs of a pass over tokens [start, start + len) of each row; every len is at least 1.

    rows, starts, lens: [S]. discard: [S] rows that are computed for nothing; their KV goes to the
    null block. Positions beyond a row's blocks go there too, since its table holds zeros there.
    """
    ends = np.cumsum(lens)
    first = ends - lens
    token_rows = np.repeat(rows, lens)
    offsets = np.arange(int(ends[-1])) - np.repeat(first, lens)
    positions = np.repeat(starts, lens) + offsets
    size = state.block_size
    blocks = state.block_table[token_rows, positions // size].astype(np.int64)
    if discard is not None:
        blocks[np.repeat(discard, lens)] = 0
    seq_lens = starts + lens
    used_blocks = -(-int(seq_lens.max()) // size)
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(np.append(0, ends).astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_table=torch.from_numpy(state.block_table[rows, :used_blocks]),
        slot_mapping=torch.from_numpy(blocks * size + positions % size),
        block_size=size,
        query_lens=lens.tolist(),
        seq_lens_list=seq_lens.tolist(),
    )
    ids = state.history[token_rows, positions].astype(np.int64)
    return PassInput(
        torch.from_numpy(ids), torch.from_numpy(positions), metadata, token_rows, positions, ends
    )
