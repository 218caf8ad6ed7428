#!/usr/bin/env python3
"""Write a tiny random-weight Qwen2 with a byte-level tokenizer and a chat template.

It lets the engine run, and its tests compare, with nothing downloaded: real architecture, real file
formats, meaningless text. Weights are drawn wide enough that greedy output wanders instead of
repeating one token (less so with tied embeddings). A drafter is the same model with noise added to
its weights, so that it agrees with the target often but not always.

    python examples/tiny_model.py /tmp/tiny --draft /tmp/tiny-draft
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

# How the Qwen2 family splits text before merging; transformers rebuilds exactly this pipeline.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a tiny model.<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)

MERGE_TEXT = [
    "In a paceline the riders take turns at the front and the others rest behind them. "
    "The one in front cuts the wind, then drifts back along the line and joins it at the end. ",
    "def add(first, second):\n    return first + second\n\n\n"
    "for number in range(10):\n    print(number)\n",
    "The quick answer is not always the right answer, but the right answer can be quick. ",
    "system user assistant You are a tiny model. Hello there, how are you today? 你好，世界。",
]


def build_tokenizer(num_merges: int = 200) -> Tokenizer:
    """A byte-level BPE tokenizer: 256 byte symbols, up to ``num_merges`` merges, specials."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(MERGE_TEXT, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def random_weights(config: dict[str, Any], seed: int, perturb: float) -> dict[str, torch.Tensor]:
    """Qwen2 tensors by their Hugging Face names; ``perturb`` mixes in that share of other noise."""
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        # A stream per tensor, drawn row by row: more padding rows change no other value.
        key = zlib.crc32(name.encode())
        value = np.random.default_rng([seed, key]).standard_normal(shape, np.float32)
        if perturb:
            noise = np.random.default_rng([seed, key, 1]).standard_normal(shape, np.float32)
            value = (value + perturb * noise) / (1 + perturb**2) ** 0.5
        weights[name] = torch.from_numpy(mean + std * value).to(getattr(torch, config["dtype"]))

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    projections = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    add("model.embed_tokens.weight", config["vocab_size"], hidden, std=1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in projections.items():
            # Sharper attention, so that text depends on more than its last token.
            gain = 1.5 if name in ("self_attn.q_proj", "self_attn.k_proj") else 1.0
            add(f"{prefix}{name}.weight", rows, columns, std=gain / columns**0.5)
            if name.removeprefix("self_attn.") in ("q_proj", "k_proj", "v_proj"):
                add(f"{prefix}{name}.bias", rows, std=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{prefix}{name}.weight", hidden, std=0.05, mean=1.0)
    add("model.norm.weight", hidden, std=0.05, mean=1.0)
    if not config["tie_word_embeddings"]:
        # Logits with a standard deviation of about 3: greedy choices are clear, samples vary. A
        # token is made unlikely to follow itself, or some would repeat for ever.
        std = 3.0 / hidden**0.5
        add("lm_head.weight", config["vocab_size"], hidden, std=std)
        weights["lm_head.weight"] -= 0.3 * std * weights["model.embed_tokens.weight"]
    return weights


def write_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    vocab_padding: int = 8,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    max_position_embeddings: int = 2048,
    num_merges: int = 200,
    tie_word_embeddings: bool = False,
    dtype: str = "float32",
    perturb: float = 0.0,
) -> Path:
    """Write the model directory and return it; the same arguments give the same files.

    vocab_padding: rows of the embedding above the tokenizer's ids, which must never be sampled.
    perturb: 0 is the model of this seed; 0.03 is a drafter that mostly agrees with it.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(num_merges)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": tokenizer.get_vocab_size() + vocab_padding,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[IM_END],
        "use_sliding_window": False,
        "dtype": dtype,
    }
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
    }
    files = {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(path / "tokenizer.json"))
    weights = random_weights(config, seed, perturb)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random-weight Qwen2.")
    parser.add_argument("path", metavar="DIR", help="where the model goes")
    parser.add_argument("--draft", metavar="DIR2", help="also write a drafter for it there")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write_tiny_model(arguments.path, seed=arguments.seed))
    if arguments.draft:
        # Another padded vocabulary size, as in real pairs of one family.
        draft = write_tiny_model(
            arguments.draft, seed=arguments.seed, perturb=0.03, vocab_padding=24
        )
        print(draft)


if __name__ == "__main__":
    main()
