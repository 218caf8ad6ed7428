"""The kernel against float32, bit by bit, in graphs, and when something goes wrong.

On a Hopper card it runs there, with the plan's layout; elsewhere in the emulator, which needs
minutes for large models, with few thread blocks and short splits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib import resources

import pytest
import torch

from latency import emulator
from latency.latency_models import (
    LARGE,
    SMALL,
    Rows,
    distance,
    in_float32,
    planned,
    random_model,
    small_arch,
)
from paceline.attention.reference import ReferenceAttention
from paceline.config import ModelArch, ModelConfig
from paceline.distributed.tp_group import SingleProcessGroup
from paceline.errors import ConfigError, EngineError
from paceline.latency import forward as module
from paceline.latency.forward import LatencyForward
from paceline.latency.pack import PackedWeights
from paceline.latency.plan import MIN_CAPABILITY, LatencyPlan
from paceline.models.decoder import DecoderModel
from paceline.models.hf_config import parse_hf_config
from paceline.models.loader import load_model

ON_CARD = torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY
DEVICE = "cuda" if ON_CARD else "cpu"
FEW_BLOCKS = {"blocks": 5, "warps": 4, "split_keys": 96}  # nothing divides, contexts are split
PASSES = [  # contexts, rows, tokens of each
    ([0], [0], 1),
    ([95], [0], 1),
    ([15, 200], [1, 0], 1),
    ([92], [0], 8),
    ([100, 5, 230], [2, 0], 2),
    ([180, 12, 45, 0, 96, 97, 100, 47], [7, 6, 5, 4, 3, 2, 1, 0], 1),
    ([92], [0], 16),
    ([100, 5], [1, 0], 5),
    ([40, 97, 3, 150], [2, 0, 1, 3], 3),
    ([7 * i for i in range(16)], [*range(15, -1, -1)], 1),
]
LONG_PASSES = [
    ([500], [0], 1),
    ([440], [0], 8),
    ([300, 5, 700], [2, 0], 3),
    ([17, 900, 1500, 445], [1, 3, 2, 0], 2),
    ([1800, 12, 450, 0, 511, 513, 1000, 479], [7, 6, 5, 4, 3, 2, 1, 0], 1),
    ([440, 1800], [1, 0], 8),
    ([110 * i for i in range(16)], [*range(15, -1, -1)], 1),
]


@pytest.fixture(scope="module", autouse=True)
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Without a card, the emulator in its place."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_CARD:
            emulator.install(patch, tmp_path_factory.mktemp("kernels"))
        yield


@dataclasses.dataclass
class Packed:
    """A model, its layout and packed weights."""

    model: DecoderModel
    plan: LatencyPlan
    weights: PackedWeights

    def forward(self, rows: Rows) -> LatencyForward:
        return LatencyForward(self.model, rows.kv_caches, self.plan, packed=self.weights)


def layout(arch: ModelArch) -> LatencyPlan:
    found = planned(arch)
    return found if ON_CARD else dataclasses.replace(found, **FEW_BLOCKS)


def pack(model: DecoderModel) -> Packed:
    plan = layout(model.arch)
    return Packed(model, plan, PackedWeights(model, plan))


def demo() -> DecoderModel:
    """The demo drafter, with its trained weights."""
    with resources.as_file(resources.files("paceline.assets") / "demo-draft") as path:
        arch = parse_hf_config(json.loads((path / "config.json").read_text()), "demo-draft")
        config = ModelConfig("demo-draft", str(path), arch, "bfloat16", 2048)
        return load_model(config, DEVICE, ReferenceAttention(), SingleProcessGroup())


@pytest.fixture(scope="module", params=[*SMALL, *LARGE, "demo"])
def case(request: pytest.FixtureRequest) -> Packed:
    name = request.param
    if name not in SMALL and not ON_CARD:
        pytest.skip("too large for the emulator")
    return pack(demo() if name == "demo" else random_model((SMALL | LARGE)[name], DEVICE))


@pytest.mark.parametrize(
    ("contexts", "rows", "query_len"), [*PASSES, *(LONG_PASSES if ON_CARD else [])]
)
def test_equals_a_float32_forward(
    case: Packed, contexts: list[int], rows: list[int], query_len: int
) -> None:
    state = Rows(case.model.arch, contexts, DEVICE)
    forward = case.forward(state)
    expected, kv = state.reference(in_float32(case.model), rows, query_len)
    first = state.run(forward, rows, query_len)
    forward.check()
    slots = state.slots(rows, query_len)
    assert max(map(distance, first, expected)) < 3e-2  # bfloat16 torch: about as much
    assert distance(state.written(slots), kv) < 2e-2
    for now, before in zip(state.kv_caches, state.before, strict=True):
        for cache, content in zip(now, before, strict=True):
            size = cache.shape[2] * cache.shape[3]
            expected_cache = content.clone()
            expected_cache.view(-1, size)[slots] = cache.view(-1, size)[slots]
            assert torch.equal(cache, expected_cache)  # nothing else was written
    for _ in range(2):  # odd layer counts begin with the other exchange buffer each time
        assert torch.equal(state.run(forward, rows, query_len), first)


@pytest.mark.parametrize("context", [90, *([0, 17, 300, 445, 1000] if ON_CARD else [])])
def test_bits_do_not_depend_on_cut_or_company(case: Packed, context: int) -> None:
    """16 tokens of a sequence one by one, in runs, and beside other sequences."""
    state = Rows(case.model.arch, [max(0, context - 11 * i) for i in range(16)], DEVICE)
    forward = case.forward(state)
    slots = state.slots([0], 16)

    def runs(*lengths: int) -> torch.Tensor:
        state.restore()
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        parts = zip(lengths, starts, strict=True)
        return torch.cat([state.run(forward, [0], length, start) for length, start in parts])

    def beside(rows: list[int], length: int) -> torch.Tensor:
        state.restore()
        found = []
        for start in range(0, 16, length):
            logits = state.run(forward, rows, length, start)
            found.append(logits.view(len(rows), length, -1)[rows.index(0)])
        return torch.cat(found)

    alone = runs(*[1] * 16)
    kv = state.written(slots)
    assert torch.isfinite(alone).all()
    for lengths in ([16], [8, 8], [10, 6], [1, 12, 3]):
        assert torch.equal(runs(*lengths), alone)
        assert torch.equal(state.written(slots), kv)
    assert torch.equal(beside([5, 1, 2, 0, 4, 3, 6, 7], 1), alone)
    assert torch.equal(beside([*range(15, -1, -1)], 1), alone)
    assert torch.equal(beside([3, 0], 4), alone)
    assert torch.equal(beside([3, 0, 2, 7], 4), alone)
    assert torch.equal(state.written(slots), kv)


def test_more_inputs_than_registers_hold() -> None:
    """As in models of 7B: a few activations of ``down`` under way, norm weights loaded late."""
    arch = small_arch(
        head_dim=128, num_attention_heads=4, num_kv_heads=2, hidden_size=1184,
        intermediate_size=1696,
    )  # fmt: skip
    case = pack(random_model(arch, DEVICE))
    state = Rows(arch, [92, 40], DEVICE)
    forward = case.forward(state)
    expected, kv = state.reference(in_float32(case.model), [1, 0], 8)
    found = state.run(forward, [1, 0], 8)
    assert max(map(distance, found, expected)) < 3e-2
    assert distance(state.written(state.slots([1, 0], 8)), kv) < 2e-2
    state.restore()
    assert torch.equal(state.run(forward, [0], 8), found[8:])
    state.restore()
    assert torch.equal(state.run(forward, [0]), found[8:9])


@pytest.mark.skipif(not ON_CARD, reason="needs a card")
def test_in_a_graph(case: Packed) -> None:
    state = Rows(case.model.arch, [300, 40], DEVICE)
    forward = case.forward(state)
    expected = state.run(forward, [1, 0])
    state.restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = state.run(forward, [1, 0])
    for _ in range(3):
        logits.fill_(torch.nan)
        graph.replay()
        assert torch.equal(logits, expected)


def test_rows_without_a_token_write_nothing(case: Packed) -> None:
    """Inactive rows, the null row, and the token before a sequence's first."""
    state = Rows(case.model.arch, [100, 40, 0], DEVICE)
    forward = case.forward(state)
    expected = state.run(forward, [0])
    state.restore()
    state.active[1] = 0
    found = state.run(forward, [1, 0, 3, 3])
    assert torch.equal(found[1:2], expected)
    assert torch.isfinite(found).all()
    everywhere = torch.arange(state.kv_caches[0][0].shape[0] * 16, device=DEVICE)
    after = state.written(everywhere)
    state.restore()
    changed = (after != state.written(everywhere)).any(3).any(1).any(0).nonzero().flatten()
    assert changed.tolist() == state.slots([0]).tolist()
    alone = state.run(forward, [2])
    state.restore()
    assert torch.equal(state.run(forward, [2], 2, -1)[1:], alone)  # from position -1 on


def test_nan_stays_in_its_row(case: Packed) -> None:
    state = Rows(case.model.arch, [100, 40], DEVICE)
    forward = case.forward(state)
    expected = state.run(forward, [0, 1])[:1]
    state.restore()
    state.kv_caches[0][1][state.block_table[1].long()] = torch.nan
    found = state.run(forward, [0, 1])
    forward.check()
    assert torch.equal(found[:1], expected)
    assert found[1].isnan().all()


def test_waiting_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thread blocks are missing: the others give up, and the next pass can work."""
    arch = SMALL["heads of 32, odd layers"]
    model, plan = random_model(arch, DEVICE), layout(arch)
    state = Rows(arch, [100], DEVICE)
    forward = LatencyForward(model, state.kv_caches, plan)
    options = plan.options(1) | {"SPIN_LIMIT": 1 << 12}
    forward.load(1, module.build(options, plan.card.capability))
    size = plan.shared_bytes(1)  # what the kernel was loaded for
    monkeypatch.setattr(LatencyPlan, "shared_bytes", lambda self, tokens: size)
    forward.plan = dataclasses.replace(plan, blocks=plan.blocks - 1)
    state.run(forward, [0])
    with pytest.raises(EngineError, match="the latency kernel gave up"):
        forward.check()
    forward.plan = plan
    forward.reset()
    state.restore()
    found = state.run(forward, [0])
    forward.check()
    expected, _ = state.reference(in_float32(model), [0])
    assert distance(found, expected) < 3e-2


def test_too_many_tokens_are_refused() -> None:
    arch = SMALL["heads of 32, odd layers"]
    state, model = Rows(arch, [40], DEVICE), random_model(arch, DEVICE)
    forward = LatencyForward(model, state.kv_caches, layout(arch), 4)
    with pytest.raises(ConfigError, match=r"of 5 tokens exceeds max_tokens \(4\)"):
        state.run(forward, [0], 5)
    with pytest.raises(ConfigError, match="1 to 16 tokens, not 17"):
        LatencyForward(model, state.kv_caches, layout(arch), 17)
