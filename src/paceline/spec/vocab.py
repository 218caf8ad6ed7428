"""Whether a drafter speaks the target's vocabulary: read from tokenizer files, before weights load.

A draft is a token id, so both models must mean the same text by the same id. Padded embedding
sizes may differ (ids above the tokenizer's are never sampled), and special tokens may be named
otherwise; plain tokens and merges may not. Standard library only: must not know torch or the
tokenizers package.

    vocabulary = read_vocabulary(Path("Qwen2.5-7B-Instruct"))
    compare(vocabulary, read_vocabulary(Path("Qwen2.5-0.5B-Instruct"))).problem  # None
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Vocabulary:
    """What the tokenizer files of one directory say.

    plain: token id -> piece, as stored (byte-level pieces are not decoded). added: id -> text of
    special and other added tokens; an id in both counts as added. merges: None where the files have
    none (word-level and unigram tokenizers, a bare ``tokenizer.model``).
    """

    source: str
    plain: dict[int, str]
    added: dict[int, str]
    merges: list[str] | None
    eos_token_id: int | None

    @property
    def size(self) -> int:
        """Highest known id + 1."""
        return 1 + max(max(self.plain, default=-1), max(self.added, default=-1))


@dataclass(frozen=True)
class Comparison:
    """``problem``: why the two cannot be a pair, or None. ``note``: what differs harmlessly."""

    problem: str | None = None
    note: str | None = None


def has_tokenizer(path: Path) -> bool:
    """Whether ``read_vocabulary`` finds tokenizer files in this directory."""
    return any((path / name).is_file() for name in ("tokenizer.json", "vocab.json")) or (
        (path / "tokenizer.model").is_file()
    )


def read_vocabulary(path: Path) -> Vocabulary:
    """Vocabulary in ``tokenizer.json``, else ``vocab.json`` and ``merges.txt``, else
    ``tokenizer.model``.

    Raises:
        ConfigError: no tokenizer files, or unreadable ones.
    """
    try:
        return _read(path)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"the tokenizer files in `{path}` cannot be read: {type(error).__name__}: {error}. "
            "hint: download them again"
        ) from error


def _read(path: Path) -> Vocabulary:
    added: dict[int, str] = {}
    merges: list[str] | None = None
    if (path / "tokenizer.json").is_file():
        tokenizer = _load_json(path / "tokenizer.json")
        model = tokenizer["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            plain = {token_id: piece for piece, token_id in vocab.items()}
        else:  # unigram: [piece, score] in id order
            plain = {token_id: str(entry[0]) for token_id, entry in enumerate(vocab)}
        if model.get("merges") is not None:
            merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        added = {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens") or []}
    elif (path / "vocab.json").is_file():
        plain = {token_id: piece for piece, token_id in _load_json(path / "vocab.json").items()}
        if (path / "merges.txt").is_file():
            lines = (path / "merges.txt").read_text(encoding="utf-8").splitlines()
            merges = [line for line in lines if line and not line.startswith("#version")]
    elif (path / "tokenizer.model").is_file():
        plain = dict(enumerate(_sentencepieces((path / "tokenizer.model").read_bytes())))
    else:
        raise ConfigError(
            f"`{path}` has no tokenizer: none of tokenizer.json, vocab.json and tokenizer.model. "
            "hint: name another with `tokenizer`, or set `skip_tokenizer_init=True` to work with "
            "token ids"
        )
    eos = _read_settings(path, added)
    for token_id in added:
        plain.pop(token_id, None)
    return Vocabulary(str(path), plain, added, merges, _find(eos, plain, added))


def _read_settings(path: Path, added: dict[int, str]) -> str | None:
    """Complete ``added`` from the files around the tokenizer; returns the end-of-text token."""
    if (path / "added_tokens.json").is_file():
        for text, token_id in _load_json(path / "added_tokens.json").items():
            added.setdefault(token_id, text)
    eos: Any = None
    if (path / "special_tokens_map.json").is_file():
        eos = _load_json(path / "special_tokens_map.json").get("eos_token")
    if (path / "tokenizer_config.json").is_file():
        settings = _load_json(path / "tokenizer_config.json")
        for key, entry in (settings.get("added_tokens_decoder") or {}).items():
            added.setdefault(int(key), entry["content"])
        eos = settings.get("eos_token") or eos
    return eos.get("content") if isinstance(eos, dict) else eos


def _find(text: str | None, plain: dict[int, str], added: dict[int, str]) -> int | None:
    for known in (added, plain):
        for token_id, piece in known.items():
            if piece == text:
                return token_id
    return None


def _load_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _sentencepieces(data: bytes) -> Iterator[str]:
    """Pieces of a sentencepiece model in id order.

    The file is a protocol buffer: field 1, repeated, is a piece, and a piece's field 1 is its text.
    """
    for field, value in _protobuf_fields(data):
        if field == 1:
            texts = [text for inner, text in _protobuf_fields(value) if inner == 1]
            yield texts[0].decode("utf-8")


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        tag = varint()
        wire_type = tag & 7
        if wire_type == 0:
            varint()
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError(f"not a sentencepiece model (wire type {wire_type})")
        length = varint() if wire_type == 2 else {1: 8, 5: 4}[wire_type]
        yield tag >> 3, data[position : position + length]
        position += length


def compare(target: Vocabulary, drafter: Vocabulary) -> Comparison:
    """Whether the two agree about every plain token and merge."""
    plain = target.plain.keys() | drafter.plain.keys() if target.plain != drafter.plain else ()
    for token_id in sorted(plain):
        ours, theirs = _piece(target, token_id), _piece(drafter, token_id)
        if ours != theirs:
            return Comparison(
                f"they differ at id {token_id} ({_shown(ours)} and {_shown(theirs)}); "
                f"sizes {target.size} and {drafter.size}"
            )
    if target.merges is not None and drafter.merges is not None and target.merges != drafter.merges:
        return Comparison(
            f"their merges differ ({len(target.merges)} and {len(drafter.merges)} of them)"
        )
    other = [i for i in target.added.keys() & drafter.added.keys() if _differs(target, drafter, i)]
    if other:
        first = min(other)
        return Comparison(
            note=f"{len(other)} special tokens have other names, the first at id {first}: "
            f"{target.added[first]!r} and {drafter.added[first]!r}; drafts at these may be rejected"
        )
    return Comparison()


def _piece(vocabulary: Vocabulary, token_id: int) -> str | None:
    return vocabulary.plain.get(token_id, vocabulary.added.get(token_id))


def _differs(target: Vocabulary, drafter: Vocabulary, token_id: int) -> bool:
    return target.added[token_id] != drafter.added[token_id]


def _shown(piece: str | None) -> str:
    return "none" if piece is None else repr(piece)


def check_pair(
    target: Vocabulary | None,
    drafter: Vocabulary | None,
    target_rows: int,
    drafter_rows: int,
    names: tuple[str, str],
) -> str | None:
    """Check a target and drafter by their vocabularies and embedding rows.

    A vocabulary is None where there is no tokenizer to read. Without the target's, any id below
    ``target_rows`` may be sampled.

    Returns:
        A note about harmless differences, or None.

    Raises:
        ConfigError: naming both models and the ways out.
    """
    ways_out = (
        "hint: use a drafter of the target's family (with the same tokenizer), or "
        '`speculative_model="[ngram]"`, which needs no drafter model'
    )
    note: str | None = None
    if target is not None and drafter is not None:
        comparison = compare(target, drafter)
        if comparison.problem is not None:
            raise ConfigError(
                f"`{names[1]}` cannot draft for `{names[0]}`: their tokenizers are not the same, "
                f"{comparison.problem}. {ways_out}"
            )
        note = comparison.note
    known = target_rows if target is None else min(target.size, target_rows)
    if drafter_rows < known:
        raise ConfigError(
            f"`{names[1]}` cannot draft for `{names[0]}`: its embedding has {drafter_rows} rows, "
            f"but the target may sample {known} token ids. {ways_out}"
        )
    return note
