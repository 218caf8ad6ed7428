"""Compilation: what it is made from, what it refuses, that it is kept; and one sequence's masks."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from engine.text_models import STYLES, tokenizer
from paceline.engine import structured as module
from paceline.engine.structured import SequenceGrammar, StructuredOutputs
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams, StructuredOutputsParams

pytest.importorskip("xgrammar")

PADDING = 40  # ids of the model that the tokenizer does not know
NO_DRAFTS = np.zeros(0, np.int32)


def vocabulary(tok: Tokenizer) -> int:
    return tok.vocab_size + PADDING


def end_of(tok: Tokenizer) -> int:
    """Some special token, to end texts with."""
    return min(tok.special_token_ids)


def compiler(style: str = "byte-level", **options: Any) -> StructuredOutputs:
    tok = tokenizer(style)
    return StructuredOutputs(tok, vocabulary(tok), [end_of(tok)], **options)


def asking(sampling: dict[str, Any] | None = None, **structure: Any) -> SamplingParams:
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(**structure), **(sampling or {})
    )


def grammar_of(style: str, sampling: SamplingParams) -> SequenceGrammar:
    return compiler(style).sequence_grammars(sampling)[0]


def masks(grammar: SequenceGrammar, drafts: list[int], vocab: int) -> tuple[int, list[set[int]]]:
    """What ``fill`` returns, and the ids allowed at each place that counts."""
    words = np.zeros((len(drafts) + 1, -(-vocab // 32)), np.int32)
    count = grammar.fill(np.array(drafts, np.int32), words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return count, [set(np.flatnonzero(row).tolist()) for row in bits[: count + 1]]


def ids_array(ids: list[int]) -> Any:
    return np.array(ids, np.int32)


# ---- masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_random_texts_of_every_tokenizer_match(style: str) -> None:
    """Any walk along the masks gives a text of the language, as the tokenizer itself decodes it."""
    tok, rng = tokenizer(style), random.Random(5)
    vocab, end, compiled = vocabulary(tok), end_of(tok), compiler(style)
    sampling = asking(regex=r"[a-eé中]{2,9}( [A-H]+)?")
    for _ in range(12):
        grammar, ids = compiled.sequence_grammars(sampling)[0], [tok.encode("x")[-1]]
        start = len(tok.decode(ids))
        while True:
            _, (allowed, *_) = masks(grammar, [], vocab)
            assert allowed.isdisjoint(tok.special_token_ids - {end})
            assert max(allowed) < tok.vocab_size
            choice = rng.choice(sorted(allowed))
            if choice == end:
                break
            grammar.accept(ids_array([choice]))
            ids.append(choice)
        assert re.fullmatch(r"[a-eé中]{2,9}( [A-H]+)?", tok.decode(ids)[start:])


def test_every_text_is_valid_utf8() -> None:
    """A walk along first bytes of many-byte characters, which classes alone do not follow well."""
    tok, rng = tokenizer("byte-level"), random.Random(7)
    text_of = tok.token_bytes(skip_special_tokens=True)
    compiled, end = compiler(), end_of(tok)
    for structure in ({"regex": "[^a]{3}"}, {"json": {"type": "string", "minLength": 2}}):
        for _ in range(40):
            grammar, text = compiled.sequence_grammars(asking(**structure))[0], b""
            while True:
                _, (allowed, *_) = masks(grammar, [], vocabulary(tok))
                if end in allowed:
                    break
                leads = [
                    i for i in allowed if text_of[i][-1:] in (b"\xe0", b"\xed", b"\xf0", b"\xf4")
                ]
                closing = allowed & set(tok.encode('"')) if len(text) > 12 else None
                choice = rng.choice(sorted(closing or leads or allowed))
                grammar.accept(ids_array([choice]))
                text += text_of[choice]
            text.decode("utf-8")  # raises


def test_masks_after_drafts_are_those_of_token_by_token() -> None:
    tok = tokenizer("byte-level")
    vocab, sampling = vocabulary(tok), asking(json_object=True)
    text = tok.encode('{"ab": [1, 22], "c": null}')
    drafted, alone = grammar_of("byte-level", sampling), grammar_of("byte-level", sampling)
    for start in range(0, len(text), 4):
        drafts = text[start : start + 4]
        count, found = masks(drafted, drafts, vocab)
        assert count == len(drafts)
        for place, token in enumerate(drafts):
            assert masks(alone, [], vocab) == (0, [found[place]])
            alone.accept(ids_array([token]))
        assert masks(alone, [], vocab) == (0, [found[len(drafts)]])
        drafted.accept(ids_array(drafts))
    assert drafted.num_tokens == alone.num_tokens == len(text)


def test_drafts_are_cut_at_the_first_that_leaves_the_grammar() -> None:
    tok = tokenizer("byte-level")
    grammar = grammar_of("byte-level", asking(regex="abc[0-9]+"))
    a, b, c, one = (tok.encode(x)[0] for x in "abc1")
    assert masks(grammar, [a, b, a, c], vocabulary(tok))[0] == 2
    assert masks(grammar, [c, b], vocabulary(tok))[0] == 0
    assert masks(grammar, [vocabulary(tok) - 1], vocabulary(tok))[0] == 0
    count, places = masks(grammar, [a, b, c, one, end_of(tok), a, a], vocabulary(tok))
    assert count == 5  # an end may be verified; what stands behind it is cut off anyway
    assert end_of(tok) in places[4]
    assert len(places[5]) >= vocabulary(tok)
    # Nothing of this was taken: the grammar still stands at its beginning.
    assert grammar.num_tokens == 0
    assert a in masks(grammar, [], vocabulary(tok))[1][0]


def test_an_end_comes_only_when_the_text_is_complete() -> None:
    tok = tokenizer("byte-level")
    end, vocab = end_of(tok), vocabulary(tok)
    grammar = grammar_of("byte-level", asking(choice=["ab", "abab"]))
    for text, token in zip(("", "a", "ab", "aba"), "abab", strict=True):
        assert (end in masks(grammar, [], vocab)[1][0]) == (text == "ab")
        grammar.accept(ids_array(tok.encode(token)))
    assert masks(grammar, [], vocab)[1] == [{end}]


def test_min_tokens_keeps_the_end_away_while_anything_else_may_come() -> None:
    tok = tokenizer("byte-level")
    end, vocab = end_of(tok), vocabulary(tok)
    one = tok.encode("1")[0]
    grammar = grammar_of("byte-level", asking({"min_tokens": 3, "max_tokens": 9}, regex="1+"))
    grammar.accept(ids_array([one]))
    count, places = masks(grammar, [one, one, one], vocab)
    assert count == 3
    assert [end in allowed for allowed in places] == [False, False, True, True]
    complete = grammar_of("byte-level", asking({"min_tokens": 9, "max_tokens": 9}, regex="1"))
    complete.accept(ids_array([one]))
    assert masks(complete, [], vocab)[1] == [{end}]


def test_a_stop_id_that_is_text_may_come_inside() -> None:
    """It ends the sequence when it comes, as a stop string does, but it is no end of the text."""
    tok = tokenizer("byte-level")
    one, two = tok.encode("1")[0], tok.encode("2")[0]
    sampling = asking({"stop_token_ids": [two], "min_tokens": 1, "max_tokens": 9}, regex="[12]{3}")
    grammar = grammar_of("byte-level", sampling)
    assert masks(grammar, [], vocabulary(tok))[1] == [{one}]  # min_tokens concerns it too
    grammar.accept(ids_array([one]))
    assert masks(grammar, [], vocabulary(tok))[1] == [{one, two}]


def test_a_token_with_no_place_leaves_nothing_to_come() -> None:
    tok = tokenizer("byte-level")
    grammar = grammar_of("byte-level", asking(regex="1"))
    grammar.accept(ids_array(tok.encode("a")))
    assert masks(grammar, [], vocabulary(tok))[0] == -1


# ---- compilation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"json": {"properties": {"a": {"type": "int"}}}}, "at #/properties/a/type"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": '{"type": "\\ud800"}'}, "half of a character"),
        ({"json": {"type": []}}, "names no type"),
        ({"json": {"oneOf": [{"const": i} for i in range(501)]}}, "501 alternatives"),
        ({"json": {"$ref": "#"}}, "the JSON schema"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "the JSON schema"),
        ({"regex": "(a"}, "position 3"),
        ({"regex": r"(a)\1"}, "position 4"),
        ({"regex": "(" * 300 + ")" * 300}, "deep, at character 201"),
        ({"grammar": "root ::= x"}, "line 1, column 10"),
        ({"grammar": "start: x"}, "line 1, column 8"),
        ({"grammar": "root: x"}, "start"),
        ({"grammar": "start: /(a/"}, "regular expression: Regex parsing error at position 3"),
        ({"grammar": "root ::= root"}, "allows no text"),
        ({"grammar": 'root ::= "' + "a" * 140_000 + '"'}, "140,011 characters"),
    ],
)
def test_what_cannot_be_compiled_says_where(structure: dict[str, Any], says: str) -> None:
    future = compiler().prepare(asking(**structure))
    assert future is not None
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        future.result(timeout=30)
    assert not re.search(r"\.cc:\d+", str(caught.value))


def test_equal_structures_are_compiled_once() -> None:
    outputs = compiler()
    schema = {"type": "integer"}
    first = outputs.prepare(asking(json=schema))
    assert outputs.prepare(asking(json=json.dumps(schema))) is first
    assert outputs.prepare(asking(json=schema, disable_any_whitespace=True)) is not first
    assert outputs.prepare(asking(regex=json.dumps(schema))) is not first
    assert outputs.prepare(SamplingParams()) is None
    refused = outputs.prepare(asking(regex="(a"))
    assert refused is not None
    assert isinstance(refused.exception(timeout=30), RequestError)
    assert outputs.prepare(asking(regex="(a")) is not refused


def test_compiled_grammars_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = compiler()
    kept = [asking(regex=f"[a-z]{{{i}}}") for i in (1, 2, 3)]
    sizes = [wait(outputs, sampling).num_bytes for sampling in kept]
    first = outputs.prepare(kept[0])
    monkeypatch.setattr(module, "CACHE_BYTES", sum(sizes))
    wait(outputs, asking(regex="[a-z]{4}"))
    assert outputs.prepare(kept[0]) is first  # asked for since
    assert kept[1].structured_outputs is not None
    assert ("regex", "[a-z]{2}", False) not in outputs._cache


def wait(outputs: StructuredOutputs, sampling: SamplingParams) -> Any:
    future = outputs.prepare(sampling)
    assert future is not None
    return future.result(timeout=30)


def test_what_was_prepared_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may have let go of it meanwhile, and the engine's thread must not wait."""
    structured = compiler()
    sampling = asking(regex="[a-z]+")
    prepared = structured.prepare(sampling)
    assert prepared is not None
    prepared.result()
    structured._cache.clear()
    monkeypatch.setattr(structured, "prepare", None)
    (grammar,) = structured.sequence_grammars(sampling, prepared)
    assert isinstance(grammar, SequenceGrammar)


def test_a_compilation_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(self: StructuredOutputs, key: Any) -> Any:
        go_on.wait(30)
        raise AssertionError("too late")

    monkeypatch.setattr(StructuredOutputs, "_compile", slow)
    outputs = compiler(seconds=0.05)
    futures: list[Future[Any] | None] = [
        outputs.prepare(asking(regex=f"a{{{i}}}")) for i in range(1, 5)
    ]
    start = time.monotonic()
    for future in futures:  # two compile, two wait for their turn
        assert future is not None
        with pytest.raises(RequestError, match=r"not compiled within 0\.05 s"):
            future.result(timeout=10)
    assert time.monotonic() - start < 5
    go_on.set()


def test_without_the_package_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(RequestError, match=r'pip install -c constraints.txt -e "\.\[serve\]"'):
        wait(compiler(), asking(regex="a"))


def test_a_model_without_an_end_of_text_needs_one() -> None:
    tok = tokenizer("byte-level")
    outputs = StructuredOutputs(tok, vocabulary(tok), [])
    with pytest.raises(RequestError, match="need an end-of-text token"):
        outputs.sequence_grammars(asking(regex="a"))
    named = outputs.sequence_grammars(asking({"stop_token_ids": [end_of(tok)]}, regex="a"))[0]
    named.accept(ids_array(tok.encode("a")))
    assert masks(named, [], vocabulary(tok))[1] == [{end_of(tok)}]
