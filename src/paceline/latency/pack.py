"""Weights in the order in which the latency kernel reads them.

What one warp of one thread block multiplies in one forward is one contiguous stream: layer after
layer qkv, output, gate and up, down; then the head. Of each product a block has ``plan.outputs``
of the outputs and a warp ``plan.slices`` of the inputs, in pieces of 32. Tiles of 16 outputs (8
gates and their 8 ups) follow one another, each piece by piece; in ``down`` pieces follow one
another, each with all outputs. Streams of one warp lie block after block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from paceline.latency.plan import PIECE, TILE, LatencyPlan
from paceline.models.decoder import DecoderLayer, DecoderModel


class PackedWeights:
    """The streams of all blocks and warps.

    data: [plan.packed_bytes / 2] bfloat16; starts: [warps, 2] int64, where the first block's stream
    of a warp begins and how long one is, in bytes.
    """

    def __init__(self, model: DecoderModel, plan: LatencyPlan) -> None:
        """Copies layer by layer; needs little memory beside the result."""
        device = model.embedding.weight.device
        sizes = plan.stream_bytes
        self.data = torch.zeros(plan.packed_bytes // 2, dtype=torch.bfloat16, device=device)
        starts, streams, start = [], [], 0
        for size in sizes:
            starts.append([start, size])
            end = start + plan.blocks * size
            streams.append(self.data[start // 2 : end // 2].view(plan.blocks, -1))
            start = end
        self.starts = torch.tensor(starts, dtype=torch.int64, device=device)
        filled = [0] * plan.warps
        with torch.no_grad():
            for parts in _parts(model, plan):
                for warp, part in enumerate(parts):
                    end = filled[warp] + part.shape[1]
                    streams[warp][:, filled[warp] : end] = part
                    filled[warp] = end


def _parts(model: DecoderModel, plan: LatencyPlan) -> Iterator[list[torch.Tensor]]:
    """Each product's weights by warp, [blocks, elements] each, in the order of the stream."""
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        qkv, output = layer.attention.qkv.weight, layer.attention.output.weight
        gate_up, down = layer.mlp.gate_up.weight, layer.mlp.down.weight
        assert qkv is not None  # only a CPU packs weights in its own way
        assert output is not None
        assert gate_up is not None
        assert down is not None
        gate, up = gate_up.chunk(2)
        yield _by_tiles(plan, _qkv_by_block(plan, qkv))
        yield _by_tiles(plan, _by_block(plan, output))
        yield _by_tiles(plan, _interleaved(_by_block(plan, gate), _by_block(plan, up)))
        yield _by_pieces(plan, _by_block(plan, down))
    assert model.head.matrix is not None
    yield _by_tiles(plan, _by_block(plan, model.head.matrix.weight))


def _by_block(plan: LatencyPlan, weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] -> [blocks, outputs of a block, pieces, 32], zeros behind the last."""
    outputs, inputs = weight.shape
    missing = plan.outputs(outputs) * plan.blocks - outputs
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    return padded.view(plan.blocks, -1, inputs // PIECE, PIECE)


def _qkv_by_block(plan: LatencyPlan, weight: torch.Tensor) -> torch.Tensor:
    """The same of the fused qkv matrix, whose outputs ``plan.qkv_rows`` puts into order."""
    rows = torch.tensor(plan.qkv_rows(), device=weight.device)
    found = weight[rows].masked_fill((rows < 0).unsqueeze(2), 0.0)
    return found.view(plan.blocks, rows.shape[1], -1, PIECE)


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two matrices by block -> one, with 8 (at last fewer) outputs of each in turn."""
    half = TILE // 2
    whole = gate.shape[1] // half * half
    blocks, _, pieces, _ = gate.shape
    both = torch.stack((gate[:, :whole], up[:, :whole]), 1)
    tiles = both.view(blocks, 2, whole // half, half, pieces, PIECE).transpose(1, 2)
    mixed = tiles.reshape(blocks, 2 * whole, pieces, PIECE)
    return torch.cat((mixed, gate[:, whole:], up[:, whole:]), 1)


def _by_tiles(plan: LatencyPlan, weight: torch.Tensor) -> list[torch.Tensor]:
    """[blocks, outputs, pieces, 32] -> each warp's [blocks, elements]: tile, piece, output."""
    blocks, outputs, pieces, _ = weight.shape
    whole = outputs // TILE * TILE
    found = []
    for first, count in plan.slices(pieces * PIECE):
        mine = weight[:, :, first : first + count]
        tiles = mine[:, :whole].reshape(blocks, whole // TILE, TILE, count, PIECE).transpose(2, 3)
        rest = mine[:, whole:].transpose(1, 2)
        found.append(torch.cat((tiles.reshape(blocks, -1), rest.reshape(blocks, -1)), 1))
    return found


def _by_pieces(plan: LatencyPlan, weight: torch.Tensor) -> list[torch.Tensor]:
    """[blocks, outputs, pieces, 32] -> each warp's [blocks, elements]: piece, output."""
    blocks, _, pieces, _ = weight.shape
    return [
        weight[:, :, first : first + count].transpose(1, 2).reshape(blocks, -1)
        for first, count in plan.slices(pieces * PIECE)
    ]
