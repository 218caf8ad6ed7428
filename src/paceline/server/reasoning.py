"""Splits what a model thinks from what it answers, as the text arrives.

Text in, two texts out; knows no requests, tokens or tools. However the text is cut into pieces, the
sums of what comes out are the same, and nothing is lost but the tags and the whitespace beside
them.

    parser = ReasoningParser(inside=False)
    parser.push("<think>hm</think>\\n\\nYes")  # ("hm", "Yes")
"""

from __future__ import annotations

from collections.abc import Callable

_OPEN = "<think>"
_CLOSE = "</think>"
# How much whitespace before a tag belongs to it. What may turn out to do so is withheld, so this
# also bounds how far a stream can lag behind.
_MAX_SPACE = 16


def held_from(text: str, tag: str) -> int:
    """Where the end of ``text`` starts that may begin ``tag``, with the whitespace before it.

    Only for texts in which the whole tag does not occur.
    """
    end = len(text)
    last = tag[0]
    at = text.rfind(last, max(0, end - len(tag) + 1))
    while at >= 0:
        if tag.startswith(text[at:]):
            end = at
        at = text.rfind(last, max(0, len(text) - len(tag) + 1), at)
    return space_before(text, end)


def space_before(text: str, end: int) -> int:
    """Where the whitespace that ends at ``end`` starts; at most ``_MAX_SPACE`` of it."""
    floor = max(0, end - _MAX_SPACE)
    return floor + len(text[floor:end].rstrip())


class ReasoningParser:
    """One output's reasoning and content.

    inside: whether a text without an opening tag begins as reasoning, because the prompt ends with
    the tag. An opening tag counts at the very beginning only.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._held = ""
        self._part: Callable[[], tuple[str, str]] | None = self._start

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; what is now certain of reasoning and of content."""
        if self._part is None:
            return "", text
        self._held += text
        return self._part()

    def finish(self) -> tuple[str, str]:
        """No more text: what was withheld."""
        held, self._held = self._held, ""
        part, self._part = self._part, None
        in_reasoning = part == self._reasoning or (part == self._start and self._inside)
        return (held, "") if in_reasoning else ("", "" if part == self._gap else held)

    def _start(self) -> tuple[str, str]:
        text = self._held.lstrip()
        if text.startswith(_OPEN):
            self._held = text[len(_OPEN) :]
        elif _OPEN.startswith(text):
            return "", ""
        elif not self._inside:
            text, self._held, self._part = self._held, "", None
            return "", text
        self._part = self._lead
        return self._lead()

    def _lead(self) -> tuple[str, str]:
        """Whitespace at the start of the reasoning."""
        self._held = self._held.lstrip()
        if not self._held:
            return "", ""
        self._part = self._reasoning
        return self._reasoning()

    def _reasoning(self) -> tuple[str, str]:
        end = self._held.find(_CLOSE)
        if end < 0:
            end = held_from(self._held, _CLOSE)
            text, self._held = self._held[:end], self._held[end:]
            return text, ""
        text = self._held[: space_before(self._held, end)]
        self._held = self._held[end + len(_CLOSE) :]
        self._part = self._gap
        return text, self._gap()[1]

    def _gap(self) -> tuple[str, str]:
        """Whitespace between the reasoning and the content."""
        text, self._held = self._held.lstrip(), ""
        if text:
            self._part = None
        return "", text


def begins_inside(parser: str, prompt: str, answer_begun: str | None = None) -> bool:
    """Whether the output of ``prompt`` begins as reasoning.

    parser: one of ``REASONING_PARSERS``. answer_begun: the message that the model continues, if it
    continues one.
    """
    if answer_begun is not None:
        return answer_begun.rfind(_OPEN) > answer_begun.rfind(_CLOSE)
    end = prompt.rstrip()
    if end.endswith(_CLOSE):
        return False
    # R1's first chat templates end before the tag, yet the model thinks.
    return end.endswith(_OPEN) or parser == "deepseek_r1"


REASONING_PARSERS = ("deepseek_r1", "qwen3")
