from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import byte_level_backend, sentencepiece_backend, tiny_model, write_tokenizer
from text_models import tokenizer as small_tokenizer

from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError, PromptTooLongError, RequestError

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\ttab 12345 don't",
    "你好，世界。 é e\u0301 🙂👨‍👩‍👧 \u200b",
    "<|im_start|>user\nHi<|im_end|>\n<s>[INST] x [/INST]</s>",
    "<tool call>《工具》Ġé <｜end▁of｜> \ufffd \x00",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tiny_model().write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return path


def assert_like_transformers(path: Path) -> None:
    """Ids and text of ours equal transformers', for texts and for random ids."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(path))
    ours = Tokenizer.load(path)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.encode_batch([text, "x"], special)[0] == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    for skip in (True, False):
        for start in range(0, ours.vocab_size, 7):
            ids = [*range(start, min(start + 9, ours.vocab_size))][::2]
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def write_model(path: Path, backend: tokenizers.Tokenizer, settings: Any, model_type: str) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return write_tokenizer(path, backend, settings)


def test_the_tiny_model_is_read_as_transformers_reads_it(tiny: Path) -> None:
    assert_like_transformers(tiny)
    assert Tokenizer.load(tiny).stop_token_ids == (Tokenizer.load(tiny).token_id("<|im_end|>"),)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", None])
def test_byte_level_directories(tmp_path: Path, name: str | None) -> None:
    config = {"tokenizer_class": name, "eos_token": "<|endoftext|>", "bos_token": "<｜end▁of｜>"}
    write_model(tmp_path, byte_level_backend(), config if name else None, "llama")
    if name is None:
        (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert_like_transformers(tmp_path)


@pytest.mark.parametrize("style", ["sequence", "metaspace"])
def test_sentencepiece_directories(tmp_path: Path, style: str) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
    }
    write_model(tmp_path, sentencepiece_backend(style), config, "mistral")
    assert_like_transformers(tmp_path)
    assert Tokenizer.load(tmp_path).encode("Hello")[0] == 1


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<tool call>", "<|extra|>"],
        "added_tokens_decoder": {
            str(size): {"content": "<|config|>", "special": True, "normalized": False},
            str(size + 1): {"content": "<think>", "special": False},
        },
    }
    write_model(tmp_path, backend, config, "llama")
    assert_like_transformers(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert ours.token_id("<|config|>") == size
    assert ours.decode(ours.encode("<|config|><think><|extra|>a")) == "<think>a"


def test_padding_and_truncation_in_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    write_model(tmp_path, backend, {"tokenizer_class": "PreTrainedTokenizerFast"}, "llama")
    ours = Tokenizer.load(tmp_path)
    assert ours.decode(ours.encode("Hello world and more")) == "Hello world and more"


def test_a_directory_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    backend = tiny_model().build_tokenizer()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    config["additional_special_tokens"] = ["<|im_start|>"]  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert_like_transformers(tmp_path)
    assert Tokenizer.load(tmp_path).is_byte_level


def test_loading_tokenizer_json_imports_neither_transformers_nor_torch(tiny: Path) -> None:
    code = (
        "import sys; from paceline.engine.tokenizer import Tokenizer; "
        f"Tokenizer.load({str(tiny)!r}).encode('Hi'); "
        "print([name for name in ('transformers', 'torch', 'jinja2') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-2, 500), max_size=20), st.booleans())
def test_decoding_any_ids_never_fails(ids: list[int], skip: bool) -> None:
    for style in ("byte-level", "sentencepiece"):
        shared = small_tokenizer(style)
        known = [i for i in ids if shared.token_text(i) is not None]
        assert shared.decode(ids, skip) == shared.decode(known, skip)
        if shared.is_byte_level:
            table = shared.token_bytes(skip)
            assert b"".join([table[i] for i in ids]).decode("utf-8", "replace") == shared.decode(
                ids, skip
            )


def test_ids_without_a_token_are_empty_text() -> None:
    shared = small_tokenizer("byte-level")
    for token_id in (shared.vocab_size, 10**6, -1):
        assert shared.decode([token_id]) == ""
        assert shared.decode_token(token_id) == ""
        assert shared.token_text(token_id) is None
        assert shared.token_bytes(True)[token_id] == b""
    end = shared.token_id("<|im_end|>")
    assert end is not None
    assert shared.decode_token(end) == "<|im_end|>"
    assert shared.decode([end]) == ""


def test_vocab_size_counts_holes(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, byte_level_backend(), None)
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"]["far away"] = 700
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert Tokenizer.load(path).vocab_size == 701


def test_errors_name_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no tokenizer in .*hint: pass `tokenizer`"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path, byte_level_backend(), None)
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            Tokenizer.load(tmp_path)


def test_a_tokenizer_that_transformers_cannot_convert(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="cannot be converted"):
        Tokenizer.load(tmp_path)


def test_texts_that_cannot_be_encoded() -> None:
    shared = small_tokenizer("byte-level")
    with pytest.raises(RequestError, match="must be a str, got int"):
        shared.encode(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="surrogate"):
        shared.encode("half \ud83d")
    with pytest.raises(RequestError, match="surrogate"):
        shared.encode_batch(["fine", "half \udc00"])


@pytest.mark.model
@pytest.mark.parametrize("style", ["byte-level", "sentencepiece"])
def test_long_texts_are_encoded_as_short_ones(style: str) -> None:
    tokenizer = small_tokenizer(style)
    text = "Hello world, 中文 🙂 " * 5000
    ids = tokenizer.encode(text)
    assert ids == list(tokenizer.backend.encode(text).ids)
    assert tokenizer.encode(text, limit=len(ids)) == ids
    assert tokenizer.encode_batch([text, "x"], limit=len(ids))[0] == ids


@pytest.mark.parametrize("style", ["byte-level", "sentencepiece"])
def test_a_text_that_must_be_too_long_is_refused_unread(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = small_tokenizer(style)
    longest = max(tokenizer.backend.get_vocab(), key=len)
    assert len(tokenizer.encode(longest * 10_000, limit=10_000)) >= 10_000  # as few as there can be
    text = "a" * 10_000_000
    monkeypatch.setattr(tokenizer, "_encode_many", None)
    for call in (
        lambda: tokenizer.encode(text, limit=100),
        lambda: tokenizer.encode_batch(["x", text], limit=100),
    ):
        with pytest.raises(
            PromptTooLongError, match=r"10000000 characters, so at least \d+ tokens, but"
        ):
            call()


def test_a_text_on_which_the_library_gives_up_is_refused() -> None:
    class PanicException(BaseException):
        pass

    class Backend:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            raise PanicException("retry-limit-in-match over")

    tokenizer = small_tokenizer("byte-level")
    backend, tokenizer.backend = tokenizer.backend, Backend()  # type: ignore[assignment]
    try:
        with pytest.raises(RequestError, match="gave up on a text of 70000 characters"):
            tokenizer.encode(" " * 70_000)
    finally:
        tokenizer.backend = backend


@pytest.mark.skipif("LLM_TEST_MODELS" not in os.environ, reason="$LLM_TEST_MODELS is not set")
def test_real_models_are_read_as_transformers_reads_them() -> None:
    from transformers import AutoTokenizer

    for path in sorted(Path(os.environ["LLM_TEST_MODELS"]).glob("*/tokenizer.json")):
        theirs = AutoTokenizer.from_pretrained(str(path.parent))
        ours = Tokenizer.load(path.parent)
        assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
        assert ours.eos_token_id == theirs.eos_token_id
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text)
        for start in range(0, ours.vocab_size, 97):
            ids = list(range(start, min(start + 97, ours.vocab_size)))
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip) == expected
                table = ours.token_bytes(skip)
                assert b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace") == expected
        chat = [{"role": "user", "content": "Hi 你好"}, {"role": "assistant", "content": "Yes?"}]
        assert (
            ours.apply_chat_template(chat)
            == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        )
