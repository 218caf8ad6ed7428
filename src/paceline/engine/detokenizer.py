"""Token ids to text as they arrive: whole characters only, and in sum exactly one-shot decoding.

What has been emitted after n ids depends on these ids alone, never on how they were cut into runs.
Two exact ways, by kind of tokenizer:

- *byte-level BPE* (GPT-2, Qwen, Llama 3): a token is a string of bytes. Look them up, append,
  decode UTF-8 incrementally; the bytes of an unfinished character wait for the next ids.
- *others* (SentencePiece style): a token's text may depend on the token before it (the leading
  space of a text is dropped; runs of ``<0xNN>`` bytes are decoded together). The library decodes
  the new tokens after one settled token, the anchor, whose own text is cut off. A run of byte
  tokens is settled only when another token ends it: until then one more byte can make all of it
  invalid.

This file must not know requests or stop strings.

    detokenizer = IncrementalDetokenizer(tokenizer)
    text = detokenizer.push([12, 345]) + detokenizer.push([6]) + detokenizer.flush()
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from paceline.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Text of one sequence.

    The concatenation of everything returned by ``push`` and a last ``flush`` equals
    ``tokenizer.decode(all ids, skip_special_tokens)``. U+FFFD stands for bytes that are no UTF-8:
    it appears as soon as no further id can make them valid, at the latest in ``flush``.

    prompt_tail_ids: the last ids of the prompt, where the output continues them: then a word keeps
    the space that separates it from the prompt (SentencePiece drops it at the start of a text), and
    a character begun by the prompt is completed. Text of the prompt itself is never returned.
    """

    __slots__ = ("_anchor", "_bytes", "_pending", "_pending_ids", "_skip", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_tail_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._bytes = (
            tokenizer.token_bytes(skip_special_tokens) if tokenizer.is_byte_level else None
        )
        self._pending = b""  # byte-level: an unfinished character
        self._anchor: list[int] = []  # others: settled ids that the next text is decoded after
        self._pending_ids: list[int] = []  # others: a run of byte tokens that may go on
        if len(prompt_tail_ids):
            self.push(prompt_tail_ids)

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the characters that they settle."""
        table = self._bytes
        if table is None:
            return self._push_decoded(ids)
        data = self._pending + b"".join([table[token_id] for token_id in ids])
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """No more ids: what is left, with U+FFFD for an unfinished character."""
        if self._bytes is not None:
            text = self._pending.decode("utf-8", "replace")
            self._pending = b""
        else:
            text = self._after_anchor(self._pending_ids)
            self._pending_ids = []
        return text

    @property
    def held_text(self) -> str:
        """Whole characters that are held back because the next id may still make them invalid;
        "" for byte-level tokenizers, which hold back nothing whole."""
        if not self._pending_ids:
            return ""
        text = self._after_anchor(self._pending_ids)
        return "" if REPLACEMENT in text else text

    @property
    def holds_whole_characters(self) -> bool:
        """Whether ``held_text`` can be anything but empty with this tokenizer."""
        return self._bytes is None

    def copy(self) -> IncrementalDetokenizer:
        """An independent copy, to try ids and come back."""
        other = IncrementalDetokenizer(self._tokenizer, self._skip)
        other._pending = self._pending
        other._anchor, other._pending_ids = self._anchor, self._pending_ids
        return other

    def _push_decoded(self, ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        pending = self._pending_ids + [
            token_id for token_id in ids if tokenizer.token_text(token_id, self._skip) is not None
        ]
        settled = len(pending)
        while settled and tokenizer.is_byte_token(pending[settled - 1]):
            settled -= 1
        if not settled:
            self._pending_ids = pending
            return ""
        text = self._after_anchor(pending[:settled])
        if tokenizer.token_text(pending[settled - 1]):
            self._anchor = pending[settled - 1 : settled]
        else:  # a token without text cannot stand for "the text has begun"
            self._anchor = self._anchor + pending[:settled]
        self._pending_ids = pending[settled:]
        return text

    def _after_anchor(self, ids: list[int]) -> str:
        """Text of ids right after the anchor."""
        if not ids:
            return ""
        decode = self._tokenizer.decode
        text = decode(self._anchor + ids, self._skip)
        return text[len(decode(self._anchor, self._skip)) :] if self._anchor else text
