"""What a model's token ids add to a text, in the form that structured outputs need.

This file must not know grammars.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from paceline.arrays import Int32Array
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import RequestError

# First bytes of characters after which UTF-8 allows only some of 0x80 to 0xBF. The compiler's
# classes know it of none or not all of them.
_SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model's token ids add to a text."""

    texts: list[bytes]  # nothing for special ids, which never come inside, and for gaps
    # For each of ``_SECOND_BYTES``, a mask of the ids that may follow it.
    after: dict[int, Int32Array]


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The first ``vocab_size`` ids; those that the tokenizer does not know are gaps.

    Raises:
        RequestError: the tokenizer's texts are no sum of its tokens' bytes.
    """
    known = token_texts(tokenizer)[:vocab_size]
    texts = [b"" if _breaks_utf8(text) else text for text in known]
    texts += [b""] * (vocab_size - len(texts))
    first = np.array([text[0] if text else 0 for text in texts], np.uint8)
    after = {}
    for lead, (low, high) in _SECOND_BYTES.items():
        bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        bits[:vocab_size] = (first >= low) & (first <= high)
        after[lead] = np.packbits(bits, bitorder="little").view(np.int32)
    return Vocabulary(texts, after)


def _breaks_utf8(text: bytes) -> bool:
    """Whether a token holds a byte that may not follow the one before it."""
    if text.isascii():
        return False
    for lead, second in itertools.pairwise(text):
        low, high = _SECOND_BYTES.get(lead, (0, 255))
        if not low <= second <= high:
            return True
    return False


def token_texts(tokenizer: Tokenizer) -> list[bytes]:
    """What each token id adds to the text; nothing for special ones and for gaps.

    Raises:
        RequestError: the tokenizer's texts are no sum of its tokens' bytes.
    """
    size = tokenizer.vocab_size
    if tokenizer.is_byte_level:
        known = tokenizer.token_bytes(skip_special_tokens=True)
        return [known[i] for i in range(size)]
    if not tokenizer.has_byte_fallback:
        raise RequestError(
            "structured outputs need a byte-level or byte-fallback tokenizer, and the one of "
            f"{tokenizer.path.name} is neither. hint: use another model for this"
        )
    return [_piece_bytes(tokenizer, i) for i in range(size)]


def _piece_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Bytes of a token of a SentencePiece-style vocabulary."""
    text = tokenizer.token_text(token_id, skip_special_tokens=True) or ""
    if tokenizer.is_byte_token(token_id):
        return bytes([int(text[3:5], 16)])
    if token_id not in tokenizer.added_token_ids:
        text = text.replace("▁", " ")
    return text.encode()
