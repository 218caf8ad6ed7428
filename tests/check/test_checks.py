"""run_checks: every fault at once, the memory plan's arithmetic, and the report's forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_dirs import (
    CONFIG,
    num_parameters,
    write_json,
    write_model,
    write_tokenizer,
)
from paceline.check import CheckReport, gpu, machine, run_checks
from paceline.check.report import format_bytes, format_count
from paceline.engine_args import EngineArgs

KV_FLOAT32 = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, head_dim, bytes
GIB = 1024**3


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model"))


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 16 * GIB)
    monkeypatch.setattr(machine, "has_native_bfloat16", lambda: False)
    monkeypatch.setattr(gpu, "find_gpu", lambda: None)


def check(model: str, **kwargs: Any) -> CheckReport:
    return run_checks(EngineArgs.from_kwargs(model=model, **kwargs))


def causes(report: CheckReport) -> str:
    return "\n".join(fault.cause for fault in report.faults)


def facts(report: CheckReport) -> dict[str, Any]:
    found = report.to_json()["facts"]
    assert isinstance(found, dict)
    return found


# --- the plan ---


def test_plan_of_a_small_model(model: str) -> None:
    report = check(model, kv_cache_memory_bytes=101 * 16 * KV_FLOAT32, max_num_seqs=4)
    assert report.ok
    found = facts(report)
    assert found["target"]["num_parameters"] == num_parameters(CONFIG)
    assert found["target_weight_bytes"] == 4 * num_parameters(CONFIG)
    assert found["kv_bytes_per_token"] == KV_FLOAT32
    assert found["num_blocks"] == 100  # one more is the null block
    assert found["kv_pool_bytes"] == 101 * 16 * KV_FLOAT32
    assert found["max_model_len"] == 512
    assert found["fits_sequences_of_max_model_len"] == 3  # 32 blocks each
    assert found["token_budget"] == 2048
    assert report.config is not None
    assert report.config.cache.num_blocks == 100


def test_drafter_shares_the_blocks(model: str, tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "num_key_value_heads": 1}
    drafter = write_model(tmp_path / "drafter", **small)
    report = check(
        model,
        speculative_model=str(drafter),
        num_speculative_tokens=5,
        kv_cache_memory_bytes=11 * 16 * KV_FLOAT32 * 5 // 4,
    )
    found = facts(report)
    assert found["kv_bytes_per_token"] == KV_FLOAT32 * 5 // 4
    assert found["drafter_weight_bytes"] == 4 * num_parameters({**CONFIG, **small})
    assert found["num_blocks"] == 10
    assert "20% of it the drafter's" in report.to_text()


def test_default_pool_is_4_gib_or_a_share_of_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = str(write_model(tmp_path / "m", max_position_embeddings=2**20))
    assert 0 <= 4 * GIB - facts(check(long))["kv_pool_bytes"] < 16 * KV_FLOAT32
    monkeypatch.setattr(machine, "available_memory", lambda: 5 * GIB)
    assert 0 <= 2 * GIB - facts(check(long))["kv_pool_bytes"] < 16 * KV_FLOAT32
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert 0 <= 4 * GIB - facts(check(long))["kv_pool_bytes"] < 16 * KV_FLOAT32


def test_default_pool_leaves_room_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = str(write_model(tmp_path / "m", max_position_embeddings=2**20))
    weights = 4 * num_parameters(CONFIG)
    monkeypatch.setattr(machine, "available_memory", lambda: weights * 5 // 4)
    report = check(long)
    assert report.ok
    assert facts(report)["kv_pool_bytes"] <= weights // 4


def test_default_pool_is_no_larger_than_can_be_filled(model: str) -> None:
    assert facts(check(model, max_num_seqs=100))["num_blocks"] == 100 * 32
    assert facts(check(model, max_num_seqs=3))["num_blocks"] == 64 * 32
    assert facts(check(model, max_num_seqs=3, max_model_len=100))["num_blocks"] == 64 * 7


def test_unset_length_is_lowered_to_the_pool_and_an_explicit_one_is_not(model: str) -> None:
    report = check(model, num_gpu_blocks_override=4)
    assert report.ok
    assert facts(report)["max_model_len"] == 65  # the last token needs no KV
    assert any("lowered from 512" in warning for warning in report.warnings)
    assert check(model, num_gpu_blocks_override=4, max_model_len=65).ok
    report = check(model, num_gpu_blocks_override=4, max_model_len=66)
    assert "`max_model_len` (66) does not fit" in causes(report)
    assert "lower `max_model_len` to 65 or raise `num_gpu_blocks_override` to 5" in str(
        report.faults[0]
    )
    report = check(model, kv_cache_memory_bytes=5 * 16 * KV_FLOAT32, max_model_len=66)
    assert f"raise `kv_cache_memory_bytes` to {6 * 16 * KV_FLOAT32}" in report.faults[0].hint
    assert report.faults[0].about_memory


def test_blocks_override_wins_over_bytes(model: str) -> None:
    report = check(model, num_gpu_blocks_override=40, kv_cache_memory_bytes=1)
    assert facts(report)["num_blocks"] == 40


def test_length_above_the_models(model: str) -> None:
    assert "(513) is above the 512 positions" in causes(check(model, max_model_len=513))


def test_pool_without_a_block(model: str) -> None:
    report = check(model, kv_cache_memory_bytes=16 * KV_FLOAT32)
    assert "holds no block" in causes(report)
    assert str(2 * 16 * KV_FLOAT32) in report.faults[0].hint
    assert check(model, kv_cache_memory_bytes=2 * 16 * KV_FLOAT32).ok


def test_a_tied_head_may_be_kept_twice(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {}
    for packs in (False, True):
        monkeypatch.setattr(machine, "packs_weights", lambda dtype, packs=packs: packs)
        needed[packs] = facts(check(model))["needed_bytes"]
    assert needed[True] - needed[False] == 64 * 32 * 4


def test_more_than_the_machine_has(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 50_000)
    report = check(model)
    assert "not enough memory" in causes(report)
    assert "48.83 KiB are free" in causes(report)
    assert 'dtype="bfloat16"' in report.faults[0].hint


def test_token_budget(model: str) -> None:
    assert facts(check(model))["token_budget"] == 2048
    raised = check(model, speculative_model="[ngram]", num_speculative_tokens=15)
    assert facts(raised)["token_budget"] == 256 * 16
    assert facts(check(model, max_num_batched_tokens=256))["token_budget"] == 256
    assert "(255) is below `max_num_seqs` (256)" in causes(check(model, max_num_batched_tokens=255))
    less = {"max_num_batched_tokens": 300, "enable_chunked_prefill": False}
    assert "(300) is below the model length (512)" in causes(check(model, **less))
    assert check(model, max_model_len=300, **less).ok


def test_whole_prompts_without_chunks_raise_the_budget(tmp_path: Path) -> None:
    long = str(write_model(tmp_path / "m", max_position_embeddings=4096))
    assert facts(check(long, enable_chunked_prefill=False))["token_budget"] == 4096


@pytest.mark.parametrize(
    ("setting", "native", "dtype"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("half", True, "float16"),
        ("float", True, "float32"),
        ("bfloat16", False, "bfloat16"),
    ],
)
def test_dtype(
    model: str, monkeypatch: pytest.MonkeyPatch, setting: str, native: bool, dtype: str
) -> None:
    monkeypatch.setattr(machine, "has_native_bfloat16", lambda: native)
    config = check(model, dtype=setting).config
    assert config is not None
    assert config.model.dtype == dtype


def test_drafter_context(model: str, tmp_path: Path) -> None:
    drafter = str(write_model(tmp_path / "d", max_position_embeddings=64))
    pair = {"speculative_model": drafter, "num_speculative_tokens": 2}
    report = check(model, **pair)
    assert any("reaches 64 of 512" in warning for warning in report.warnings)
    for limit, reach in ((32, 32), (100, 64)):
        config = check(model, speculative_max_model_len=limit, **pair).config
        assert config is not None
        assert config.speculative is not None
        assert config.speculative.draft_max_model_len == reach


# --- tokenizer, stop ids, sampling defaults ---


def test_skip_tokenizer_init(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m", tokenizer=False))
    assert "has no tokenizer" in causes(check(model))
    config = check(model, skip_tokenizer_init=True).config
    assert config is not None
    assert (config.tokenizer.path, config.tokenizer.vocab_size) == (None, None)
    assert config.stop_token_ids == (40,)  # of config.json alone


def test_another_tokenizer(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m", tokenizer=False))
    tokenizer = str(write_tokenizer(tmp_path / "t"))
    config = check(model, tokenizer=tokenizer).config
    assert config is not None
    assert (config.tokenizer.path, config.tokenizer.vocab_size) == (tokenizer, 42)
    assert "no directory" in causes(check(model, tokenizer="./gone"))


def test_tokenizer_beyond_the_embedding_is_a_warning(tmp_path: Path) -> None:
    report = check(str(write_model(tmp_path / "m", vocab_size=41)))
    assert report.ok
    assert any("42 ids" in warning and "41 rows" in warning for warning in report.warnings)


def test_generation_config(tmp_path: Path) -> None:
    contents = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 99,
        "do_sample": True,
        "eos_token_id": 7,
    }
    model = str(write_model(tmp_path / "m", generation=contents))
    config = check(model).config
    assert config is not None
    assert config.default_sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert config.stop_token_ids == (7, 40, 41)
    ignored = check(model, generation_config="vllm").config
    assert ignored is not None
    assert (ignored.default_sampling, ignored.stop_token_ids) == ({}, (7, 40, 41))
    write_json(tmp_path / "other.json", {"top_p": 0.5, "eos_token_id": [9]})
    other = check(model, generation_config=str(tmp_path / "other.json")).config
    assert other is not None
    assert (other.default_sampling, other.stop_token_ids) == ({"top_p": 0.5}, (7, 9, 40, 41))
    assert "there is no file" in causes(check(model, generation_config="gone"))


def test_unusable_sampling_defaults(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m", generation={"top_p": 0.0}))
    report = check(model)
    assert report.config is not None
    assert report.config.default_sampling == {}
    assert any("`top_p`" in warning for warning in report.warnings)
    assert "unusable sampling default" in causes(check(model, generation_config=model))


# --- faults of files ---


def damage(directory: Path, how: str) -> None:
    weights = directory / "model.safetensors"
    match how:
        case "no weights":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-5])
        case "pickled":
            weights.rename(directory / "pytorch_model.bin")
        case "no config":
            (directory / "config.json").unlink()
        case "architecture":
            write_json(directory / "config.json", {**CONFIG, "architectures": ["BertModel"]})
        case "shapes":
            write_json(directory / "config.json", {**CONFIG, "intermediate_size": 50})
        case "tokenizer":
            (directory / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no weights", "no weights"),
        ("truncated", "truncated"),
        ("pickled", "pickled"),
        ("no config", "config.json"),
        ("architecture", "BertModel"),
        ("shapes", "shape differs"),
        ("tokenizer", "cannot be read"),
    ],
)
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_faults_of_target_and_drafter(tmp_path: Path, role: str, how: str, says: str) -> None:
    for name in ("target", "drafter"):
        write_model(tmp_path / name)
    damage(tmp_path / role, how)
    report = check(
        str(tmp_path / "target"),
        speculative_model=str(tmp_path / "drafter"),
        num_speculative_tokens=3,
    )
    (fault,) = report.faults
    assert says in fault.cause
    assert str(tmp_path / role) in fault.cause
    assert fault.hint
    assert report.config is None


def test_drafter_with_another_tokenizer(tmp_path: Path) -> None:
    target, drafter = write_model(tmp_path / "t"), write_model(tmp_path / "d", tokenizer=False)
    pair = {"speculative_model": str(drafter), "num_speculative_tokens": 3}
    report = check(str(target), **pair)
    assert report.ok
    assert any("not compared" in warning for warning in report.warnings)
    write_tokenizer(drafter, plain=["x", "y"], merges=[])
    report = check(str(target), **pair)
    (fault,) = report.faults
    assert "cannot draft for" in fault.cause
    assert "[ngram]" in fault.hint


def test_all_faults_at_once(tmp_path: Path) -> None:
    target, drafter = write_model(tmp_path / "t"), write_model(tmp_path / "d", vocab_size=30)
    damage(target, "truncated")
    report = check(
        str(target),
        speculative_model=str(drafter),
        num_speculative_tokens=0,
        device="cuda",
        preemption_mode="swop",
        spec_policy="auto",
        max_model_len=600,
        max_num_batched_tokens=10,
        generation_config="gone",
        tokenizer="./gone",
    )
    expected = [
        "num_speculative_tokens",
        "device",
        "preemption_mode",
        "spec_policy",
        "truncated",
        "`generation_config",
        "./gone",
        "`max_model_len` (600)",
        "`max_num_batched_tokens` (10)",
        "30 rows",
    ]
    assert len(report.faults) == len(expected)
    for part in expected:
        assert part in causes(report)


# --- on a GPU ---


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> gpu.Gpu:
    card = gpu.Gpu("NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0))
    monkeypatch.setattr(gpu, "find_gpu", lambda: card)
    monkeypatch.setattr(gpu, "software_fault", lambda: None)
    return card


def test_plan_on_a_gpu(model: str, card: gpu.Gpu) -> None:
    report = check(model, max_num_seqs=4)
    config = report.config
    assert config is not None
    assert config.device == "cuda"
    assert config.model.dtype == "bfloat16"
    assert config.scheduler.max_num_batched_tokens == 8192
    assert config.cache.gpu_memory_utilization == 0.9  # start-up will measure
    found = facts(report)
    assert 0.8 * card.total_bytes < found["kv_pool_bytes"] < 0.9 * card.total_bytes
    assert found["free_memory_bytes"] == card.free_bytes


@pytest.mark.parametrize(
    "explicit", [{"num_gpu_blocks_override": 90}, {"kv_cache_memory_bytes": GIB}]
)
def test_a_pool_that_was_asked_for_is_not_measured(
    model: str, card: gpu.Gpu, explicit: dict[str, int]
) -> None:
    config = check(model, **explicit).config
    assert config is not None
    assert config.cache.gpu_memory_utilization == 0.0


def test_a_full_gpu(model: str, monkeypatch: pytest.MonkeyPatch, card: gpu.Gpu) -> None:
    full = gpu.Gpu(card.name, card.total_bytes, 10 * GIB, card.capability)
    monkeypatch.setattr(gpu, "find_gpu", lambda: full)
    report = check(model)
    (fault,) = report.faults
    assert fault.about_memory
    assert "the weights do not fit the GPU" in fault.cause
    assert "as estimated from NVIDIA H200" in fault.cause
    assert "other processes and driver 130.50" in fault.cause
    assert "end other processes" in fault.hint


def test_weights_larger_than_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: gpu.Gpu
) -> None:
    """Said from the files' headers; the weights, all holes of a file, are never read."""
    target = str(write_model(tmp_path / "m", hidden_size=8192, intermediate_size=8192 * 16))
    small = gpu.Gpu("GeForce", 24 * GIB, 23 * GIB, (8, 9))
    monkeypatch.setattr(gpu, "find_gpu", lambda: small)
    report = check(target, dtype="float32")
    (fault,) = report.faults
    assert "the weights do not fit the GPU" in fault.cause
    assert "21.60 of 24.00 may be used" in fault.cause
    weights = facts(report)["target_weight_bytes"]
    assert f"target weights {weights / GIB:.2f}" in fault.cause
    assert 'set dtype="bfloat16"' in fault.hint
    monkeypatch.setattr(gpu, "find_gpu", lambda: card)
    assert check(target).ok


def test_an_explicit_length_beyond_the_gpu_says_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: gpu.Gpu
) -> None:
    model = str(write_model(tmp_path / "m", max_position_embeddings=2**24))
    tight = gpu.Gpu("GeForce", 2 * GIB, 2 * GIB, (8, 9))
    monkeypatch.setattr(gpu, "find_gpu", lambda: tight)
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 512}
    found = check(model, **settings)
    assert found.config is not None
    assert found.config.cache.lowers_model_len
    fits = found.config.scheduler.max_model_len
    assert 1000 < fits < 2**24
    report = check(model, max_model_len=2**24, **settings)
    (fault,) = report.faults
    assert f"fewer than one sequence of max_model_len ({2**24})" in fault.cause
    lowered = int(fault.hint.partition("max_model_len to ")[2].split()[0])
    again = check(model, max_model_len=lowered, **settings)
    assert again.config is not None
    assert not again.config.cache.lowers_model_len
    assert again.config.scheduler.max_model_len == lowered


def test_a_given_pool_that_leaves_steps_little_memory(
    model: str, monkeypatch: pytest.MonkeyPatch, card: gpu.Gpu
) -> None:
    assert not check(model, kv_cache_memory_bytes=100 * GIB).warnings
    report = check(model, kv_cache_memory_bytes=int(138.9 * GIB))
    assert report.ok
    (warning,) = report.warnings
    assert "138.90 GiB (as kv_cache_memory_bytes says) leaves 102" in warning
    assert "may run out of memory" in warning


def test_swap_space(model: str, monkeypatch: pytest.MonkeyPatch, card: gpu.Gpu) -> None:
    block = 16 * KV_FLOAT32 // 2
    plain = check(model, swap_space=2.5).config
    assert plain is not None
    assert plain.cache.num_host_blocks == 0
    assert check(model, swap_space=0).ok  # a habit of vLLM's users; nothing is swapped anyway
    assert "holds no KV block" in causes(check(model, preemption_mode="swap", swap_space=0))
    config = check(model, preemption_mode="swap").config
    assert config is not None
    assert config.cache.num_host_blocks == 4 * GIB // block
    report = check(model, preemption_mode="swap", swap_space=2.5)
    assert report.to_json()["settings"]["swap_space"] == 2.5
    assert report.config is not None
    assert report.config.cache.num_host_blocks == 5 * GIB // 2 // block
    assert "holds no KV block" in causes(
        check(model, preemption_mode="swap", swap_space=(block - 1) / GIB)
    )
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * GIB)
    report = check(model, preemption_mode="swap")
    (fault,) = report.faults
    assert "`swap_space` (4.0 GiB) does not fit into host memory" in fault.cause
    assert "3.00 GiB are free" in fault.cause
    assert "lower it to 2.7 or less" in fault.hint
    assert check(model, preemption_mode="swap", swap_space=2.7).ok
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert check(model, preemption_mode="swap").ok


def test_a_drafter_takes_no_host_blocks(model: str, card: gpu.Gpu) -> None:
    pair = {"speculative_model": model, "num_speculative_tokens": 2}
    config = check(model, preemption_mode="swap", **pair).config
    assert config is not None
    assert config.cache.num_host_blocks == 4 * GIB // (16 * KV_FLOAT32 // 2)


def test_swap_on_a_cpu_says_why_not(model: str) -> None:
    report = check(model, preemption_mode="swap")
    (fault,) = report.faults
    assert "the model runs on the CPU" in fault.cause
    assert "recompute" in fault.hint


def test_the_cpu_can_be_asked_for(model: str, card: gpu.Gpu) -> None:
    config = check(model, device="cpu").config
    assert config is not None
    assert config.device == "cpu"
    assert config.model.dtype == "float32"


# --- faults of arguments ---


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dtype": "int8"}, "`dtype='int8'`"),
        ({"dtype": 5}, "`dtype=5`"),
        ({"device": "cuda:0"}, "CUDA_VISIBLE_DEVICES"),
        ({"device": "tpu"}, "`device='tpu'` is unknown"),
        ({"batching": "dynamic"}, "`batching='dynamic'`"),
        ({"preemption_mode": "swop"}, "`preemption_mode='swop'` is unknown"),
        ({"swap_space": -1}, "a number of GiB, 0 or more"),
        ({"swap_space": "4"}, "a number of GiB, 0 or more"),
        ({"swap_space": float("inf")}, "a number of GiB, 0 or more"),
        ({"spec_policy": "auto"}, "not available in this version"),
        ({"block_size": 0}, "between 1 and 1024, got 0"),
        ({"block_size": True}, "an integer, got True"),
        ({"max_num_seqs": "8"}, "an integer, got '8'"),
        ({"max_num_seqs": 0}, "between 1 and 65536"),
        ({"max_model_len": 1}, "at least 2"),
        ({"gpu_memory_utilization": 0}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "above 0 and at most 1"),
        ({"seed": 2**64}, "`seed`"),
        ({"enforce_eager": 1}, "True or False"),
        ({"tokenizer": ""}, "non-empty string"),
        ({"tokenizer": "x", "skip_tokenizer_init": True}, "exclude each other"),
        ({"max_logprobs": -1}, "`max_logprobs`"),
        ({"num_speculative_tokens": 3}, "no effect without a drafter"),
        ({"ngram_prompt_lookup_max": 3}, "no effect without a drafter"),
        ({"speculative_disable_by_batch_size": 3}, "no effect without a drafter"),
        ({"speculative_model": "[ngram]"}, "`num_speculative_tokens` is missing"),
        (
            {"speculative_model": "ngram", "num_speculative_tokens": 3},
            "names a model called ngram",
        ),
        (
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": 3,
                "speculative_max_model_len": 5,
            },
            "no context limit",
        ),
        (
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": 3,
                "ngram_prompt_lookup_min": 4,
                "ngram_prompt_lookup_max": 3,
            },
            "(4) is above `ngram_prompt_lookup_max` (3)",
        ),
        (
            {"speculative_model": "[ngram]", "num_speculative_tokens": 512},
            "(512) must be below the model length",
        ),
    ],
    ids=str,
)
def test_faults_of_arguments(model: str, wrong: dict[str, Any], says: str) -> None:
    report = check(model, **wrong)
    (fault,) = report.faults
    assert says in fault.cause
    assert fault.hint


def test_lookup_settings_are_for_prompt_lookup(model: str) -> None:
    wrong = {"speculative_model": model, "num_speculative_tokens": 3, "ngram_prompt_lookup_max": 3}
    assert "is for prompt lookup" in causes(check(model, **wrong))


@pytest.mark.parametrize(
    ("given", "lengths"),
    [({}, (2, 5)), ({"max": 1}, (1, 1)), ({"min": 7}, (7, 7)), ({"min": 1, "max": 9}, (1, 9))],
)
def test_lookup_lengths(model: str, given: dict[str, int], lengths: tuple[int, int]) -> None:
    arguments = {f"ngram_prompt_lookup_{end}": n for end, n in given.items()}
    config = check(model, speculative_model="[ngram]", num_speculative_tokens=2, **arguments).config
    assert config is not None
    assert config.speculative is not None
    assert (
        config.speculative.prompt_lookup_min,
        config.speculative.prompt_lookup_max,
    ) == lengths


def test_never_disabled_is_fine_without_a_drafter(model: str) -> None:
    assert check(model, speculative_disable_by_batch_size=0).ok


def test_wrong_model_type() -> None:
    report = run_checks(EngineArgs(model=5))  # type: ignore[arg-type]
    assert "`model`" in causes(report)


# --- the report ---


def test_report_as_json_and_text(model: str) -> None:
    report = check(model, max_model_len=600)
    as_json = json.loads(json.dumps(report.to_json()))
    assert as_json["ok"] is False
    assert as_json["faults"][0]["hint"]
    assert as_json["settings"]["max_num_seqs"] == 256
    assert as_json["settings"]["dtype"] == "float32"
    text = report.to_text()
    assert "Faults: 1\n  1. `max_model_len` (600)" in text
    assert "hint: set it to 512 or less" in text
    assert "OK: no fault found" in check(model).to_text()
    settings = check(model).settings_text().splitlines()
    assert len({line.index(line.split()[1], 35) for line in settings}) == 1  # aligned


def test_numbers_in_words() -> None:
    assert [format_bytes(n) for n in (5, 1024, 3 * 1024**3 // 2, 2**41)] == [
        "5 B",
        "1.00 KiB",
        "1.50 GiB",
        "2.00 TiB",
    ]
    assert [format_count(n) for n in (7, 1500, 494_032_768, 7 * 10**9)] == [
        "7",
        "1.5 k",
        "494.0 M",
        "7.0 B",
    ]


# --- what is not silent on a CPU ---


def test_what_is_for_gpus_is_noted_on_a_cpu(model: str, card: gpu.Gpu) -> None:
    given = {"gpu_memory_utilization": 0.5, "enforce_eager": True, "latency_path": "on"}

    def unused(report: CheckReport) -> set[str]:
        return {s.name for s in report.settings if s.note == "unused on a CPU"}

    on_cpu = check(model, device="cpu", **given)
    assert on_cpu.ok
    assert unused(on_cpu) == set(given)
    assert any(warning.startswith("latency_path='on' has no") for warning in on_cpu.warnings)
    assert unused(check(model, device="cpu")) == set()
    on_gpu = check(model, device="cuda", **given)
    assert unused(on_gpu) == set()
    assert not any("latency_path" in warning for warning in on_gpu.warnings)


def test_a_refused_value_hides_no_other_fault_and_is_not_resolved(model: str) -> None:
    report = check(model, max_num_seqs=0, speculative_model="[ngram]", speculative_max_model_len=9)
    assert [fault.argument for fault in report.faults] == [
        "max_num_seqs",
        "speculative_max_model_len",
        "num_speculative_tokens",
    ]
    settings = {setting.name: setting for setting in report.settings}
    assert settings["max_num_seqs"].value is None
    assert settings["max_num_seqs"].note == "see the faults; the plan is made with 256"
    assert report.to_text().startswith("Faults: 3\n  1. `max_num_seqs`")


def test_what_is_wrong_is_not_called_missing(model: str) -> None:
    report = check(model, speculative_model="[ngram]", num_speculative_tokens=0)
    (fault,) = report.faults
    assert "`num_speculative_tokens` must be at least 1" in fault.cause
