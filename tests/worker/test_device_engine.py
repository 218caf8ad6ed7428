"""The device runner gives the tokens of the CPU runner.

Without a GPU its kernels run in Triton's interpreter and nothing is captured; with one, graphs are
captured and the same requests must come out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.core.stats import EngineStats
from paceline.engine_args import EngineArgs
from paceline.errors import CapacityError
from paceline.outputs import RequestOutput
from paceline.worker import start
from triton_kernels import DEVICE, load

PROMPTS = [
    "In a paceline the riders",
    "def add(first",
    "one two one two one two one",
    "x",
]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=9, top_p=0.9, ignore_eos=True),
    SamplingParams(
        temperature=0.8,
        seed=4,
        max_tokens=10,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={7: 12.0},  # repeats itself, for the lookup
        ignore_eos=True,
    ),
    SamplingParams(temperature=0, max_tokens=7, logprobs=2, prompt_logprobs=1, stop=["zzz"]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("device-engine")
    return write_tiny_model(root / "target"), write_tiny_model(root / "draft", perturb=0.05)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines use the device runner, in the interpreter if there is no device.

    Its parameter, if any, is the number of host blocks for preempted sequences.
    """
    build = load("paceline.worker.device_build")
    host_blocks: int = getattr(request, "param", 0)

    def start_runner(config: EngineConfig, max_k: int) -> start.Started:
        cache = dataclasses.replace(config.cache, num_host_blocks=host_blocks)
        config = dataclasses.replace(config, cache=cache)
        builder = build.DeviceBuilder(config, max_k, DEVICE)
        return start.Started(builder.build(), builder.config, delay=1)

    from paceline import ops

    before = dict(ops._chosen)
    monkeypatch.setattr(start, "start_runner", start_runner)
    yield
    ops._chosen.clear()
    ops._chosen.update(before)


def run(target: Path, **options: Any) -> list[RequestOutput]:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "max_num_seqs": 3,
        "num_gpu_blocks_override": 40,
        "disable_log_stats": True,
        **options,
    }
    with LLM(str(target), **settings) as llm:
        return llm.generate(PROMPTS, SAMPLING, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[RequestOutput]:
    return run(models[0])


DRAFTERS: list[dict[str, Any]] = [
    {},
    {"speculative_model": "draft", "num_speculative_tokens": 3},
    {"speculative_model": "[ngram]", "num_speculative_tokens": 2, "ngram_prompt_lookup_min": 1},
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=["plain", "draft_model", "ngram"])
def test_same_tokens_as_on_the_cpu(
    models: tuple[Path, Path],
    expected: list[RequestOutput],
    on_device: None,
    drafter: dict[str, Any],
) -> None:
    if drafter.get("speculative_model") == "draft":
        drafter = {**drafter, "speculative_model": str(models[1])}
    found = run(models[0], **drafter)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason
    drafted = sum(o.metrics.speculative_decoding.num_draft_tokens for o in found)
    assert (drafted > 0) == bool(drafter)
    _same_logprobs(found[3], expected[3])


def _same_logprobs(found: RequestOutput, expected: RequestOutput) -> None:
    ours, theirs = found.outputs[0].logprobs, expected.outputs[0].logprobs
    assert ours is not None
    assert theirs is not None
    pairs = list(zip(ours, theirs, strict=True))
    assert found.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    pairs += [
        (a, b)
        for a, b in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True)
        if a is not None and b is not None
    ]
    for a, b in pairs:
        assert a.keys() == b.keys()
        for token in a:
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)
            assert a[token].rank == b[token].rank


CROWD = [[5, 6, 7, 8, 9], [11, 12, 13], [5, 6, 7, 8, 9, 10, 11]]


def run_crowd(target: Path, blocks: int, **options: Any) -> tuple[list[list[int]], EngineStats]:
    """Greedy outputs of ``CROWD`` in a pool of so many blocks, and the engine's counters."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(
        str(target),
        dtype="float32",
        device="cpu",
        max_model_len=48,
        max_num_seqs=3,
        block_size=4,
        num_gpu_blocks_override=blocks,
        disable_log_stats=True,
        **options,
    ) as llm:
        outputs = llm.generate(CROWD, greedy, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs], llm.engine.stats


@pytest.fixture(scope="module")
def crowd_tokens(models: tuple[Path, Path]) -> list[list[int]]:
    tokens, stats = run_crowd(models[0], 100)
    assert stats.num_preemptions == 0
    return tokens


@pytest.mark.parametrize(
    ("on_device", "drafter"), [(2, False), (40, False), (40, True)], indirect=["on_device"]
)
def test_swapped_sequences_go_on_with_the_same_tokens(
    models: tuple[Path, Path],
    crowd_tokens: list[list[int]],
    on_device: None,
    request: pytest.FixtureRequest,
    drafter: bool,
) -> None:
    """A pool in which sequences are put back, with too little host memory and with enough."""
    pair = {"speculative_model": str(models[1]), "num_speculative_tokens": 2} if drafter else {}
    tokens, stats = run_crowd(models[0], 14, **pair)
    assert tokens == crowd_tokens
    assert stats.num_preemptions > 0
    swapped = request.node.callspec.params["on_device"] == 40
    assert (stats.num_blocks_swapped_in > 0) == swapped
    assert stats.num_blocks_swapped_in == stats.num_blocks_swapped_out
    assert (stats.num_draft_tokens > 0) == drafter


def test_out_of_device_memory_is_one_message(
    models: tuple[Path, Path], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = load("paceline.worker.device_build")

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(build, "create_model", fail)
        with pytest.raises(CapacityError, match=r"allocating the weights of .*target.*hint: "):
            run(models[0])
    with monkeypatch.context() as patch:
        patch.setattr(build, "DecodeStep", fail)
        with pytest.raises(CapacityError, match=r"scratch.*lower max_num_seqs \(3\)") as caught:
            run(models[0])
    assert caught.value.__context__ is None  # torch's error would keep what was allocated


def test_out_of_memory_while_starting_names_the_part(
    models: tuple[Path, Path], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = load("paceline.worker.device_build")

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    for owner, name, words in (
        (build.DeviceBuilder, "_compile", r"largest passes.*lower max_num_batched_tokens \(\d+\)"),
        (build.LatencyPath, "pack", "packing weights.*latency_path=off"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(CapacityError, match=words):
                run(models[0])


def test_weights_are_packed_once(
    models: tuple[Path, Path], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy at the same time could be what does not fit."""
    packed: list[str] = []
    path = load("paceline.worker.device_build").LatencyPath
    monkeypatch.setattr(path, "pack", lambda self, side: packed.append(self.name))
    run(models[0], speculative_model=str(models[1]), num_speculative_tokens=2)
    assert packed == list(map(str, models))


def test_other_errors_stay_what_they_are(
    models: tuple[Path, Path], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(load("paceline.worker.device_build"), "fill_model", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(models[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="pretends to be on a card")
def test_the_pool_takes_what_measuring_leaves(
    models: tuple[Path, Path], on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the figures of a card, as its memory functions would give them."""
    build = load("paceline.worker.device_build")
    config = EngineArgs.from_kwargs(
        model=str(models[0]),
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=8,
    ).resolve()
    builder = build.DeviceBuilder(config, 0, DEVICE)
    runner = builder.build()
    # A graph of a measuring pass would hold on to KV tensors that are replaced: none is captured.
    runner.decode.graphs.enabled = True
    gib = 1024**3
    # 5 GiB of another engine in this process, then 3 of the target, 1 of the drafter, 2 of state.
    figures: dict[str, Callable[[], Any]] = {
        "memory_allocated": lambda: 11 * gib,
        "max_memory_allocated": iter([12 * gib, int(11.5 * gib)]).__next__,
        "mem_get_info": lambda: (8 * gib, 24 * gib),
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
    }
    for name, function in figures.items():
        monkeypatch.setattr(torch.cuda, name, function)
    cache = dataclasses.replace(builder.config.cache, gpu_memory_utilization=0.9)
    builder.config = dataclasses.replace(builder.config, cache=cache)
    with torch.inference_mode():
        builder._size_pool(runner, [5 * gib, 8 * gib, 9 * gib], [])
    # What is in use, 16, then prefill 1; as it is captured too, its 1 counts again; spare 0.5.
    left = int(0.9 * 24 * gib) - int(18.5 * gib)
    block = 16 * config.model.arch.kv_bytes_per_token(4)
    assert builder.config.cache.num_blocks == left // block - 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib, 24 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12 * gib)
    refused = pytest.raises(
        CapacityError, match=r"target weights 3.00, drafter weights 1.00, .*hint"
    )
    with torch.inference_mode(), refused:
        builder._size_pool(runner, [5 * gib, 8 * gib, 9 * gib], [])
    runner.close()


def test_a_smaller_pool_lowers_a_length_that_nobody_asked_for(
    models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    build = load("paceline.worker.device_build")
    config = EngineArgs.from_kwargs(model=str(models[0]), device="cpu").resolve()
    same = build._with_pool(config, 1000)
    assert same.scheduler == config.scheduler
    assert same.cache.num_blocks == 1000
    less = build._with_pool(config, 5)
    assert less.scheduler.max_model_len == less.model.max_model_len == 81
    assert "lowered from 2048 to 81" in caplog.text


def test_a_row_with_bad_logits_fails_alone(
    models: tuple[Path, Path], tmp_path: Path, on_device: None
) -> None:
    """The embedding of one id is NaN: who meets it fails, the others go on."""
    from safetensors.torch import load_file, save_file

    target = write_tiny_model(tmp_path / "damaged")
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={9: -100})
    with LLM(
        str(target),
        dtype="float32",
        device="cpu",
        max_model_len=64,
        max_num_seqs=2,
        num_gpu_blocks_override=16,
        disable_log_stats=True,
    ) as llm:
        good, bad = llm.generate([[5, 6, 7], [5, 9, 7]], greedy, use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 4
    assert bad.outputs[0].finish_reason == "error"
