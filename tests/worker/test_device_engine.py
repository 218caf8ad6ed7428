"""The device runner gives the tokens of the CPU runner.

Without a GPU its kernels run in Triton's interpreter and nothing is captured; with one, graphs are
captured and the same requests must come out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
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
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines use the device runner, in the interpreter if there is no device."""
    build = load("paceline.worker.device_build")

    def start_runner(config: EngineConfig, max_k: int) -> start.Started:
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
