"""EngineArgs: names, vLLM's forms of them, and what resolve makes of a model directory."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from model_dirs import write_model
from paceline.engine_args import NO_EFFECT, EngineArgs
from paceline.errors import CapacityError, ConfigError

DRAFTER = {"speculative_model": "small", "num_speculative_tokens": 5}


def from_kwargs(**kwargs: Any) -> EngineArgs:
    return EngineArgs.from_kwargs(model="big", **kwargs)


def test_every_argument_has_a_help_text() -> None:
    assert all(f.metadata["help"] for f in fields(EngineArgs))
    assert not {f.name for f in fields(EngineArgs)} & set(NO_EFFECT)


def test_none_means_the_default() -> None:
    args = from_kwargs(seed=None, enable_prefix_caching=None, max_num_seqs=None, dtype=None)
    assert args == EngineArgs(model="big")


def test_paths_and_numpy_numbers_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    args = EngineArgs.from_kwargs(model=Path("a/b"), max_num_seqs=numpy.int64(3))
    assert (args.model, args.max_num_seqs) == ("a/b", 3)
    assert type(args.max_num_seqs) is int


def test_no_effect_arguments_are_accepted_at_their_values() -> None:
    accepted = {name: (entry.accepted or (True,))[0] for name, entry in NO_EFFECT.items()}
    assert from_kwargs(**accepted) == EngineArgs(model="big")
    both = from_kwargs(disable_log_stats=True, use_tqdm_on_load=16, tensor_parallel_size=1)
    assert both == EngineArgs(model="big")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tensor_parallel_size": 2}, "one process"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True"),
        ({"trust_remote_code": True}, "never run"),
        ({"quantization": "awq"}, "unquantised"),
        ({"kv_cache_dtype": "fp8"}, "'auto'"),
        ({"load_format": "pt"}, "safetensors"),
        ({"revision": "abc"}, "default revision"),
        ({"cpu_offload_gb": 4}, "hint: leave it out or set it to 0"),
        ({"enable_lora": True}, "LoRA"),
        ({"task": "embed"}, "text generation"),
        ({"max_model_length": 5}, "did you mean `max_model_len`"),
        ({"max_model": 5}, "did you mean `max_model_len`"),
        ({"speculative_confg": {}}, "did you mean `speculative_config`"),
        ({"trust_remote_code": 1}, "never run. hint: leave it out"),
        ({"tensor_paralel_size": 1}, "did you mean `tensor_parallel_size`"),
        ({"zzz": 5}, "known are: batching, block_size"),
    ],
    ids=str,
)
def test_other_values_and_unknown_names_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_kwargs(**wrong)
    assert says in str(caught.value)
    assert f"`{next(iter(wrong))}" in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs.from_kwargs(zzz=1, tensor_parallel_size=4)
    message = str(caught.value)
    assert message.startswith("3 problems:")
    assert "zzz" in message
    assert "tensor_parallel_size" in message
    assert "`model` is missing" in message


@pytest.mark.parametrize(
    ("config", "flat"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": 4,
                "ngram_prompt_lookup_max": 3,
            },
        ),
        (
            {"model": "[ngram]", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": 4,
                "ngram_prompt_lookup_min": 1,
            },
        ),
        ({"model": "small", "num_speculative_tokens": 5}, DRAFTER),
        (
            {
                "method": "draft_model",
                "model": "small",
                "num_speculative_tokens": 5,
                "draft_tensor_parallel_size": 1,
                "max_model_len": 99,
                "disable_by_batch_size": 8,
            },
            {
                **DRAFTER,
                "speculative_max_model_len": 99,
                "speculative_disable_by_batch_size": 8,
            },
        ),
        (json.dumps({"model": "small", "num_speculative_tokens": 5}), DRAFTER),
        (None, {}),
    ],
)
def test_speculative_config_is_the_flat_form(config: object, flat: dict[str, Any]) -> None:
    assert from_kwargs(speculative_config=config) == EngineArgs(model="big", **flat)


def test_speculative_config_may_agree_with_flat_arguments() -> None:
    config = {"model": "small", "num_speculative_tokens": 5}
    assert from_kwargs(speculative_config=config, **DRAFTER) == from_kwargs(**DRAFTER)
    assert from_kwargs(speculative_config={"num_speculative_tokens": 5}, **DRAFTER) == from_kwargs(
        **DRAFTER
    )


@pytest.mark.parametrize(
    ("config", "flat", "says"),
    [
        ({"model": "small", "num_speculative_tokens": 4}, DRAFTER, "contradicts"),
        ({"model": "other", "num_speculative_tokens": 5}, DRAFTER, "contradicts"),
        ({"method": "ngram", "num_speculative_tokens": 5}, DRAFTER, "contradicts"),
        ({"method": "ngram", "model": "small"}, {}, "needs no model"),
        ({"method": "eagle", "model": "small"}, {}, "'eagle' is not supported"),
        ({"num_speculative_tokens": 5}, {}, "names no drafter"),
        ({"method": "draft_model", "num_speculative_tokens": 5}, {}, "names no drafter"),
        ({"model": "small", "num_spec_tokens": 5}, {}, "`num_speculative_tokens`"),
        ({"model": "small", "draft_tensor_parallel_size": 2}, {}, "draft_tensor_parallel_size=2"),
        ("{", {}, "not valid JSON"),
        ([1], {}, "must be a dictionary"),
    ],
)
def test_speculative_config_faults(config: object, flat: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_kwargs(speculative_config=config, **flat)
    assert says in str(caught.value)


def test_resolve_makes_a_configuration_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = write_model(
        tmp_path / "target", generation={"temperature": 0.5, "eos_token_id": [7, 8]}
    )
    drafter = write_model(tmp_path / "drafter", max_position_embeddings=128)
    args = EngineArgs.from_kwargs(
        model=target,
        speculative_model=drafter,
        num_speculative_tokens=3,
        dtype="float32",
        max_num_seqs=8,
        seed=5,
    )
    with caplog.at_level(logging.INFO, logger="paceline"):
        config = args.resolve()
    assert config.model.path == str(target)
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 512)
    assert config.tokenizer.path == str(target)
    assert config.tokenizer.vocab_size == 42
    assert config.speculative is not None
    assert config.speculative.model is not None
    assert config.speculative.model.path == str(drafter)
    assert config.speculative.draft_max_model_len == 128
    assert config.stop_token_ids == (7, 8, 40, 41)  # generation config, config, tokenizer
    assert config.default_sampling == {"temperature": 0.5}
    assert (config.device, config.seed) == ("cpu", 5)
    log = caplog.text
    assert "max_num_batched_tokens" in log
    assert f"speculation: k = 3, drafts by {drafter}" in log
    assert "the drafter reaches 128 of 512 tokens" in log


def test_resolve_says_when_nothing_drafts_and_how_ngram_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(write_model(tmp_path / "m"))
    with caplog.at_level(logging.INFO, logger="paceline"):
        assert EngineArgs(model=model).resolve().speculative is None
        args = EngineArgs(model=model, speculative_model="[ngram]", num_speculative_tokens=4)
        speculative = args.resolve().speculative
    assert speculative is not None
    assert (speculative.method, speculative.model) == ("ngram", None)
    assert (speculative.prompt_lookup_min, speculative.prompt_lookup_max) == (2, 5)
    assert "speculation is off" in caplog.text
    assert "n-grams of 2 to 5 tokens" in caplog.text


def test_resolve_raises_all_faults_in_one_error(tmp_path: Path) -> None:
    args = EngineArgs(model=str(write_model(tmp_path / "m")), block_size=0, max_model_len=600)
    with pytest.raises(ConfigError) as caught:
        args.resolve()
    assert "`block_size`" in str(caught.value)
    assert "`max_model_len` (600)" in str(caught.value)


def test_resolve_raises_capacity_error_for_memory(tmp_path: Path) -> None:
    args = EngineArgs(
        model=str(write_model(tmp_path / "m")), max_model_len=512, num_gpu_blocks_override=3
    )
    with pytest.raises(CapacityError, match=r"needs 32 blocks of 16 tokens.* has 3"):
        args.resolve()


def test_resolve_needs_no_torch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    code = (
        "import sys; from paceline.engine_args import EngineArgs;"
        f"EngineArgs(model={str(model)!r}).resolve();"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
