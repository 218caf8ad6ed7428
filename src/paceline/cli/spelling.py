"""Hints in the spelling of the command line: ``max_num_seqs=8`` is ``--max-num-seqs 8`` there.

Only engine arguments: sampling parameters are also keys of JSON lines. Must not import torch.
"""

from __future__ import annotations

import re
from dataclasses import fields

from paceline.engine_args import EngineArgs

_SWITCHES = {f.name for f in fields(EngineArgs) if isinstance(f.default, bool)}
_NAMES = [f.name for f in fields(EngineArgs)]
# A name of one word is an argument only where a value or a quote says so.
_LONG = "|".join(name for name in _NAMES if "_" in name)
_WITH_VALUE = re.compile(rf"(?<![\w-])({'|'.join(_NAMES)})=(\"[^\"]*\"|'[^']*'|[\w.-]+)")
# Between double quotes it is a key of JSON.
_ALONE = re.compile(rf"(?<![\w\"-])({_LONG})(?![\w=\"])|`({'|'.join(_NAMES)})`")


def with_flags(hint: str) -> str:
    """The hint with every engine argument written as its flag."""
    if "known are:" in hint:  # a list of names, which are meant as such
        return hint
    hint = _WITH_VALUE.sub(lambda found: _setting(found[1], found[2]), hint)
    return _ALONE.sub(lambda found: f"`{_flag(found[2])}`" if found[2] else _flag(found[1]), hint)


def _setting(name: str, value: str) -> str:
    """A flag with its value; one that takes none says the value itself."""
    if name in _SWITCHES and value in ("True", "False"):
        return _flag(name if value == "True" else f"no_{name}")
    return f"{_flag(name)} {_value(value)}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(text: str) -> str:
    """Without quotes, unless a shell needs them."""
    bare = text.strip("\"'")
    return bare if re.fullmatch(r"[\w./-]+", bare) else f"'{bare}'"
