"""Prompts of ``paceline generate``: from arguments, a file or standard input.

A file has one prompt a line, or is JSON lines: objects with ``prompt`` (a text),
``prompt_token_ids`` or ``messages`` (a chat). Sampling parameters beside it hold for that line;
other keys are ignored, unless they look like a misspelt one.
Must not know the engine.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams

# key of a JSON line -> field of PromptItem, type, the type in words
_KINDS: dict[str, tuple[str, type, str]] = {
    "prompt": ("text", str, "a string"),
    "prompt_token_ids": ("token_ids", list, "a list of ids"),
    "messages": ("messages", list, "a list of messages"),
}
_SAMPLING = frozenset(f.name for f in fields(SamplingParams))


@dataclass(frozen=True)
class PromptItem:
    """One prompt. Exactly one of text, token_ids and messages is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # given beside it

    def as_chat(self) -> PromptItem:
        """A text as one user message; others as they are."""
        if self.text is None:
            return self
        message = {"role": "user", "content": self.text}
        return PromptItem(messages=[message], sampling=self.sampling)


def read_prompts(
    lines: Iterable[str], source: str, *, json_lines: bool | None = None
) -> list[PromptItem]:
    """Prompts of a file; blank lines are skipped.

    json_lines: which of the two forms it has; None: the first line tells.

    Raises:
        RequestError: it is not UTF-8, or a JSON line is malformed, with its number.
    """
    try:
        numbered = [(n, line.rstrip("\r\n")) for n, line in enumerate(lines, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} cannot be read as text: {error}") from error
    if json_lines is None:
        json_lines = bool(numbered) and _is_json_lines(numbered[0][1])
    if not json_lines:
        return [PromptItem(text=line) for _, line in numbered]
    return [_parse(line, f"{source}, line {number}") for number, line in numbered]


def read_prompt_file(path: Path) -> list[PromptItem]:
    """``read_prompts`` on a UTF-8 file.

    Raises:
        RequestError: also if it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            named_so = path.suffix.lower() == ".jsonl"
            return read_prompts(file, str(path), json_lines=True if named_so else None)
    except OSError as error:
        cause = error.strerror or error
        raise RequestError(f"the prompt file `{path}` cannot be read: {cause}") from error


def _is_json_lines(line: str) -> bool:
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and any(kind in value for kind in _KINDS)


def _parse(line: str, where: str) -> PromptItem:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from error
    kinds = [kind for kind in _KINDS if isinstance(value, dict) and kind in value]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else "none"
        raise RequestError(f"{where} must have one of {', '.join(_KINDS)}, found {found}")
    kind = kinds[0]
    field_name, due, name_of_due = _KINDS[kind]
    if not isinstance(value[kind], due):
        raise RequestError(f"{where}: `{kind}` must be {name_of_due}, got {value[kind]!r}")
    for name in value:
        if name != kind and name not in _SAMPLING:
            close = difflib.get_close_matches(name, _SAMPLING, n=1, cutoff=0.75)
            if close:
                raise RequestError(
                    f"{where}: `{name}` is no sampling parameter. hint: did you mean `{close[0]}`?"
                )
    sampling = {name: value[name] for name in value if name in _SAMPLING}
    return PromptItem(**{field_name: value[kind]}, sampling=sampling)
