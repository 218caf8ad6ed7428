"""Command lines as vLLM's users write them, in the form that the parsers read.

``--max_num_seqs`` is ``--max-num-seqs``, and ``--speculative-config.method ngram`` gives one key of
the JSON object that ``--speculative-config`` takes. Strings in, strings out; must not know which
flags there are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

# A flag up to its first key or its value; what has a space in it is a text.
_FLAG = re.compile(r"^--[A-Za-z][\w-]*(?=[.=]|$)")
_KEYED = re.compile(r"(?P<flag>--[A-Za-z][\w-]*)\.(?P<keys>[^=\s]+)(=(?P<value>.*))?", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None}


def with_dashes(argv: Iterable[str]) -> list[str]:
    """The same with ``-`` for ``_`` in the names of flags; nothing behind a lone ``--`` is one."""
    arguments = list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    changed = [_FLAG.sub(_dashed, one) for one in arguments[:end]]
    return changed + arguments[end:]


def _dashed(flag: re.Match[str]) -> str:
    return flag[0].replace("_", "-")


def with_joined_keys(
    argv: Sequence[str], takes_json: Collection[str]
) -> tuple[list[str], list[str]]:
    """The same with ``--flag.key value`` put together as ``--flag={"key": value}``, and problems.

    takes_json: flags that take an object. Keys of others stay, for the parser to refuse.
    """
    joined: list[str] = []
    problems: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    rest = iter(enumerate(argv))
    for place, argument in rest:
        keyed = None if "--" in argv[:place] else _KEYED.fullmatch(argument)
        if keyed is None or keyed["flag"] not in takes_json:
            joined.append(argument)
            continue
        flag, value = keyed["flag"], keyed["value"]
        if flag not in places:
            places[flag] = len(joined)
            joined.append(flag)
        if value is None:
            if place + 1 == len(argv) or argv[place + 1].startswith("--"):
                problems.append(f"`{argument}` needs a value")
                continue
            value = next(rest)[1]
        if not _put(objects.setdefault(flag, {}), keyed["keys"].split("."), _value(value)):
            problems.append(f"`{argument}` contradicts another key of `{flag}`")
    left_out = set()
    for flag, place in places.items():
        if any(one.partition("=")[0] == flag for i, one in enumerate(joined) if i != place):
            problems.append(f"`{flag}` is given as a whole and by its keys. hint: choose one form")
            left_out.add(place)
        joined[place] = f"{flag}={json.dumps(objects.get(flag, {}))}"
    return [one for place, one in enumerate(joined) if place not in left_out], problems


def _put(target: dict[str, Any], keys: Sequence[str], value: Any) -> bool:
    """Set the value below nested keys; False if another key stands in the way."""
    names = [key.replace("-", "_") for key in keys]
    for name in names[:-1]:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            return False
    if isinstance(target.get(names[-1]), dict):
        return False
    target[names[-1]] = value
    return True


def _value(text: str) -> Any:
    """JSON where it is JSON, Python's words, else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
