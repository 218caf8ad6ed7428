from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_forms import cut

from paceline.server.reasoning import ReasoningParser, begins_inside

TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "th", "ink>", " ", "\n" * 20, "a", "é\n"]),
    max_size=12,
).map("".join)


def split(pieces: list[str], inside: bool) -> tuple[str, str]:
    parser = ReasoningParser(inside)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes ", False, "hm", "Yes "),
        ("hm\n</think>\n\nYes", True, "hm", "Yes"),
        ("<think>hm</think>Yes", True, "hm", "Yes"),
        ("<think></think>Yes", False, "", "Yes"),
        ("Yes, <think> is a tag", False, "", "Yes, <think> is a tag"),
        ("a</think>b", False, "", "a</think>b"),
        ("never closed </thin", True, "never closed </thin", ""),
        (" \n plain ", False, "", " \n plain "),
        ("", True, "", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_split(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert split([text], inside) == (reasoning, content)
    assert split(list(text), inside) == (reasoning, content)


@given(pieces=cut(TEXTS), inside=st.booleans())
def test_cuts_change_nothing(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    whole = split([text], inside)
    assert split(pieces, inside) == whole
    if "think>" not in text:
        assert whole == ((text.lstrip() or text, "") if inside else ("", text)) or (
            inside and whole == (text, "")
        )


@given(reasoning=st.text("ab<>/\n ", max_size=40), content=st.text("ab<>/\n ", max_size=40))
def test_nothing_is_lost(reasoning: str, content: str) -> None:
    both = split([f"<think>{reasoning}</think>{content}"], False)
    assert (both[0].strip(), both[1]) == (reasoning.strip(), content.lstrip())


def test_a_stream_does_not_wait_for_the_end() -> None:
    parser = ReasoningParser(False)
    assert parser.push("<think>one two") == ("one two", "")
    assert parser.push("</th") == ("", "")
    assert parser.push("e") == ("</the", "")
    assert parser.push("</think>") == ("", "")
    assert parser.push("\nanswer") == ("", "answer")
    assert parser.push(" <") == ("", " <")


def test_where_the_output_begins() -> None:
    assert begins_inside("qwen3", "<|assistant|><think>\n")
    assert not begins_inside("qwen3", "<|assistant|>")
    assert not begins_inside("qwen3", "<|assistant|><think>\n\n</think>\n\n")
    assert begins_inside("deepseek_r1", "<|assistant|>")
    assert not begins_inside("deepseek_r1", "<|assistant|><think>\n\n</think>\n\n")
    assert begins_inside("deepseek_r1", "...", "<think>so far")
    assert not begins_inside("deepseek_r1", "...", "<think>so far</think>The")
