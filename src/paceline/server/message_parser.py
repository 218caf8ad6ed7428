"""From an output's text to the parts of a chat message: reasoning, content and tool calls.

Puts ``reasoning`` and ``tool_parsers`` behind each other. Knows no JSON bodies, tokens or HTTP.

    parser = MessageParser(MessageForm(reasoning=False, tool_parser="hermes"))
    parser.push("<think>hm</think>Hello")  # MessageDelta("hm", "Hello", [])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.server.reasoning import ReasoningParser
from paceline.server.tool_parsers import (
    TOOL_PARSERS,
    NamedToolParser,
    Piece,
    ToolDelta,
    ToolParser,
    required_calls_parser,
)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What an output's text may hold beside content.

    reasoning: None when it is not looked for, else whether the text begins as reasoning.
    tool_parser: one of ``TOOL_PARSERS``, when the model may call tools by itself.
    calls_required: the text is a list of calls. called_function: the text is the arguments of a
    call of this function. one_call: calls after the first are left out.
    """

    reasoning: bool | None = None
    tool_parser: str | None = None
    calls_required: bool = False
    called_function: str | None = None
    one_call: bool = False

    @property
    def is_content(self) -> bool:
        """Whether all of the text is content, so that there is nothing to parse."""
        return self.reasoning is None and self.make_tool_parser() is None

    def make_tool_parser(self) -> ToolParser | None:
        """A parser for one output; None when it calls no tools."""
        if self.called_function is not None:
            return NamedToolParser(self.called_function)
        if self.calls_required:
            return required_calls_parser()
        return None if self.tool_parser is None else TOOL_PARSERS[self.tool_parser]()


class MessageDelta(NamedTuple):
    """What a piece of text added to a message."""

    reasoning: str
    content: str
    calls: list[ToolDelta]  # at most one entry a call

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class MessageParser:
    """Takes one output's text as it comes."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._reasoning = None if form.reasoning is None else ReasoningParser(form.reasoning)
        self._tools = form.make_tool_parser()
        self._has_calls = False

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls, and all of them are whole."""
        cut = None if self._tools is None else self._tools.open_call
        return self._has_calls and (cut is None or (self._form.one_call and cut > 0))

    def push(self, text: str) -> MessageDelta:
        """Take the next piece; what is now certain."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return self._delta(reasoning, self._pieces(text))

    def finish(self) -> MessageDelta:
        """No more text: what was withheld."""
        reasoning, text = "", ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.finish()
        pieces = self._pieces(text)
        if self._tools is not None:
            pieces += self._tools.finish()
        return self._delta(reasoning, pieces)

    def _pieces(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [text] if self._tools is None else self._tools.push(text)

    def _delta(self, reasoning: str, pieces: list[Piece]) -> MessageDelta:
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls: list[ToolDelta] = []
        for piece in pieces:
            if isinstance(piece, str) or (self._form.one_call and piece.number > 0):
                continue
            if calls and calls[-1].number == piece.number:
                last = calls.pop()
                piece = last._replace(arguments=last.arguments + piece.arguments)
            calls.append(piece)
        self._has_calls |= bool(calls)
        return MessageDelta(reasoning, content, calls)
