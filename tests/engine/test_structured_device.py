"""Structured outputs on the device runner: the tokens of the CPU runner, beside free rows.

Without a GPU its kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model

from e2e.engines import drain, make_engine, run, tokens
from paceline.config import EngineConfig
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams, StructuredOutputsParams
from paceline.worker import start
from paceline.worker.row_grammars import DEAD_END
from triton_kernels import DEVICE, load

pytest.importorskip("xgrammar")

PROMPTS = ["In a paceline the riders", "one two one two one", "x", "def add(first", "x y"]


def asking(structure: dict[str, Any], **sampling: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**structure), **sampling)


SAMPLING = [
    asking({"regex": "(one|two| ){4,9}"}, seed=1, max_tokens=8, logprobs=1),
    SamplingParams(temperature=0.8, seed=2, max_tokens=6, ignore_eos=True),
    asking({"choice": ["yes", "no"]}, temperature=0),
    asking({"json_object": True}, seed=4, max_tokens=7, top_p=0.9, frequency_penalty=0.4),
    asking({"regex": "[ab]{9}"}, seed=5, min_tokens=3, stop=["bb"]),
]
DRAFTERS: list[dict[str, Any]] = [
    {},
    {"speculative_model": "draft", "num_speculative_tokens": 3},
    {"speculative_model": "[ngram]", "num_speculative_tokens": 2, "ngram_prompt_lookup_min": 1},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("structured-device")
    return write_tiny_model(root / "target"), write_tiny_model(root / "draft", perturb=0.05)


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[RequestOutput]:
    engine = make_engine(models[0], max_model_len=64)
    found = run(engine, PROMPTS, SAMPLING)
    engine.close()
    return found


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines use the device runner, in the interpreter if there is no device."""
    from paceline import ops

    build = load("paceline.worker.device_build")

    def start_runner(config: EngineConfig, max_k: int) -> start.Started:
        builder = build.DeviceBuilder(config, max_k, DEVICE)
        return start.Started(builder.build(), builder.config, delay=1)

    before = dict(ops._chosen)
    monkeypatch.setattr(start, "start_runner", start_runner)
    yield
    ops._chosen.clear()
    ops._chosen.update(before)


def device_engine(path: Path, delay: int, **options: Any) -> Any:
    return make_engine(
        path, delay=delay, max_model_len=64, num_gpu_blocks_override=40, max_num_seqs=4, **options
    )


@pytest.mark.parametrize("drafter", DRAFTERS, ids=["plain", "draft_model", "ngram"])
def test_same_tokens_as_on_the_cpu(
    models: tuple[Path, Path], expected: list[RequestOutput], on_device: None, drafter: Any
) -> None:
    if drafter.get("speculative_model") == "draft":
        drafter = {**drafter, "speculative_model": str(models[1])}
    engine = device_engine(models[0], 1, **drafter)
    found = run(engine, PROMPTS, SAMPLING)
    assert tokens(found) == tokens(expected)
    ours, theirs = found[0].outputs[0].logprobs, expected[0].outputs[0].logprobs
    assert ours is not None
    assert theirs is not None
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for token in one:
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
    drafts = [found[i].metrics.speculative_decoding for i in (0, 3, 4)]
    assert (sum(d.num_draft_tokens for d in drafts) > 0) == bool(drafter)
    engine.close()


def test_one_pass_a_step_with_and_without_grammars(
    models: tuple[Path, Path], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = load("paceline.worker.decode_graphs").DecodeGraphs
    parts: dict[str, int] = {"draft": 0, "verify": 0, "run": 0}

    def counted(name: str) -> None:
        original = getattr(graphs, name)

        def count(self: Any, entries: int, k: int) -> Any:
            parts[name] += 1
            return original(self, entries, k)

        monkeypatch.setattr(graphs, name, count)

    for name in parts:
        counted(name)
    pair = {"speculative_model": str(models[1]), "num_speculative_tokens": 2}
    engine = device_engine(models[0], 1, **pair)
    run(engine, PROMPTS[:2], SamplingParams(seed=1, max_tokens=5, ignore_eos=True))
    assert parts["draft"] == parts["verify"] == 0
    alone = parts["run"]
    assert alone > 0
    run(engine, PROMPTS[:1], asking({"regex": "[a-z]{30}"}, seed=1, max_tokens=5))
    assert parts["draft"] > 0
    assert parts["verify"] > 0
    assert parts["run"] == alone
    # Beside a row with a grammar, others share its pass: the weights are read once a step.
    free = SamplingParams(seed=2, max_tokens=5, ignore_eos=True)
    run(engine, PROMPTS[:2], [asking({"regex": "[a-z]{30}"}, seed=1, max_tokens=20), free])
    assert parts["run"] == alone
    engine.close()


class Letters:
    """A grammar of the one token 40, ``length`` times, without an end."""

    fault = None

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_tokens = 0

    def accept(self, token_ids: Any) -> None:
        self.num_tokens += len(token_ids)

    def fill(self, drafts: Any, words: Any) -> int:
        left = self.length - self.num_tokens
        words[: max(left, 0), 40 // 32] = 1 << 40 % 32
        right = [*(drafts == 40), False].index(False)
        return min(right, left - 1)


@pytest.mark.parametrize("drafter", DRAFTERS[:2], ids=["plain", "draft_model"])
def test_a_dead_end_fails_its_own_row_only(
    models: tuple[Path, Path], on_device: None, drafter: Any
) -> None:
    if drafter:
        drafter = {**drafter, "speculative_model": str(models[1])}
    engine = device_engine(models[0], 1, **drafter)
    sampling = SamplingParams(seed=1, max_tokens=7, ignore_eos=True)
    for name, length in (("free", None), ("at once", 0), ("later", 4), ("whole", 7)):
        request = engine.make_request(name, "a text", sampling)
        if length is not None:
            request.sequences[0].grammar = Letters(length)
        engine.add_request(request)
    found = drain(engine)
    assert len(found["free"].outputs[0].token_ids) == 7
    assert found["whole"].outputs[0].token_ids == [40] * 7
    for name, length in (("at once", 0), ("later", 4)):
        assert found[name].outputs[0].token_ids == [40] * length
        assert found[name].error == DEAD_END
    engine.close()
