from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import STYLES, ids_of, runs_of, tokenizer

from paceline.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer

# A family (four emoji joined by zero-width joiners), a flag, a letter with combining marks, Hangul
# jamo, CJK, a character outside the BMP.
HARD_TEXT = "a👨‍👩‍👧‍👦b 🇩🇪 é̂ 각 中文字 𝒳 <0x41> ▁ \ufffd ok\n\n  end "


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[list[int]], bool]:
    style = draw(st.sampled_from(STYLES))
    return style, runs_of(draw, draw(ids_of(style))), draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_sum_of_all_deltas_is_one_shot_decoding(
    case: tuple[str, list[list[int]], bool],
) -> None:
    style, runs, skip = case
    detokenizer = IncrementalDetokenizer(tokenizer(style), skip)
    text = "".join([detokenizer.push(run) for run in runs]) + detokenizer.flush()
    assert text == tokenizer(style).decode([i for run in runs for i in run], skip)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_what_was_emitted_never_changes_whatever_follows(
    case: tuple[str, list[list[int]], bool],
) -> None:
    style, runs, skip = case
    shared = tokenizer(style)
    detokenizer = IncrementalDetokenizer(shared, skip)
    single = IncrementalDetokenizer(shared, skip)
    emitted, ids, emitted_singly = "", [], ""
    final = shared.decode([i for run in runs for i in run], skip)
    for run in runs:
        emitted += detokenizer.push(run)
        emitted_singly += "".join([single.push([token_id]) for token_id in run])
        ids += run
        # The same ids give the same text however they are cut, and no later id takes it back; so
        # U+FFFD is out only where it is final.
        assert emitted == emitted_singly
        assert final.startswith(emitted)
        assert shared.decode(ids, skip).startswith(emitted + detokenizer.held_text)


@pytest.mark.parametrize("style", STYLES)
def test_a_character_comes_whole(style: str) -> None:
    shared = tokenizer(style)
    ids = shared.encode(HARD_TEXT, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(shared)
    deltas = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(deltas) + detokenizer.flush() == shared.decode(ids)
    genuine = HARD_TEXT.count(REPLACEMENT)
    assert sum(delta.count(REPLACEMENT) for delta in deltas) == genuine
    assert len([delta for delta in deltas if delta]) < len(ids)  # some ids had to wait


@pytest.mark.parametrize("style", STYLES)
def test_bytes_that_are_no_character_appear_once_they_are_settled(style: str) -> None:
    shared = tokenizer(style)
    is_bytes = style == "byte-level"
    first = shared.encode("中")[0] if is_bytes else shared.token_id("<0xE4>")
    letter = shared.token_id("A")
    detokenizer = IncrementalDetokenizer(shared)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([letter]) == REPLACEMENT + "A"
    assert detokenizer.flush() == ""


def test_an_unfinished_character_comes_out_in_flush() -> None:
    shared = tokenizer("byte-level")
    ids = shared.encode("🙂")
    detokenizer = IncrementalDetokenizer(shared)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_special_tokens_are_skipped_on_request() -> None:
    shared = tokenizer("byte-level")
    ids = shared.encode("a<|im_end|>b<tool call>《工具》<｜end▁of｜>")
    assert IncrementalDetokenizer(shared, True).push(ids) == "ab<tool call>《工具》"
    everything = IncrementalDetokenizer(shared, False).push(ids)
    assert everything == "a<|im_end|>b<tool call>《工具》<｜end▁of｜>"


@pytest.mark.parametrize("style", ["sentencepiece", "metaspace"])
def test_output_keeps_the_space_that_separates_it_from_the_prompt(style: str) -> None:
    shared = tokenizer(style)
    hello, world = shared.token_id("▁Hello"), shared.token_id("▁world")
    assert hello is not None
    assert world is not None
    assert IncrementalDetokenizer(shared).push([world]) == "world"
    assert IncrementalDetokenizer(shared, True, [1, hello]).push([world]) == " world"
    # Only special tokens before it: a text begins.
    assert IncrementalDetokenizer(shared, True, [1]).push([world]) == "world"


@pytest.mark.parametrize("style", STYLES)
def test_output_completes_a_character_that_the_prompt_began(style: str) -> None:
    shared = tokenizer(style)
    ids = shared.encode("ab🙂", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(shared, True, ids[:-1])
    assert detokenizer.push(ids[-1:]) + detokenizer.flush() == "🙂"


def test_held_text_is_whole_characters_only() -> None:
    shared = tokenizer("sentencepiece")
    newline, first = shared.token_id("<0x0A>"), shared.token_id("<0xE4>")
    assert newline is not None
    assert first is not None
    detokenizer = IncrementalDetokenizer(shared)
    assert detokenizer.held_text == ""
    assert detokenizer.push([newline]) == ""
    assert detokenizer.held_text == "\n"
    detokenizer.push([first])
    assert detokenizer.held_text == ""
    # The library decodes a run of bytes as one: a stray byte spoils the newline before it.
    assert detokenizer.flush() == REPLACEMENT * 2 == shared.decode([newline, first])


def test_a_push_costs_the_same_however_long_the_text_is() -> None:
    for style in STYLES:
        shared = tokenizer(style)
        detokenizer = IncrementalDetokenizer(shared)
        for _ in range(50):
            detokenizer.push(shared.encode(HARD_TEXT))
        assert len(detokenizer._anchor) <= 1
        assert len(detokenizer._pending) < 4


def test_a_copy_goes_its_own_way() -> None:
    for style in STYLES:
        shared = tokenizer(style)
        ids = shared.encode("x🙂 Hello 中", add_special_tokens=False)
        for cut in range(len(ids)):
            detokenizer = IncrementalDetokenizer(shared)
            before = detokenizer.push(ids[:cut])
            other = detokenizer.copy()
            other.push(shared.encode("🙂b"))
            rest = detokenizer.push(ids[cut:]) + detokenizer.flush()
            assert before + rest == shared.decode(ids)
