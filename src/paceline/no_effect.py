"""vLLM's names that change nothing here, and what is said of names that nobody knows.

The tables themselves are where the names are read: engine arguments, sampling parameters, calls of
``LLM``, bodies of the server. Standard library only; must not know what any name means.

    refusal("best_of", 2, NoEffect((None, 1), "every output is returned", "use `n` and choose"))
"""

from __future__ import annotations

import difflib
import functools
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from paceline.errors import RequestError

# Below it names look alike without meaning the same.
_ALIKE = 0.75
_SHORTEST_BEGINNING = 3
_LONGEST_SHOWN = 80
_OFF = ("disable", "no", "skip")

ClassT = TypeVar("ClassT")


class NoEffect(NamedTuple):
    """Values under which a name changes nothing (None: all), what holds otherwise, the way out.

    hint: empty for "leave it out".
    """

    accepted: tuple[object, ...] | None
    why: str
    hint: str = ""

    def takes(self, value: object) -> bool:
        """Whether this value changes nothing."""
        return self.accepted is None or any(_same(value, one) for one in self.accepted)


def _same(value: object, one: object) -> bool:
    """Equality of values of a kind: True is no 1, and an array is compared with nothing."""
    if isinstance(value, bool) != isinstance(one, bool):
        return False
    numeric = isinstance(value, numbers.Real) and isinstance(one, numbers.Real)
    return (numeric or type(value) is type(one)) and bool(value == one)


def refusal(name: str, value: object, entry: NoEffect) -> str | None:
    """The message for a value that would change something, None for one that would not."""
    if entry.takes(value):
        return None
    hint = entry.hint or _way_out(entry)
    return f"`{name}={_shown(value)}` is not supported: {entry.why}. hint: {hint}"


def _shown(value: object) -> str:
    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return "..."
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else "..."


def _way_out(entry: NoEffect) -> str:
    # None, False, {} and the like say "leave it out" once more.
    values = [
        repr(one)
        for one in entry.accepted or ()
        if not isinstance(one, bool) and (one or isinstance(one, numbers.Real))
    ]
    return f"leave it out or set it to {' or '.join(values)}" if values else "leave it out"


def unknown(what: str, name: str, known: Collection[str], also: Iterable[str] = ()) -> str:
    """The message for a name that is neither in ``known`` nor in ``also`` (not worth listing)."""
    close = closest(name, [*known, *also])
    hint = f"did you mean `{close}`?" if close else f"known are: {', '.join(known)}"
    return f"unknown {what} `{name}`. hint: {hint}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one that begins so, or looks alike.

    Words may be joined by ``_`` or ``-``. A name that says the opposite is never meant.
    """
    candidates = [one for one in known if not _opposite(name, one)]
    if len(name.lstrip("-")) >= _SHORTEST_BEGINNING:
        longer = [one for one in candidates if one.startswith(name)]
        if len(longer) == 1:
            return longer[0]
    alike = difflib.get_close_matches(name, candidates, n=1, cutoff=_ALIKE)
    return alike[0] if alike else None


def _opposite(name: str, other: str) -> bool:
    """Whether one of the two switches something on that the other switches off."""
    return _turns_off(name) != _turns_off(other)


def _turns_off(name: str) -> bool:
    words = name.lstrip("-").replace("-", "_").split("_")
    leading = next((i for i, word in enumerate(words) if word not in _OFF), len(words))
    return leading % 2 == 1  # "no-disable-" is on again


def checked_names(
    what: str, no_effect: Mapping[str, NoEffect]
) -> Callable[[type[ClassT]], type[ClassT]]:
    """Makes a dataclass take names without effect, and refuse unknown ones, as keywords.

    The generated ``__init__`` would answer both with a bare TypeError. The decorated one raises
    RequestError.
    """

    def decorate(cls: type[ClassT]) -> type[ClassT]:
        plain: Callable[..., None] = vars(cls)["__init__"]
        known: tuple[str, ...] = vars(cls)["__match_args__"]

        @functools.wraps(plain)
        def checked(self: ClassT, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **known_keywords(what, kwargs, known, no_effect))

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def known_keywords(
    what: str, given: Mapping[str, Any], known: Collection[str], no_effect: Mapping[str, NoEffect]
) -> dict[str, Any]:
    """The keywords that are known, without those that change nothing.

    Raises:
        RequestError: an unknown name, or a value that would change something.
    """
    for name, value in given.items():
        if name in known:
            continue
        if name not in no_effect:
            raise RequestError(unknown(what, name, known, no_effect))
        message = refusal(name, value, no_effect[name])
        if message is not None:
            raise RequestError(message)
    return {name: value for name, value in given.items() if name in known}
