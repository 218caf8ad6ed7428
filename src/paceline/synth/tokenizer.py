"""A byte-level tokenizer of any size whose words are made of syllables.

Ids 0 to 255 are bytes, the next 100 are syllables ("ba", "ko"), all others words with a space in
front (" ba", " bako", " bakomi"). A text of such words takes one token a word and becomes the same
ids again; other text takes a token for every byte or syllable.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from paceline.synth.shapes import Vocabulary

_SYLLABLES = ["".join(pair) for pair in product("bcdfghjklmnprstvwxyz", "aeiou")]
FIRST_WORD = 256 + len(_SYLLABLES)  # id of the first token that is a word
_SPACE = "Ġ"  # how byte-level vocabularies spell it

_TURNS = {
    "llama": "'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' "
    "+ message.content + '<|eot_id|>'",
    "qwen": "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n'",
}
_ANSWER = {
    "llama": "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
    "qwen": "<|im_start|>assistant\\n",
}


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a vocabulary with at least a few words."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SYLLABLES]
    merges = [(syllable[0], syllable[1]) for syllable in _SYLLABLES]
    level = [_SPACE]
    while len(pieces) < vocabulary.plain:
        # Shorter words first: each is the beginning of longer ones.
        room = vocabulary.plain - len(pieces)
        grown = list(islice(product(level, _SYLLABLES), room))
        merges += grown
        level = [word + syllable for word, syllable in grown]
        pieces += level
    tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in vocabulary.special]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    style = "llama" if vocabulary.name == "llama" else "qwen"
    template = (
        "{%- for message in messages %}{{- " + _TURNS[style] + " }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '" + _ANSWER[style] + "' }}{%- endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.stop[0],
        "pad_token": vocabulary.stop[-1],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    generation = {
        "bos_token_id": vocabulary.special_id(vocabulary.bos),
        "eos_token_id": vocabulary.stop_ids,
        "pad_token_id": vocabulary.stop_ids[-1],
        # Acceptance is exact for greedy output. Some read the one, some the other.
        "do_sample": False,
        "temperature": 0.0,
    }
    for name, content in (("tokenizer_config", settings), ("generation_config", generation)):
        text = json.dumps(content, indent=2) + "\n"
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
