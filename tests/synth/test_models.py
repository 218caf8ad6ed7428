"""Synthetic models, in transformers and in the engine, do what they were made to do."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_shapes import FAMILIES, TINY, plan_of

from paceline import LLM, SamplingParams
from paceline.arrays import Int64Array
from paceline.models.hf_config import read_hf_config
from paceline.models.weights import check_weights, expected_weights
from paceline.synth.pair import NEXT_IDS, draw_map, write_pair
from paceline.synth.shapes import SHAPES
from paceline.synth.weights import SyntheticWeights


def load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    finally:
        logger.setLevel(level)


def map_of(path: Path) -> Int64Array:
    following: Int64Array = np.load(path / NEXT_IDS).astype(np.int64)
    return following


def walk(following: Int64Array, first: int, count: int) -> list[int]:
    """The ``count`` ids after ``first``."""
    ids = [first]
    for _ in range(count):
        ids.append(int(following[ids[-1]]))
    return ids[1:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", ["target", "drafter"])
def test_every_id_is_followed_by_its_next(family: str, model: str, pairs: dict[str, Path]) -> None:
    """At all positions, behind random ids of every kind, by a margin that sampling cannot cross."""
    path = pairs[family] / model
    following = torch.from_numpy(map_of(path))
    rows = len(following)
    generator = torch.Generator().manual_seed(2)
    ids = torch.cat([torch.randperm(rows, generator=generator) for _ in range(2)])
    original = load(path, torch.bfloat16)
    with torch.inference_mode():
        for part in ids.split(2048):
            output = original(part[None], output_hidden_states=True)
            logits = output.logits[0].float()
            assert torch.equal(logits.argmax(-1), following[part])
            first, second = logits.topk(2).values.T
            assert (first - second).min() > 30
            assert torch.softmax(logits / 2, -1).max(-1).values.min() > 0.9999
            largest = max(float(hidden.abs().max()) for hidden in output.hidden_states)
            assert largest < 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_chains_follow_the_map(
    family: str, dtype: torch.dtype, pairs: dict[str, Path]
) -> None:
    path = pairs[family] / "target"
    following = map_of(path)
    prompts = torch.randint(0, len(following), (4, 9), generator=torch.Generator().manual_seed(1))
    model = load(path, dtype)
    model.generation_config.pad_token_id = None
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=300,
            do_sample=False,
        )
    for row in output.tolist():
        assert row[9:] == walk(following, row[8], 300)
        assert len(set(row[9:])) == 300


def test_a_drafter_agrees_at_the_rate_set(pairs: dict[str, Path]) -> None:
    target, drafter = (map_of(pairs["qwen2"] / model) for model in ("target", "drafter"))
    words = np.arange(356, TINY.vocabulary.plain)
    assert (target[words] == drafter[words]).sum() == round(0.8 * len(words))
    # Bytes, special tokens and padding go on as their stand-ins, in both models.
    others = np.arange(356)
    assert 0.6 < (target[others] == drafter[others]).mean() < 0.95


@pytest.mark.parametrize("family", ["qwen2", "qwen3-own-head", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_accepts_drafts_at_the_rate_set(
    family: str, temperature: float, pairs: dict[str, Path]
) -> None:
    path = pairs[family]
    following = map_of(path / "target")
    rng = np.random.default_rng(4)
    prompts = [{"prompt_token_ids": rng.integers(0, 4096, 8).tolist()} for _ in range(12)]
    with LLM(
        str(path / "target"),
        speculative_model=str(path / "drafter"),
        num_speculative_tokens=4,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=12,
        disable_log_stats=True,
    ) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=300, seed=1)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats
        proposed, accepted = stats.proposed_by_position, stats.accepted_by_position
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = walk(following, prompt["prompt_token_ids"][-1], 300)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].finish_reason == "length"
    for i in range(4):
        share, count = 0.8 ** (i + 1), int(proposed[i])
        assert count > 500
        sigma = (share * (1 - share) / count) ** 0.5
        assert abs(accepted[i] / count - share) < 4 * sigma


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 0), (1.0, 200)])
def test_drafts_can_be_wrong_or_right_without_exception(
    acceptance: float, expected: int, tmp_path: Path
) -> None:
    write_pair(plan_of(TINY, TINY, tmp_path, acceptance=acceptance))
    target, drafter = (map_of(tmp_path / model) for model in ("target", "drafter"))
    words = np.arange(356, TINY.vocabulary.plain)
    agreeing = (target[words] == drafter[words]).sum()
    assert agreeing == (0 if acceptance == 0 else len(words))
    model = load(tmp_path / "drafter", torch.bfloat16)
    ids = torch.from_numpy(words[:200])
    with torch.inference_mode():
        found = model(ids[None]).logits[0].argmax(-1).numpy()
    assert (found == target[words[:200]]).sum() == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_are_those_of_the_architecture(family: str, pairs: dict[str, Path]) -> None:
    for model in ("target", "drafter"):
        path = pairs[family] / model
        arch = read_hf_config(path)
        assert check_weights(path, arch)  # names and shapes, nothing missing or left over
        assert arch.vocab_size == len(map_of(path))


def weights_of(name: str, *, seed: str = "1") -> SyntheticWeights:
    shape = FAMILIES[name]
    cycles, stand_ins = draw_map(plan_of(shape, None, Path("unused")), shape.rows)
    return SyntheticWeights(shape.arch(), cycles["target"], stand_ins, seed, torch.float32, "cpu")


@pytest.mark.parametrize("family", ["qwen3", "llama-own-head"])
def test_every_matrix_is_dense_and_random(family: str) -> None:
    weights, others = weights_of(family), weights_of(family, seed="2")
    for name, shape in expected_weights(FAMILIES[family].arch()).items():
        tensor = weights.make(name, shape)
        assert tensor.shape == shape
        if name == "model.norm.weight":
            assert (tensor != 0).sum() == len(tensor) - 2
            continue
        assert (tensor == 0).float().mean() < 1e-3, name  # sines have zeros
        assert torch.equal(tensor, weights.make(name, shape)), name
        assert not torch.equal(tensor, others.make(name, shape)), name
        if len(shape) == 2 and "layers" in name:
            assert torch.linalg.matrix_rank(tensor) >= 0.99 * min(shape), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_features_of_two_places_are_nearly_orthogonal(shape: Any) -> None:
    """For the default seed, over all distances on the cycle: a Fourier transform of the steps."""
    length = 3740 if shape.name == "tiny" else shape.vocabulary.plain - 356
    rng = np.random.default_rng(SyntheticWeights.key("0/drafter", "features"))
    pairs = shape.hidden_size // 2 - 1
    spectrum = np.zeros(length // 2 + 1)
    spectrum[1 + rng.choice((length - 1) // 2, pairs, replace=False)] = 1
    similarity = np.fft.irfft(spectrum, length) * length / 2 / pairs
    assert similarity[0] == pytest.approx(1.0)
    assert similarity[1:].max() < (0.35 if shape.name == "tiny" else 0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_writes_other_weights_and_the_same_map(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        plan = plan_of(TINY, TINY, tmp_path / device)
        write_pair(replace(plan, device=device))
    for model in ("target", "drafter"):
        following = map_of(tmp_path / "cuda" / model)
        assert np.array_equal(following, map_of(tmp_path / "cpu" / model))
        with torch.inference_mode():
            ids = torch.arange(len(following))[None, :4096]
            found = load(tmp_path / "cuda" / model, torch.bfloat16)(ids).logits[0].argmax(-1)
        assert np.array_equal(found.numpy(), following[:4096])
