"""The synthetic tokenizer: sizes, round trips, chats, and what transformers makes of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from paceline.engine.tokenizer import Tokenizer
from paceline.spec.vocab import check_pair, read_vocabulary
from paceline.synth.shapes import LLAMA, QWEN, TINY, Vocabulary
from paceline.synth.tokenizer import FIRST_WORD, build_tokenizer, write_tokenizer

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module", params=[QWEN, LLAMA, TINY], ids=lambda v: v.name)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    found: Vocabulary = request.param
    return found


@pytest.fixture(scope="module")
def directory(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(vocabulary.name)
    write_tokenizer(build_tokenizer(vocabulary), vocabulary, path)
    return path


def test_ids_and_text(vocabulary: Vocabulary, directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.vocab_size == vocabulary.size
    assert tokenizer.eos_token_id == vocabulary.stop_ids[0]
    assert tokenizer.is_byte_level
    assert len(tokenizer.special_token_ids) == len(vocabulary.special)
    words = [random.Random(1).randrange(FIRST_WORD, vocabulary.plain) for _ in range(500)]
    words += [FIRST_WORD, vocabulary.plain - 1]
    text = tokenizer.decode(words)
    assert tokenizer.encode(text) == words
    assert text.replace(" ", "").isalpha()
    assert len(text.split()) == len(words)
    for other in (
        "The quick brown fox.",
        "def f(x):\n    return x\n",
        "你好，世界 🙂",
        " bako bakomi!",
    ):
        assert tokenizer.decode(tokenizer.encode(other)) == other


def test_a_chat_ends_where_the_answer_begins(vocabulary: Vocabulary, directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.apply_chat_template(CHAT)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert vocabulary.stop_ids[0] in ids
    assert "user" in text
    assert "Hello" in text
    assert "assistant" in text


def test_transformers_reads_it(vocabulary: Vocabulary, directory: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    text = "Hello bako mitu, 世界"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert len(theirs) == vocabulary.size
    assert theirs.eos_token_id == vocabulary.stop_ids[0]
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert chat == ours.apply_chat_template(CHAT, tokenize=False)


def test_it_is_one_vocabulary_for_a_pair(vocabulary: Vocabulary, directory: Path) -> None:
    read = read_vocabulary(directory)
    assert read.size == vocabulary.size
    assert read.eos_token_id == vocabulary.stop_ids[0]
    assert check_pair(read, read, 200_000, 200_000, ("target", "drafter")) is None
