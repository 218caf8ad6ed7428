"""Published model shapes, and their ``config.json``. Standard library only.

The values are those of the checkpoints of these names; the Qwen2.5 ones are of the instruction
tuned models.

    find_shape("qwen2.5-7b").config("bfloat16")["hidden_size"]  # 3584
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from paceline.config import ModelArch
from paceline.errors import ConfigError
from paceline.models.hf_config import parse_hf_config
from paceline.models.weights import count_parameters

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's ids: plain tokens from 0 on, then the special ones.

    stop: texts of the special tokens that end a text, the tokenizer's own first.
    """

    name: str
    plain: int
    special: tuple[str, ...]
    bos: str
    stop: tuple[str, ...]

    @property
    def size(self) -> int:
        """Highest id + 1."""
        return self.plain + len(self.special)

    def special_id(self, text: str) -> int:
        return self.plain + self.special.index(text)

    @property
    def stop_ids(self) -> list[int]:
        return [self.special_id(text) for text in self.stop]


@dataclass(frozen=True)
class Shape:
    """One model: everything that its ``config.json`` says about its size."""

    name: str
    family: str  # model_type
    vocabulary: Vocabulary
    rows: int  # of the embedding, padding included
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool  # the head is the embedding
    max_positions: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    rope_factor: float | None = None  # of Llama 3's scaling beyond 8192 positions

    def config(self, dtype: str) -> dict[str, Any]:
        """The content of ``config.json``, in the layout of the published files."""
        content: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "attention_dropout": 0.0,
            "bos_token_id": self.vocabulary.special_id(self.vocabulary.bos),
            "eos_token_id": self.vocabulary.stop_ids[0],
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": self.rows,
        }
        if self.family != "qwen2":
            content["attention_bias"] = False
        if self.family == "llama":
            content["mlp_bias"] = False
        else:
            content["use_sliding_window"] = False
        if self.rope_factor is not None:
            content["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        return content

    def arch(self, dtype: str = "bfloat16") -> ModelArch:
        """The same as the engine reads it."""
        return parse_hf_config(self.config(dtype), self.name)

    @property
    def num_parameters(self) -> int:
        """A tied head counts once."""
        return count_parameters(self.arch())

    @property
    def num_parameters_read(self) -> int:
        """Of these, the ones that every step reads: not an embedding apart from the head."""
        return self.num_parameters - (0 if self.tied else self.rows * self.hidden_size)


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_STOP = ("<|im_end|>", "<|endoftext|>")
_LLAMA_NAMES = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>",
}  # fmt: skip
_LLAMA_SPECIAL = tuple(_LLAMA_NAMES.get(i, f"<|reserved_special_token_{i}|>") for i in range(256))

QWEN = Vocabulary("qwen", 151643, _QWEN_SPECIAL, "<|endoftext|>", _QWEN_STOP)
LLAMA = Vocabulary(
    "llama", 128000, _LLAMA_SPECIAL, "<|begin_of_text|>", ("<|eot_id|>", "<|end_of_text|>")
)
TINY = Vocabulary("tiny", 4096, _QWEN_SPECIAL, "<|endoftext|>", _QWEN_STOP)


def _qwen25(name: str, rows: int, sizes: tuple[int, ...], *, tied: bool) -> Shape:
    """sizes: hidden, layers, heads, KV heads, intermediate; heads divide the hidden size."""
    hidden, layers, heads, kv_heads, inner = sizes
    return Shape(
        name, "qwen2", QWEN, rows, hidden, layers, heads, kv_heads, hidden // heads, inner, tied,
        max_positions=32768, rope_theta=1e6,
    )  # fmt: skip


def _qwen3(name: str, sizes: tuple[int, ...], *, tied: bool) -> Shape:
    """sizes: hidden, layers, heads, KV heads, intermediate; heads are 128 wide."""
    hidden, layers, heads, kv_heads, inner = sizes
    return Shape(
        name, "qwen3", QWEN, 151936, hidden, layers, heads, kv_heads, 128, inner, tied,
        max_positions=40960, rope_theta=1e6,
    )  # fmt: skip


def _llama(
    name: str, sizes: tuple[int, ...], *, tied: bool, rope_factor: float | None = None
) -> Shape:
    """sizes: hidden, layers, heads, KV heads, intermediate."""
    hidden, layers, heads, kv_heads, inner = sizes
    return Shape(
        name, "llama", LLAMA, 128256, hidden, layers, heads, kv_heads, hidden // heads, inner, tied,
        max_positions=8192 if rope_factor is None else 131072, rope_theta=5e5, rms_norm_eps=1e-5,
        rope_factor=rope_factor,
    )  # fmt: skip


_TINY = Shape(
    "tiny", "qwen2", TINY, 4224, 128, 2, 4, 2, 32, 384, True, max_positions=4096, rope_theta=1e4
)

SHAPES = {
    shape.name: shape
    for shape in (
        _qwen25("qwen2.5-0.5b", 151936, (896, 24, 14, 2, 4864), tied=True),
        _qwen25("qwen2.5-1.5b", 151936, (1536, 28, 12, 2, 8960), tied=True),
        _qwen25("qwen2.5-3b", 151936, (2048, 36, 16, 2, 11008), tied=True),
        _qwen25("qwen2.5-7b", 152064, (3584, 28, 28, 4, 18944), tied=False),
        _qwen25("qwen2.5-14b", 152064, (5120, 48, 40, 8, 13824), tied=False),
        _qwen25("qwen2.5-32b", 152064, (5120, 64, 40, 8, 27648), tied=False),
        _qwen3("qwen3-0.6b", (1024, 28, 16, 8, 3072), tied=True),
        _qwen3("qwen3-1.7b", (2048, 28, 16, 8, 6144), tied=True),
        _qwen3("qwen3-4b", (2560, 36, 32, 8, 9728), tied=True),
        _qwen3("qwen3-8b", (4096, 36, 32, 8, 12288), tied=False),
        _qwen3("qwen3-14b", (5120, 40, 40, 8, 17408), tied=False),
        _llama("llama-3.2-1b", (2048, 16, 32, 8, 8192), tied=True, rope_factor=32.0),
        _llama("llama-3.2-3b", (3072, 28, 24, 8, 8192), tied=True, rope_factor=32.0),
        _llama("llama-3-8b", (4096, 32, 32, 8, 14336), tied=False),
        _llama("llama-3.1-8b", (4096, 32, 32, 8, 14336), tied=False, rope_factor=8.0),
        _TINY,
    )
}


def find_shape(name: str) -> Shape:
    """The shape of this name, in any case.

    Raises:
        ConfigError: there is none; with the nearest name or all names.
    """
    shape = SHAPES.get(name.lower())
    if shape is None:
        close = difflib.get_close_matches(name.lower().rpartition("/")[2], SHAPES, n=1)
        hint = f"did you mean `{close[0]}`? All" if close else "shapes"
        raise ConfigError(f"there is no shape `{name}`. hint: {hint}: {', '.join(SHAPES)}")
    return shape
