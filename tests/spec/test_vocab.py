"""Which pairs of tokenizers may draft for one another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from model_dirs import MERGES, PLAIN, SPECIAL, tokenizer_json, write_json, write_tokenizer
from paceline.errors import ConfigError
from paceline.spec.vocab import (
    Vocabulary,
    check_pair,
    compare,
    has_tokenizer,
    read_vocabulary,
)


def vocabulary(tmp_path: Path, name: str = "t", **options: Any) -> Vocabulary:
    return read_vocabulary(write_tokenizer(tmp_path / name, **options))


def sentencepiece_model(pieces: list[str]) -> bytes:
    """Pieces with a score and a type, then trainer settings, as sentencepiece writes them."""

    def block(tag: int, payload: bytes) -> bytes:
        assert len(payload) < 128
        return bytes([tag, len(payload)]) + payload

    one = [block(0x0A, p.encode()) + b"\x15\x00\x00\x80\xbf" + b"\x18\x01" for p in pieces]
    return b"".join(block(0x0A, piece) for piece in one) + block(0x12, b"\x18\x01")


def test_reads_tokenizer_json(tmp_path: Path) -> None:
    read = vocabulary(tmp_path)
    assert read.size == 42
    assert read.plain == dict(enumerate(PLAIN))
    assert read.added == SPECIAL
    assert read.merges == MERGES
    assert read.eos_token_id == 41


def test_merges_may_be_pairs(tmp_path: Path) -> None:
    pairs = [merge.split(" ") for merge in MERGES]
    assert vocabulary(tmp_path, merges=pairs).merges == MERGES


def test_reads_unigram_and_tokens_added_elsewhere(tmp_path: Path) -> None:
    contents = tokenizer_json()
    contents["model"] = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]}
    write_json(tmp_path / "tokenizer.json", contents)
    write_json(tmp_path / "added_tokens.json", {"<extra>": 50})
    settings = {
        "added_tokens_decoder": {"60": {"content": "<more>"}},
        "eos_token": {"content": "a"},
    }
    write_json(tmp_path / "tokenizer_config.json", settings)
    read = read_vocabulary(tmp_path)
    assert read.plain == {0: "<unk>", 1: "a"}
    assert read.merges is None
    assert read.added == {**SPECIAL, 50: "<extra>", 60: "<more>"}
    assert (read.size, read.eos_token_id) == (61, 1)


def test_reads_vocab_json_and_merges(tmp_path: Path) -> None:
    write_json(tmp_path / "vocab.json", {piece: i for i, piece in enumerate(PLAIN)})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "b"})
    read = read_vocabulary(tmp_path)
    assert (read.plain, read.merges) == (dict(enumerate(PLAIN)), MERGES)
    assert read.eos_token_id == 1


def test_reads_sentencepiece_pieces(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", "▁the", "é"]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(pieces))
    assert read_vocabulary(tmp_path).plain == dict(enumerate(pieces))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[]"),
        ("vocab.json", b"[1]"),
        ("tokenizer.model", b"\xff\xff\xff"),
        ("tokenizer.model", b"\x0b"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    assert has_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_vocabulary(tmp_path)


def test_no_tokenizer_files(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer.*skip_tokenizer_init"):
        read_vocabulary(tmp_path)


def test_same_tokenizer_is_a_pair(tmp_path: Path) -> None:
    result = compare(vocabulary(tmp_path, "a"), vocabulary(tmp_path, "b"))
    assert (result.problem, result.note) == (None, None)


def test_more_special_tokens_are_fine(tmp_path: Path) -> None:
    more = vocabulary(tmp_path, "b", special={**SPECIAL, 42: "<think>"})
    result = compare(vocabulary(tmp_path, "a"), more)
    assert (result.problem, result.note) == (None, None)


def test_renamed_special_tokens_are_noted(tmp_path: Path) -> None:
    renamed = vocabulary(tmp_path, "b", special={**SPECIAL, 41: "<end>"})
    result = compare(vocabulary(tmp_path, "a"), renamed)
    assert result.problem is None
    assert result.note is not None
    assert "id 41: '<|im_end|>' and '<end>'" in result.note


def test_a_special_token_may_be_plain_in_the_other(tmp_path: Path) -> None:
    plain = vocabulary(tmp_path, "a", special={**SPECIAL, 0: "a"})
    assert compare(plain, vocabulary(tmp_path, "b")).problem is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"plain": ["b", "a", *PLAIN[2:]]}, "differ at id 0 ('a' and 'b')"),
        ({"plain": PLAIN[:-1]}, f"differ at id {len(PLAIN) - 1} ('abcd' and none)"),
        ({"merges": MERGES[:2]}, "merges differ (3 and 2 of them)"),
        ({"merges": [MERGES[1], MERGES[0], MERGES[2]]}, "merges differ"),
    ],
)
def test_another_vocabulary_is_no_pair(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    target, drafter = vocabulary(tmp_path, "a"), vocabulary(tmp_path, "b", **options)
    problem = compare(target, drafter).problem
    assert problem is not None
    assert says in problem
    with pytest.raises(ConfigError) as caught:
        check_pair(target, drafter, 64, 64, ("big", "small"))
    message = str(caught.value)
    assert "`small` cannot draft for `big`" in message
    assert "[ngram]" in message
    assert "family" in message


def test_padded_sizes_may_differ(tmp_path: Path) -> None:
    a, b = vocabulary(tmp_path, "a"), vocabulary(tmp_path, "b")
    assert check_pair(a, b, 64, 48, ("big", "small")) is None
    assert check_pair(a, b, 48, 64, ("big", "small")) is None


def test_too_few_drafter_rows_are_refused(tmp_path: Path) -> None:
    a, b = vocabulary(tmp_path, "a"), vocabulary(tmp_path, "b")
    with pytest.raises(ConfigError, match="41 rows, but the target may sample 42"):
        check_pair(a, b, 64, 41, ("big", "small"))
    # Without the target's tokenizer nothing masks its padding.
    with pytest.raises(ConfigError, match="48 rows, but the target may sample 64"):
        check_pair(None, b, 64, 48, ("big", "small"))
    # A tokenizer larger than the target's embedding: those ids cannot be sampled.
    assert check_pair(a, b, 40, 40, ("big", "small")) is None


def test_notes_are_returned(tmp_path: Path) -> None:
    a = vocabulary(tmp_path, "a")
    b = vocabulary(tmp_path, "b", special={**SPECIAL, 41: "<end>"})
    note = check_pair(a, b, 64, 64, ("big", "small"))
    assert note is not None
    assert "other names" in note
