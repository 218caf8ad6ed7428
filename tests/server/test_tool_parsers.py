from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_forms import cut

from paceline.server.settings import TOOL_PARSER_NAMES
from paceline.server.tool_parsers import (
    TOOL_PARSERS,
    HermesToolParser,
    NamedToolParser,
    Piece,
    ToolParser,
    detect_tool_parser,
    llama3_parser,
    required_calls_parser,
)

Message = tuple[str, list[tuple[str, str]]]
PARSERS: list[Callable[[], ToolParser]] = [HermesToolParser, llama3_parser, required_calls_parser]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[]<é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"</', max_size=3), inner)
    ),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text("fgé_", min_size=1, max_size=5), st.dictionaries(st.text("ab"), JSON)),
    min_size=1,
    max_size=3,
)
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": "f", "parameters": {"x": "}"}}',
    '{"arguments": {"x": [1]}, "name": "g"}',
    '{"type": "function", "name": "h", "parameters": {}}',
    '{"name": "f", "arguments": ',
    '{"name": "',
    '"<tool_call>"',
    '"\\ud800"',
    *'{}[]";,:<\\',
    "name",
    " ",
    "\n" * 20,
    "a",
]
NEARLY = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def parse(make: Callable[[], ToolParser], pieces: list[str]) -> Message:
    """Content and calls of a text that comes in pieces; checks the order of what comes out."""
    parser = make()
    got: list[Piece] = []
    for piece in pieces:
        got += parser.push(piece)
    got += parser.finish()
    content = ""
    calls: list[tuple[str, str]] = []
    for part in got:
        if isinstance(part, str):
            content += part
        elif part.name is not None:
            assert part.number == len(calls)
            calls.append((part.name, part.arguments))
        else:
            assert part.number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return content, calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
            "Let me see.",
            [("f", '{"x": 1}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"s": "</tool_call>"}}</tool_call>\nDone. ',
            "Done. ",
            [("f", "{}"), ("g", '{"s": "</tool_call>"}')],
        ),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x":1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        # The end is missing: at the length limit, or because the model left it out.
        ('<tool_call>{"name": "f", "arguments": {"x": 1}', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"x": "ab', "", [("f", '{"x": "ab')]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>!', "!", [("f", '{"x": 1')]),
        # No calls.
        ("<tool_call> f(x) </tool_call>", "<tool_call> f(x) </tool_call>", []),
        ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        ('<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"name": 1, "arguments": {}}', []),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        ('<tool_call>{"name": "f", "arguments": [1]}', None, []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
        ("a < b\n <tool", "a < b\n <tool", []),
        ("<tool_call>" * 3, "<tool_call>" * 3, []),
    ],
)
def test_hermes(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    expected = (text if content is None else content, calls)
    assert parse(HermesToolParser, [text]) == expected
    assert parse(HermesToolParser, list(text)) == expected


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\n',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "parameters": {}} then text', "then text", [("f", "{}")]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("Sure: {", "Sure: {", []),
        (" \n", " \n", []),
        ("<|python", "<|python", []),
    ],
)
def test_llama3(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(llama3_parser, [text]) == (content, calls)
    assert parse(llama3_parser, list(text)) == (content, calls)


def test_required_calls() -> None:
    text = '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]'
    expected = ("", [("f", '{"x": 1}'), ("g", "{}")])
    assert parse(required_calls_parser, list(text)) == expected
    assert parse(required_calls_parser, [text[:36]]) == ("", [("f", '{"x": 1')])
    for end in range(28):  # the form is the grammar's, and no content
        assert parse(required_calls_parser, list(text[:end])) == ("", [])


@pytest.mark.parametrize(
    ("make", "text", "number"),
    [
        (HermesToolParser, '<tool_call>{"name": "f", "arguments": {"x": 1', 0),
        (HermesToolParser, '<tool_call>{"name": "f", "arguments": {"x": 1}', None),
        (HermesToolParser, '<tool_call>{"name": "f", "argum', None),
        (llama3_parser, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {', 1),
        (required_calls_parser, '[{"name": "f", "parameters": {}}', None),
    ],
)
def test_the_call_that_is_not_whole(
    make: Callable[[], ToolParser], text: str, number: int | None
) -> None:
    parser = make()
    parser.push(text)
    parser.finish()
    assert parser.open_call == number


def test_named_function() -> None:
    assert parse(lambda: NamedToolParser("f"), ["", '{"x"', ": 1}"]) == ("", [("f", '{"x": 1}')])


@pytest.mark.parametrize("make", PARSERS)
@given(pieces=cut(NEARLY))
def test_cuts_change_nothing(make: Callable[[], ToolParser], pieces: list[str]) -> None:
    whole = parse(make, ["".join(pieces)])
    assert parse(make, pieces) == whole
    assert parse(make, list("".join(pieces))) == whole


@given(pieces=cut(st.text('ab<{"}:>/ \n', max_size=60)))
def test_text_without_calls_is_content(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert parse(HermesToolParser, pieces) == (text, [])
    assert parse(llama3_parser, pieces) == (text, [])


def hermes_text(name: str, arguments: Any, ascii_only: bool) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    return f"<tool_call>\n{call}\n</tool_call>"


@given(data=st.data(), calls=CALLS, ascii_only=st.booleans())
def test_well_formed_calls_are_found(
    data: st.DataObject, calls: list[tuple[str, Any]], ascii_only: bool
) -> None:
    hermes = "Hm.\n" + "\n".join(hermes_text(*call, ascii_only) for call in calls)
    llama = ";".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    required = json.dumps([{"name": n, "parameters": a} for n, a in calls])
    for make, text, content in (
        (HermesToolParser, hermes, "Hm."),
        (llama3_parser, llama, ""),
        (required_calls_parser, required, ""),
    ):
        pieces = data.draw(cut(st.just(text)))
        got = parse(make, pieces)
        assert got[0] == content
        assert [(name, json.loads(arguments)) for name, arguments in got[1]] == calls


def test_a_stream_shows_the_name_first_and_does_not_wait_for_the_end() -> None:
    parser = HermesToolParser()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(' <tool_call>{"name": "f", "argu') == []
    assert parser.push('ments": {"x": ') == [(0, "f", '{"x": ')]
    assert parser.push('"long text') == [(0, None, '"long text')]
    assert parser.push('"}}</tool_call>') == [(0, None, '"}')]
    assert parser.push("after") == ["after"]


def test_deep_nesting_is_no_fault() -> None:
    text = '<tool_call>{"arguments": ' + "[" * 100_000
    assert parse(HermesToolParser, [text]) == (text, [])
    closed = text + "]" * 100_000 + "}</tool_call>"
    assert parse(HermesToolParser, [closed]) == (closed, [])


def test_templates_tell_the_parser() -> None:
    assert detect_tool_parser('... <tool_call>\\n{\\"name\\": <function-name>') == "hermes"
    assert detect_tool_parser("<tool_call>\n<function=name>") is None
    llama = 'Respond in the format {"name": f, "parameters": dict}. {%- if role == "ipython" %}'
    assert detect_tool_parser(llama) == "llama3_json"
    assert detect_tool_parser("{{ messages }}") is None
    assert tuple(TOOL_PARSERS) == TOOL_PARSER_NAMES == ("hermes", "llama3_json")
