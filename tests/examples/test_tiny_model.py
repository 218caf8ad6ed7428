from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tiny_model.py"


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path)).eval()


def test_the_same_arguments_give_the_same_files(tiny: ModuleType, tmp_path: Path) -> None:
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    tiny.write_tiny_model(one)
    tiny.write_tiny_model(two)
    tiny.write_tiny_model(other, seed=1)
    names = sorted(file.name for file in one.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        content = (one / name).read_bytes()
        assert (two / name).read_bytes() == content
        assert ((other / name).read_bytes() == content) == (name != "model.safetensors")


def test_transformers_reads_it_and_its_text_wanders(tiny: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny.write_tiny_model(tmp_path)
    model, tokenizer = load(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert model.config.vocab_size == len(tokenizer) + 8
    for prompt in ("Hello", "def add(", "你好"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=64, do_sample=False, eos_token_id=[10**6], pad_token_id=0
            )
        assert len(set(out[0, ids.shape[1] :].tolist())) > 16
    assert model.generation_config.eos_token_id == [
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    ]


def test_the_drafter_agrees_often_but_not_always(tiny: ModuleType, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "a"), "--draft", str(tmp_path / "b")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [str(tmp_path / "a"), str(tmp_path / "b")]
    target, draft = load(tmp_path / "a"), load(tmp_path / "b")
    assert target.config.vocab_size != draft.config.vocab_size
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (
        tmp_path / "b/tokenizer.json"
    ).read_bytes()
    size = len(tiny.build_tokenizer().get_vocab())
    ids = torch.randint(0, size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        chosen = [model(ids).logits[..., :size].argmax(-1) for model in (target, draft)]
    agreement = (chosen[0] == chosen[1]).float().mean().item()
    assert 0.6 < agreement < 0.95


def test_shapes_and_types_follow_the_arguments(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.write_tiny_model(
        tmp_path,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        num_merges=0,
        vocab_padding=0,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (259, 32)
    assert "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["num_hidden_layers"] == 1
    assert load(tmp_path).config.tie_word_embeddings


def test_padding_rows_change_no_other_weight(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.write_tiny_model(tmp_path / "a", vocab_padding=0)
    tiny.write_tiny_model(tmp_path / "b", vocab_padding=24)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(tensor, b[name][: len(tensor)]) for name, tensor in a.items())
