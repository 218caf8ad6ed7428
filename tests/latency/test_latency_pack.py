"""The packed streams, walked as the kernel walks them."""

from __future__ import annotations

import pytest
import torch

from latency.latency_models import planned, random_model, small_arch
from paceline.latency.pack import PackedWeights
from paceline.latency.plan import PIECE, TILE, LatencyPlan


class Walk:
    """One warp's stream of one block: takes items in order and multiplies them."""

    def __init__(self, plan: LatencyPlan, packed: PackedWeights, block: int, warp: int) -> None:
        start, size = packed.starts[warp].tolist()
        first = (start + block * size) // 2
        self.data = packed.data[first : first + size // 2].double()
        self.plan = plan
        self.warp = warp
        self.at = 0

    def item(self, outputs: int, x: torch.Tensor, piece: int) -> torch.Tensor:
        """The next item, ``outputs`` by 32, times a piece of the activations."""
        weights = self.data[self.at : self.at + outputs * PIECE].view(outputs, PIECE)
        self.at += outputs * PIECE
        return weights @ x[piece * PIECE : (piece + 1) * PIECE]

    def tiles(self, outputs: int, x: torch.Tensor) -> torch.Tensor:
        """A product whose tiles follow one another."""
        first, count = self.plan.slices(len(x))[self.warp]
        sums = []
        for tile in range(0, outputs, TILE):
            size = min(TILE, outputs - tile)
            part = torch.zeros(size, dtype=torch.double)
            for piece in range(first, first + count):
                part += self.item(size, x, piece)
            sums.append(part)
        return torch.cat(sums)

    def pieces(self, outputs: int, x: torch.Tensor) -> torch.Tensor:
        """A product whose pieces follow one another."""
        first, count = self.plan.slices(len(x))[self.warp]
        sums = torch.zeros(outputs, dtype=torch.double)
        for piece in range(first, first + count):
            sums += self.item(outputs, x, piece)
        return sums


def multiplied(
    plan: LatencyPlan, walks: list[list[Walk]], method: str, outputs: int, x: torch.Tensor
) -> torch.Tensor:
    """Every block's outputs of the next product, one block after another."""
    return torch.cat(
        [sum(getattr(walk, method)(outputs, x) for walk in of_block) for of_block in walks]  # type: ignore[misc]
    )


def gates_and_ups(plan: LatencyPlan, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo the tiles of 8 gates and 8 ups."""
    gates, ups = [], []
    for block in mixed.view(plan.blocks, -1):
        for tile in block.split(TILE):
            gate, up = tile.chunk(2)
            gates.append(gate)
            ups.append(up)
    return torch.cat(gates), torch.cat(ups)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 192, "num_attention_heads": 6, "num_kv_heads": 2, "num_layers": 3,
         "sliding_window": (None,) * 3},
        {"tie_word_embeddings": False, "intermediate_size": 1952},
    ],
)  # fmt: skip
def test_products_of_the_streams(changes: dict[str, object]) -> None:
    arch = small_arch(**changes)
    plan = planned(arch)
    model = random_model(arch)
    packed = PackedWeights(model, plan)
    assert packed.data.numel() * 2 == plan.packed_bytes
    walks = [
        [Walk(plan, packed, block, warp) for warp in range(plan.warps)]
        for block in range(plan.blocks)
    ]
    generator = torch.Generator().manual_seed(1)

    def close(found: torch.Tensor, weight: torch.Tensor | None, x: torch.Tensor) -> None:
        assert weight is not None
        expected = weight.double() @ x
        torch.testing.assert_close(found[: len(expected)], expected)
        assert not found[len(expected) :].any()  # padding

    def noise(size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.double, generator=generator)

    hidden, inner = arch.hidden_size, arch.intermediate_size
    for layer in model.layers:
        x = noise(hidden)
        found = multiplied(plan, walks, "tiles", plan.qkv_outputs, x)
        rows = torch.tensor(plan.qkv_rows()).flatten()
        assert not found[rows < 0].any()
        assert sorted(rows[rows >= 0].tolist()) == list(range(plan.qkv_dim))
        expected = layer.attention.qkv.weight.double() @ x
        torch.testing.assert_close(found[rows >= 0], expected[rows[rows >= 0]])
        x = noise(plan.q_dim)
        found = multiplied(plan, walks, "tiles", plan.outputs(hidden), x)
        close(found, layer.attention.output.weight, x)
        x = noise(hidden)
        mixed = multiplied(plan, walks, "tiles", 2 * plan.outputs(inner), x)
        both = layer.mlp.gate_up.weight.chunk(2)
        for found, weight in zip(gates_and_ups(plan, mixed), both, strict=True):
            close(found, weight, x)
        x = noise(inner)
        found = multiplied(plan, walks, "pieces", plan.outputs(hidden), x)
        close(found, layer.mlp.down.weight, x)
    x = noise(hidden)
    found = multiplied(plan, walks, "tiles", plan.outputs(arch.vocab_size), x)
    assert model.head.matrix is not None
    close(found, model.head.matrix.weight, x)
    for of_block in walks:
        for walk in of_block:
            assert not walk.data[walk.at :].any()  # up to a whole chunk
