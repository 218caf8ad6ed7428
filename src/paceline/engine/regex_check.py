"""Regular expressions that output can be held to: what is refused, and how repetitions are written.

This file must not know grammars, schemas or tokenizers. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.errors import RequestError

LONG_REPEAT = 128  # from here on the compiler treats repetitions in another way
_ESCAPES = frozenset("dDwWsSnrtfv0xuc")  # letters that mean something behind a backslash
_CODE = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}")
_BOUNDS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_ATOM = re.compile(
    r"\\(?:u\{[0-9a-fA-F]+\}|.)"  # an escape
    r"|\[(?:\\.|[^\]\\])*\]"  # a class
    r"|.",
    re.DOTALL,
)
_CLASSES = frozenset({".", "\\d", "\\D", "\\w", "\\W", "\\s", "\\S"})


def check_regex(pattern: str, name: str) -> None:
    """Refuse what would silently mean something else: anchors inside, and unknown escapes.

    Raises:
        RequestError: with the place, counted from 1.
    """
    depth, in_class, last = 0, False, len(pattern) - 1
    place = 0
    while place <= last:
        character = pattern[place]
        if character == "\\":
            place += 1
            escaped = pattern[place : place + 1]
            known = escaped in _ESCAPES and (escaped not in "ux" or _CODE.match(pattern, place))
            if escaped.isalpha() and escaped.isascii() and not known:
                raise RequestError(
                    f"{name} has the escape \\{escaped} at character {place}, which is not "
                    "supported. hint: write the characters themselves"
                )
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += (character == "(") - (character == ")")
            before, after = pattern[:place][-1:], pattern[place + 1 : place + 2]
            begins = place == 0 or (depth == 0 and before == "|")
            ends = place == last or (depth == 0 and after == "|")
            if (character == "^" and not begins) or (character == "$" and not ends):
                raise RequestError(
                    f"{name} has {character} at character {place + 1}, where it cannot match. "
                    "hint: all of the text must match anyway; leave it out"
                )
        place += 1


def has_long_repeat(text: str) -> bool:
    """Whether a bound of some repetition, as in ``{3,400}``, is long."""
    return any(
        number and int(number[-6:]) > LONG_REPEAT
        for bounds in _BOUNDS.finditer(text)
        for number in bounds.groups()
    )


def with_safe_repeats(pattern: str) -> str:
    """The same language, written so that the compiler's masks are right for long repetitions.

    For a class of characters that is repeated often, xgrammar 0.2.9 allows tokens that begin with
    characters of the class and go on with others. Not so for a class that is itself written as a
    repetition, of one.
    """
    if not has_long_repeat(pattern):
        return pattern
    return "".join(_rewritten(pattern))


def _rewritten(pattern: str) -> Iterator[str]:
    for atom in _ATOM.finditer(pattern):
        text, following = atom[0], pattern[atom.end() : atom.end() + 1]
        is_class = text in _CLASSES or (len(text) > 1 and text[0] == "[")
        if not is_class or following in ("*", "+", "?"):
            yield text
        elif following == "{":
            yield f"({text}{{1,1}})"
        else:
            yield f"{text}{{1,1}}"
