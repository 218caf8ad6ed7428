"""Finds tool calls in a model's text as it arrives.

A parser turns pieces of text into pieces of content and of tool calls: a call's name as soon as it
is known, then its arguments as the model writes them. However the text is cut, the sums of what
comes out are the same. Text that is no well-formed call is content, nothing raises. Whitespace
beside calls is dropped. This file knows no requests, tokens or HTTP.

    parser = HermesToolParser()
    parser.push('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>') + parser.finish()
    # [ToolDelta(0, "f", '{"x": 1}')]
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from paceline.server.reasoning import held_from, space_before

_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_OTHER_FORMS = ("<function=", "<arg_key>")  # that share the tag: Qwen3-Coder, GLM
_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"')
# From the start of an object to the start of its arguments: enough to know whose they are.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class ToolDelta(NamedTuple):
    """A piece of one tool call."""

    number: int  # which call, from 0
    name: str | None  # with a call's first piece
    arguments: str  # JSON text, to be appended


Piece = str | ToolDelta  # content, or part of a call


class ToolParser(Protocol):
    """One output's parser."""

    @property
    def open_call(self) -> int | None:
        """The call whose arguments have begun and not ended, if there is one."""

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of text; what is now certain."""

    def finish(self) -> list[Piece]:
        """No more text: what was withheld."""


class _CallObject:
    """A JSON object that should be a call, {"name": ..., "arguments": {...}}, as it is written."""

    def __init__(self) -> None:
        self.text = ""
        self.started = False  # the name is known and the arguments have begun
        self.closed = False
        self.broken = False  # a "<" outside strings: a tag, or no JSON
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._ends: list[int] = []  # where members of the object that are containers end
        self.name: str | None = None  # until it has been taken
        self._first = 0  # where the arguments begin
        self._given = 0  # up to where they have been taken

    @property
    def ended(self) -> bool:
        """Whether nothing more belongs to the object, or it cannot be a call."""
        if self.closed or self.broken:
            return True
        rest = self.text[1:32].lstrip()
        return bool(rest) and not any(k.startswith(rest) or rest.startswith(k) for k in _KEYS)

    def push(self, text: str) -> int:
        """Take what belongs to the object; how many characters that was."""
        at = 0
        while at < len(text) and not (self.closed or self.broken):
            at = self._next(text, at)
        self.text += text[:at]
        if not self.started and (head := _HEAD.match(self.text)) is not None:
            name = _decoded(head[1])
            if isinstance(name, str):
                self.started, self.name = True, name
                self._first = self._given = head.end()
        return at

    def _next(self, text: str, at: int) -> int:
        """Account for the next character that matters; where it ends."""
        if self._escaped:
            self._escaped = False
            return at + 1
        match = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
        if match is None:
            return len(text)
        char = match[0]
        if char == '"':
            self._in_string = not self._in_string
        elif char == "\\":
            self._escaped = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.closed = self._depth == 0
            if self._depth == 1:
                self._ends.append(len(self.text) + match.end())
        else:
            self.broken = True
            return match.start()
        return match.end()

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments have begun and not ended."""
        return self.started and self._end_of_arguments is None

    @property
    def _end_of_arguments(self) -> int | None:
        return next((end for end in self._ends if end > self._first), None)

    def take_arguments(self) -> str:
        """What is new of the arguments, once ``started``."""
        end = self._end_of_arguments or len(self.text)
        text = self.text[self._given : end]
        self._given = end
        return text

    def as_call(self) -> tuple[str, str] | None:
        """Name and arguments of the closed object in any order of its keys; None if no call."""
        value = _decoded(self.text)
        if not isinstance(value, dict):
            return None
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or not name:
            return None
        if arguments is None:
            return name, "{}"
        if isinstance(arguments, str):  # some models write the object as a string of JSON
            return name, arguments
        if not isinstance(arguments, dict):
            return None
        return name, msgspec.json.encode(arguments).decode()


def _decoded(text: str) -> Any:
    """A JSON value; None where the text is none, or holds half a surrogate pair."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


class _CallReader:
    """What parsers share: the object at hand, and how many calls there have been."""

    def __init__(self) -> None:
        self._pending = ""  # not yet understood
        self._raw = ""  # what led to the object at hand: content after all if that is no call
        self._call = _CallObject()
        self._num_calls = 0

    @property
    def open_call(self) -> int | None:
        """See ``ToolParser``."""
        return self._num_calls if self._call.in_arguments else None

    def _read_object(self, pieces: list[Piece]) -> bool | None:
        """Read on in the object; True after a call, False if it is none, None when more may come.

        An object that is none lies in ``_pending`` again.
        """
        call = self._call
        self._pending = self._pending[call.push(self._pending) :]
        if call.started:
            self._raw = ""
            name, call.name = call.name, None
            arguments = call.take_arguments()
            if name is not None or arguments:
                pieces.append(ToolDelta(self._num_calls, name, arguments))
        if not call.ended:
            return None
        whole = call.as_call() if call.closed and not call.started else None
        if whole is not None:
            pieces.append(ToolDelta(self._num_calls, *whole))
        self._call = _CallObject()
        if whole is None and not call.started:
            self._pending = call.text + self._pending
            return False
        self._raw = ""
        self._num_calls += 1
        return True

    def _unread(self) -> str:
        """The object at hand as text, unless parts of it have been given as a call."""
        return "" if self._call.started else self._call.text


class HermesToolParser(_CallReader):
    """Calls between tags in a text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    The form of Qwen2.5 and Qwen3. A last call without its closing tag counts.
    """

    _OPEN = "<tool_call>"
    _CLOSE = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._state: Callable[[list[Piece]], bool] = self._text
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        pieces: list[Piece] = []
        self._pending += text
        while self._state(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See ``ToolParser``."""
        closing = self._state == self._closing
        rest = "" if closing else self._raw + self._unread() + self._pending
        self._raw = self._pending = ""
        return [rest] if rest else []

    # Each state takes what it understands of ``_pending``; False when it needs more text.

    def _text(self, pieces: list[Piece]) -> bool:
        if self._after_call:
            self._pending = self._pending.lstrip()
            self._after_call = not self._pending
        at = self._pending.find(self._OPEN)
        end = held_from(self._pending, self._OPEN) if at < 0 else space_before(self._pending, at)
        if end:
            pieces.append(self._pending[:end])
        if at < 0:
            self._pending = self._pending[end:]
            return False
        at += len(self._OPEN)
        self._raw, self._pending = self._pending[end:at], self._pending[at:]
        self._state = self._before_object
        return True

    def _before_object(self, pieces: list[Piece]) -> bool:
        rest = self._pending.lstrip()
        self._raw += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if not rest:
            return False
        if rest[0] == "{":
            self._state = self._object
        else:
            self._give_up(pieces)
        return True

    def _object(self, pieces: list[Piece]) -> bool:
        is_call = self._read_object(pieces)
        if is_call is None:
            return False
        if is_call:
            self._state = self._closing
        else:
            self._give_up(pieces)
        return True

    def _closing(self, pieces: list[Piece]) -> bool:
        rest = self._pending.lstrip()
        closed = rest.startswith(self._CLOSE)
        if not closed and self._CLOSE.startswith(rest):
            return False
        self._pending = rest[len(self._CLOSE) :] if closed else rest
        self._state, self._after_call = self._text, True
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        """No call: the tag is content, and so is what follows, up to another tag."""
        pieces.append(self._raw)
        self._raw = ""
        self._state = self._text


class JsonToolParser(_CallReader):
    """Calls that are the whole text: JSON objects, one after the other.

    before: marks that may stand before the first object; separator: between two; after: a mark
    that may stand behind the last. From where the text takes another form, it is content.
    only_calls: a grammar sees to the form, so an end without a call is one that was cut, and no
    content.
    """

    def __init__(
        self, before: tuple[str, ...], separator: str, after: str = "", only_calls: bool = False
    ) -> None:
        super().__init__()
        self._only_calls = only_calls
        self._marks = before  # that may come next, before an object
        self._separator = separator
        self._after = after
        self._in_object = False
        self._plain = False

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        if self._plain:
            return [text] if text else []
        pieces: list[Piece] = []
        self._pending += text
        while not self._plain:
            if not self._in_object:
                if not self._between(pieces):
                    break
            else:
                is_call = self._read_object(pieces)
                if is_call is None:
                    break
                self._in_object = False
                self._marks = (self._separator, self._after) if self._after else (self._separator,)
                if not is_call:
                    self._give_up(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """See ``ToolParser``."""
        rest = self._raw + self._unread() + self._pending
        self._raw = self._pending = ""
        beside = " \n\r\t" + self._separator + self._after
        if self._only_calls or (self._num_calls and not rest.strip(beside)):
            return []
        return [rest] if rest else []

    def _between(self, pieces: list[Piece]) -> bool:
        """Before an object: take marks and whitespace; False when more text must come first."""
        rest = self._pending.lstrip()
        self._raw += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if not rest:
            return False
        needs_mark = self._num_calls > 0 and self._separator in self._marks
        if rest[0] == "{" and not needs_mark:
            self._in_object = True
            return True
        for mark in self._marks:
            if rest.startswith(mark):
                self._raw += mark
                self._pending = rest[len(mark) :]
                self._marks = ()
                return True
            if mark.startswith(rest):
                return False
        self._give_up(pieces)
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        text = self._raw + self._pending
        if self._num_calls:
            text = text.lstrip()
        if text:
            pieces.append(text)
        self._raw = self._pending = ""
        self._plain = True


class NamedToolParser:
    """The whole text is the arguments of one call, because a grammar made it so."""

    open_call = None  # a client that names the function gets "stop" or "length" in any case

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        """See ``ToolParser``."""
        if not text:
            return []
        name, self._name = self._name, None
        return [ToolDelta(0, name, text)]

    def finish(self) -> list[Piece]:
        """See ``ToolParser``."""
        return []


def llama3_parser() -> ToolParser:
    """Llama 3.1 and 3.2: ``{"name": ..., "parameters": {...}}``, several joined by ``;``."""
    return JsonToolParser(("<|python_tag|>",), ";")


def required_calls_parser() -> ToolParser:
    """A JSON list of calls, as the grammar of ``tool_choice="required"`` makes it."""
    return JsonToolParser(("[",), ",", "]", only_calls=True)


TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": llama3_parser,
}


def detect_tool_parser(template: str) -> str | None:
    """Name of the parser whose form a chat template asks the model for; None if it is no known one.

    template: source of the template in use.
    """
    if "<tool_call>" in template and not any(form in template for form in _OTHER_FORMS):
        return "hermes"
    if '"parameters"' in template and "ipython" in template:
        return "llama3_json"
    return None
