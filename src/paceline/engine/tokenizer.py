"""Text to token ids and back, through the tokenizer that a model directory ships.

``tokenizer.json`` is read by the tokenizers library alone: it says all there is to say, gives the
ids and the text that transformers gives, and spares the import of transformers (most of a second).
Only a directory without that file goes through ``transformers.AutoTokenizer``, never with remote
code. This file must not know requests, sampling or the engine.

    tokenizer = Tokenizer.load("path/to/model")
    tokenizer.decode(tokenizer.encode("Hello"))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import tokenizers

from paceline.errors import ConfigError, PromptTooLongError, RequestError

if TYPE_CHECKING:
    from paceline.engine.chat import ChatTemplates

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_LONG_TEXT = 1 << 16  # characters
_MOST_SHORTENING = 4  # bytes that composing characters (NFC) may make one of
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's printable stand-ins: byte-level vocabularies write each byte as one character.

    Bytes that print in Latin-1 stand for themselves, the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


class TokenBytes(dict[int, bytes]):
    """UTF-8 bytes that a byte-level token adds to the text, looked up once per token id.

    Ids without a token, and special tokens when they are skipped, add nothing.
    """

    _SYMBOLS = _byte_of_symbol()

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.token_text(token_id, self._skip_special_tokens) or ""
        try:
            value = bytes([self._SYMBOLS[symbol] for symbol in token])
        except KeyError:  # an added token, stored as plain text
            value = token.encode()
        self[int(token_id)] = value
        return value


class Tokenizer:
    """One model's tokenizer; safe to share between threads once loaded."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], path: Path):
        """
        backend: the tokenizer proper; changed here to neither pad nor truncate.
        settings: content of tokenizer_config.json, {} without one.
        path: the model directory, for chat templates and messages.
        """
        self.backend = backend
        self.settings = settings
        self.path = path
        self.special_tokens = _named_special_tokens(settings)  # "bos_token" -> its text
        _add_declared_tokens(backend, settings, self.special_tokens)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
        kinds = _decoder_kinds(backend)
        # Byte-level: each token is bytes, and the text is their sum. Byte fallback: tokens are
        # text, except runs of <0xNN>, which are decoded together.
        self.is_byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        self.has_byte_fallback = "ByteFallback" in kinds
        self.added_token_ids = frozenset(backend.get_added_tokens_decoder())
        self.special_token_ids = frozenset(
            token_id
            for token_id in self.added_token_ids
            if backend.decode([token_id], skip_special_tokens=False)
            and not backend.decode([token_id], skip_special_tokens=True)
        )
        self._token_bytes = {skip: TokenBytes(self, skip) for skip in (False, True)}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a local model directory.

        Raises:
            ConfigError: no directory, no tokenizer in it, or one that cannot be read.
        """
        path = Path(path)
        if not path.is_dir():
            raise ConfigError(
                f"tokenizer directory {path} does not exist. hint: `tokenizer` takes a local "
                "directory or a hub id"
            )
        settings = _read_json(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in settings:  # older layout: the map has the last word
            settings = {**settings, **_read_json(path / "special_tokens_map.json")}
        if (path / "tokenizer.json").is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
            except Exception as error:  # the library raises bare Exception
                raise ConfigError(
                    f"{path / 'tokenizer.json'} cannot be read: {error}. hint: fetch the file "
                    "again; a newer format needs a newer `tokenizers` package"
                ) from error
            return cls(backend, settings, path)
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(
                f"no tokenizer in {path}: none of {', '.join(TOKENIZER_FILES)} is there. hint: "
                "pass `tokenizer` with a directory that has one, or `skip_tokenizer_init=True` to "
                "work with token ids only"
            )
        return cls(_load_through_transformers(path), settings, path)

    # --- text to ids

    def encode(
        self, text: str, add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised.

        add_special_tokens: also what the tokenizer itself puts around a text, such as a BOS token.
        limit: tokens that are of use; a text that must have more is refused unread.

        Raises:
            RequestError: ``text`` is no string, not encodable as UTF-8, too long, or more than the
                tokenizer can take.
        """
        self._check_text(text, limit)
        if len(text) > _LONG_TEXT:
            return self._encode_many([text], add_special_tokens)[0]
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[list[int]]:
        """``encode`` of many texts, in parallel where the machine has the cores."""
        for text in texts:
            self._check_text(text, limit)
        return self._encode_many(list(texts), add_special_tokens)

    def _encode_many(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Without the places of tokens in the text, which take a hundred bytes each."""
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's, and no Exception
                raise
            longest = max(map(len, texts))
            raise RequestError(
                f"the tokenizer gave up on a text of {longest} characters. hint: send less, without"
                " millions of equal characters in a row"
            ) from None
        return [encoding.ids for encoding in encodings]

    def _check_text(self, text: object, limit: int | None) -> None:
        _check_text(text)
        if limit is None or not isinstance(text, str) or len(text) <= _LONG_TEXT:
            return
        least = len(text.encode()) // self._most_bytes_of_a_token
        if least > limit:
            raise PromptTooLongError(
                f"the prompt text has {len(text)} characters, so at least {least} tokens, but the "
                f"context holds {limit}. hint: send less"
            )

    @cached_property
    def _most_bytes_of_a_token(self) -> int:
        """Of a text before normalization, which may shorten it."""
        texts = self.backend.get_vocab(with_added_tokens=True)
        longest = max(len(text.encode()) for text in texts)
        return longest * (1 if self.backend.normalizer is None else _MOST_SHORTENING)

    # --- ids to text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of all of ``ids``; ids without a token are left out, incomplete characters and
        bytes that are no UTF-8 become U+FFFD."""
        known = [int(token_id) for token_id in ids if token_id >= 0]
        text: str = self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def decode_token(self, token_id: int) -> str:
        """One token on its own, special ones too: what logprobs show."""
        return self.decode((token_id,), skip_special_tokens=False)

    def token_text(self, token_id: int, skip_special_tokens: bool = False) -> str | None:
        """The token as the vocabulary spells it; None without a token or when it is skipped."""
        if token_id < 0 or (skip_special_tokens and token_id in self.special_token_ids):
            return None
        text: str | None = self.backend.id_to_token(int(token_id))
        return text

    def token_bytes(self, skip_special_tokens: bool) -> TokenBytes:
        """Bytes by token id, shared by all users; meaningful when ``is_byte_level``."""
        return self._token_bytes[skip_special_tokens]

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token stands for one byte and is decoded together with its neighbours."""
        return self.has_byte_fallback and bool(
            _BYTE_TOKEN.fullmatch(self.token_text(token_id) or "")
        )

    # --- vocabulary

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id + 1, added tokens included; the model may pad its own beyond that."""
        # Counting the entries is not enough: ids may have holes.
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return max(vocabulary.values(), default=-1) + 1

    def token_id(self, token: str) -> int | None:
        """Id of a token spelt as in the vocabulary."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token that tokenizer_config.json names."""
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self.token_id(eos)

    @property
    def bos_token_id(self) -> int | None:
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self.token_id(bos)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text as far as the tokenizer knows; the model's configs may name more."""
        eos = self.eos_token_id
        return () if eos is None else (eos,)

    # --- chat

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """The model's chat templates; empty when it has none."""
        from paceline.engine.chat import ChatTemplates  # only chats pay for importing Jinja

        return ChatTemplates.load(self.path, self.settings, self.special_tokens)

    @overload
    def apply_chat_template(
        self, messages: object, *, tokenize: Literal[True] = True, **options: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: object, *, tokenize: Literal[False], **options: Any
    ) -> str: ...

    def apply_chat_template(
        self, messages: object, *, tokenize: bool = True, **options: Any
    ) -> list[int] | str:
        """A conversation as the prompt the model was trained on: token ids, or text.

        options: those of ``ChatTemplates.render`` (chat_template, tools, add_generation_prompt,
        continue_final_message, chat_template_kwargs).

        The template writes the BOS token itself if the model wants one; encoding adds no other.

        Raises:
            RequestError: malformed messages, no template, or what the template complains about.
        """
        text = self.chat_templates.render(messages, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a prompt text must be a str, got {type(text).__name__}")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestError(
            "the prompt text holds half of a surrogate pair, which is no character. hint: decode "
            'bytes with `errors="replace"`, and JSON with both halves of the pair'
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Content of an optional JSON file that holds an object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON: {error}. hint: fetch it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _content(token: object) -> str | None:
    """Text of a token that is written as a string or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _named_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in settings.items():
        text = _content(value) if name.endswith("_token") else None
        if text is not None:
            tokens[name] = text
    extra = settings.get("extra_special_tokens")
    for name, value in extra.items() if isinstance(extra, Mapping) else ():
        if (text := _content(value)) is not None:
            tokens[name] = text
    return tokens


def _add_declared_tokens(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json declares."""
    tokens: dict[str, tokenizers.AddedToken] = {}
    declared = settings.get("added_tokens_decoder") or {}
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, token in sorted(declared.items(), key=lambda entry: int(entry[0])):
        if (text := _content(token)) is not None:
            flags = {name: token[name] for name in fields if name in token}
            tokens[text] = tokenizers.AddedToken(text, **flags)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    others = [_content(token) for token in extra] if isinstance(extra, list) else []
    for text in [*named.values(), *others]:
        if text is not None:
            tokens.setdefault(text, tokenizers.AddedToken(text, special=True))
    # What tokenizer.json says of a token holds, also whether it is special.
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for text, token in tokens.items() if text not in present])


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Types of the decoders in the chain, such as {"Replace", "ByteFallback", "Fuse", "Strip"}."""
    if backend.decoder is None:
        return set()
    # The only view of a decoder's parts that does not write out the whole vocabulary.
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _load_through_transformers(path: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a converter may raise: all mean the same to the user
        raise ConfigError(
            f"the tokenizer in {path} cannot be converted: {error}. hint: save it once with "
            "transformers' `save_pretrained`, which writes tokenizer.json"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"the tokenizer in {path} ({type(loaded).__name__}) has no fast form. hint: use a "
            "directory with tokenizer.json"
        )
    return backend
