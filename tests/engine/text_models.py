"""Small tokenizers of every style, built in memory, and random ids for them."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from paceline.engine.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


@cache
def tiny_model() -> ModuleType:
    """examples/tiny_model.py as a module."""
    spec = importlib.util.spec_from_file_location("tiny_model", ROOT / "examples/tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def byte_level_backend() -> tokenizers.Tokenizer:
    """Qwen style, with added tokens that are awkward on purpose."""
    backend = tiny_model().build_tokenizer()
    backend.add_tokens(
        [
            AddedToken("<tool call>", special=False, normalized=False),  # a space: not in the table
            AddedToken("《工具》", special=False, normalized=False),
            AddedToken("Ġé", special=False, normalized=False),  # spelt with byte stand-ins
        ]
    )
    backend.add_special_tokens([AddedToken("<｜end▁of｜>", special=True, normalized=False)])
    return backend


def sentencepiece_backend(style: str = "sequence") -> tokenizers.Tokenizer:
    """Llama 2 / Mistral style BPE with byte fallback.

    style: "sequence" has the normalizer and decoder chain of such tokenizer.json files, "metaspace"
    the newer Metaspace pair.
    """
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁▁", "▁Hello", "▁world", "▁the", "▁ca", "t", "s", "é", "中", "文", "a", "b"]
    pieces += [*"HelowrdhcAB.,!?:;-_*#'", "▁▁▁", "ab", "▁ab", "l▁"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "▁"), ("a", "b"), ("▁", "ab"), ("▁▁", "▁")]
    backend = tokenizers.Tokenizer(
        BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if style == "sequence":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("[INST]", special=False, normalized=False)])
    return backend


BACKENDS = {
    "byte-level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "metaspace": lambda: sentencepiece_backend("metaspace"),
}


@cache
def tokenizer(style: str) -> Tokenizer:
    """A tokenizer of one of the styles in ``BACKENDS``, with no files behind it."""
    names = {"bos_token": "<s>", "eos_token": "</s>"} if style != "byte-level" else {}
    return Tokenizer(BACKENDS[style](), names, Path(style))


STYLES = sorted(BACKENDS)


def ids_of(style: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Ids of all kinds: bytes, words, special and added tokens, and some without a token."""
    size = tokenizer(style).vocab_size
    any_id = st.integers(0, size + 3)
    of_text = st.text("aé中🙂▁ \ufffd", max_size=6).map(tokenizer(style).encode)
    return st.lists(st.one_of(any_id.map(lambda i: [i]), of_text), max_size=max_size).map(
        lambda runs: [token_id for run in runs for token_id in run]
    )


def runs_of(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    """``ids`` cut into runs at random, empty ones included."""
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def write_tokenizer(
    path: Path, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None
) -> Path:
    """A directory with tokenizer.json, and tokenizer_config.json unless ``settings`` is None."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path
