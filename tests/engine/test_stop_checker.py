from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import STYLES, ids_of, runs_of, tokenizer

from paceline.engine.detokenizer import IncrementalDetokenizer
from paceline.engine.stop_checker import SequenceText, StopStrings
from paceline.sampling_params import SamplingParams


@dataclass
class Case:
    style: str
    runs: list[list[int]]
    stop: list[str]
    include: bool
    min_tokens: int
    skip: bool

    @property
    def ids(self) -> list[int]:
        return [token_id for run in self.runs for token_id in run]

    def sequence_text(self) -> SequenceText:
        return SequenceText(
            tokenizer(self.style),
            skip_special_tokens=self.skip,
            stop=self.stop,
            include_stop_str_in_output=self.include,
            min_tokens=self.min_tokens,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    style = draw(st.sampled_from(STYLES))
    ids = draw(ids_of(style, 16))
    text = tokenizer(style).decode(ids)
    # Stop strings that occur, begin, or end in the text, and some that do not.
    stops = st.text("a🙂 中é\n", min_size=1, max_size=3)
    if text:
        begin = draw(st.integers(0, len(text) - 1))
        piece = text[begin : begin + draw(st.integers(1, 5))]
        stops = st.one_of(st.sampled_from([piece, piece + "a", "z" + piece]), stops)
    return Case(
        style,
        runs_of(draw, ids),
        draw(st.lists(stops, max_size=3)),
        draw(st.booleans()),
        draw(st.integers(0, 4)),
        draw(st.booleans()),
    )


def expected(case: Case) -> tuple[int | None, str | None, str]:
    """Kept ids, stop string and text by the definition: after every token, look at all text."""
    shared = tokenizer(case.style)
    floor = 0
    for count in range(1, len(case.ids) + 1):
        detokenizer = IncrementalDetokenizer(shared, case.skip)
        text = detokenizer.push(case.ids[:count])
        text += detokenizer.held_text
        if count <= case.min_tokens:
            floor = len(text)
            continue
        found = [
            (start, order, string)
            for order, string in enumerate(case.stop)
            if (start := text.find(string, floor)) >= 0
        ]
        if found:
            start, _, string = min(found)
            return count, string, text[: start + len(string) * case.include]
    return None, None, shared.decode(case.ids, case.skip)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_cut_and_text_are_the_same_for_every_split(case: Case) -> None:
    text = case.sequence_text()
    kept, streamed, seen = 0, "", ""
    for run in case.runs:
        cut = text.feed(run)
        kept += len(run) if cut is None else cut
        streamed += text.next_delta()
        assert text.stable_text == streamed
        assert text.text.startswith(streamed)
        assert text.stable_text.startswith(seen)
        seen = text.stable_text
        if cut is not None:
            break
    text.finish()
    streamed += text.next_delta()
    count, reason, final = expected(case)
    assert (kept, text.stop_reason) == (len(case.ids) if count is None else count, reason)
    assert text.text == streamed == text.stable_text == final
    assert text.finished


def test_a_stop_string_across_tokens_and_runs() -> None:
    shared = tokenizer("byte-level")
    letters = [token_id for char in "one END two" for token_id in shared.encode(char)]
    text = SequenceText(shared, stop=["END"])
    assert text.feed(letters[:5]) is None
    assert text.stable_text == "one "  # the E may begin END
    assert text.text == "one E"
    assert text.next_delta() == "one "
    assert text.feed(letters[5:]) == 2  # N and D stay, the rest of the run does not
    assert text.stop_reason == "END"
    assert text.text == "one "
    assert text.next_delta() == ""
    assert text.feed(letters) == 0


def test_a_false_start_is_released() -> None:
    shared = tokenizer("byte-level")
    text = SequenceText(shared, stop=["END"])
    deltas = []
    for char in "EEN E":
        text.feed(shared.encode(char))
        deltas.append(text.next_delta())
    assert deltas == ["", "E", "", "EN ", ""]
    text.finish()
    assert text.next_delta() == "E"
    assert text.text == "EEN E"
    assert text.stop_reason is None


def test_the_stop_string_is_kept_on_request() -> None:
    shared = tokenizer("byte-level")
    ids = shared.encode("one END two")
    text = SequenceText(shared, stop=["END"], include_stop_str_in_output=True)
    for token_id in ids:
        if text.feed([token_id]) is not None:
            break
    assert text.text == "one END"
    assert text.stable_text == "one END"
    # As its beginning is shown in any case, nothing is held back.
    text = SequenceText(shared, stop=["END"], include_stop_str_in_output=True)
    assert text.feed(shared.encode("one E")) is None
    assert text.next_delta() == "one E"


def test_text_after_the_stop_string_in_its_last_token_is_dropped() -> None:
    shared = tokenizer("byte-level")
    token_id = shared.token_id("<tool call>")
    assert token_id is not None
    text = SequenceText(shared, stop=["tool"])
    assert text.feed([token_id, token_id]) == 1
    assert text.text == "<"
    text = SequenceText(shared, stop=["tool"], include_stop_str_in_output=True)
    assert text.feed([token_id, token_id]) == 1
    assert text.text == "<tool"


def test_the_earliest_match_wins_and_ties_go_to_the_first_in_the_list() -> None:
    shared = tokenizer("byte-level")
    token_id = shared.token_id("<tool call>")
    assert token_id is not None
    for stop, reason in [
        (["call", "tool"], "tool"),
        (["tool call", "tool"], "tool call"),
        (["tool", "tool call"], "tool"),
        (["ool", "tool call>"], "tool call>"),
    ]:
        text = SequenceText(shared, stop=stop)
        assert text.feed([token_id]) == 1
        assert text.stop_reason == reason
    # Completed by an earlier token beats beginning earlier.
    text = SequenceText(shared, stop=["abcd", "bc"])
    letters = [token_id for char in "abcd" for token_id in shared.encode(char)]
    assert text.feed(letters) == 3
    assert text.stop_reason == "bc"
    assert text.text == "a"


def test_text_of_the_first_min_tokens_is_not_searched() -> None:
    shared = tokenizer("byte-level")
    letters = [token_id for char in "xx-x-" for token_id in shared.encode(char)]
    for size in (1, 2, 5):
        text = SequenceText(shared, stop=["x", "-"], min_tokens=3)
        cuts = [text.feed(letters[i : i + size]) for i in range(0, 5, size)]
        assert text.text == "xx-"
        assert text.stop_reason == "x"
        assert next(cut for cut in cuts if cut is not None) == (4 - 1) % size + 1
    # A string that begins in them does not count either.
    text = SequenceText(shared, stop=["x-"], min_tokens=2)
    assert text.feed(letters) == 5


@pytest.mark.parametrize("style", ["sentencepiece", "metaspace"])
def test_a_newline_written_as_a_byte_stops_at_once(style: str) -> None:
    shared = tokenizer(style)
    hello, newline = shared.token_id("▁Hello"), shared.token_id("<0x0A>")
    assert hello is not None
    assert newline is not None
    text = SequenceText(shared, stop=["\n"], prompt_token_ids=[1, hello])
    assert text.feed([hello, newline, hello]) == 2
    assert text.text == " Hello"
    # In the first min_tokens tokens it is out of reach, although its byte is still held back.
    text = SequenceText(shared, stop=["\n"], min_tokens=2)
    assert text.feed([hello, newline]) is None
    assert text.feed([hello]) is None
    assert text.feed([newline]) == 1
    assert text.text == "Hello\n Hello"


def test_without_stop_strings_everything_is_kept() -> None:
    shared = tokenizer("byte-level")
    ids = shared.encode("Hello 🙂")
    text = SequenceText.for_request(shared, SamplingParams(min_tokens=3), [])
    assert text.feed(ids[:-1]) is None
    assert text.stable_text == "Hello "
    text.finish()
    assert text.text == "Hello \ufffd"
    text.finish()
    assert text.next_delta() == "Hello \ufffd"
    assert text.next_delta() == ""


def test_parameters_come_from_the_request() -> None:
    shared = tokenizer("byte-level")
    ids = shared.encode("<|im_start|>abc")
    sampling = SamplingParams(stop="b", include_stop_str_in_output=True, skip_special_tokens=False)
    text = SequenceText.for_request(shared, sampling, [])
    assert text.feed(ids) is not None
    assert text.text == "<|im_start|>ab"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_unfinished_is_the_longest_end_that_may_become_a_stop(text: str, stop: list[str]) -> None:
    strings = StopStrings(stop)
    expected = max(
        (n for n in range(1, len(text) + 1) for s in stop if len(s) > n and s[:n] == text[-n:]),
        default=0,
    )
    assert strings.unfinished(text) == expected
