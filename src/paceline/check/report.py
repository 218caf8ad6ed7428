"""What a check found: faults, warnings, facts and resolved settings, as data, text and JSON.

Standard library only; must not know how anything was found out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.config import EngineConfig
from paceline.engine_args import join_problems
from paceline.errors import CapacityError, ConfigError, PacelineError


@dataclass(frozen=True)
class Fault:
    """Why it cannot work (with the numbers), and the ways out.

    argument: the engine argument to blame, where it is wrong by itself.
    """

    cause: str
    hint: str
    about_memory: bool = False
    argument: str = ""

    @classmethod
    def from_error(cls, error: PacelineError) -> Fault:
        """The same fault as an error."""
        return cls.from_message(str(error), about_memory=isinstance(error, CapacityError))

    @classmethod
    def from_message(cls, message: str, *, about_memory: bool = False, argument: str = "") -> Fault:
        """A message is ``cause. hint: ways out``."""
        cause, _, hint = message.partition("hint:")
        return cls(cause.strip().removesuffix("."), hint.strip(), about_memory, argument)

    def __str__(self) -> str:
        end = "" if self.cause.endswith("?") else "."
        return f"{self.cause}{end} hint: {self.hint}" if self.hint else self.cause


@dataclass(frozen=True)
class Setting:
    """One engine argument, what it resolved to and why."""

    name: str
    value: Any
    note: str = ""


@dataclass(frozen=True)
class Fact:
    """A number or name of the plan: ``key`` and ``value`` for programs, the rest for people.

    Without a label it is for programs only.
    """

    key: str
    value: Any
    label: str = ""
    text: str = ""


@dataclass
class CheckReport:
    """Everything ``run_checks`` found.

    config: the engine configuration, present when there are no faults. Paths of a model that is not
    downloaded yet point to files that are gone once the check has returned.
    """

    model: str
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    config: EngineConfig | None = None

    @property
    def ok(self) -> bool:
        """Whether an engine would start."""
        return not self.faults

    def raise_faults(self) -> None:
        """Raise all faults as one error, if there are any.

        Raises:
            CapacityError: all faults are about memory.
            ConfigError: otherwise.
        """
        if self.faults:
            kind = CapacityError if all(f.about_memory for f in self.faults) else ConfigError
            raise kind(join_problems([str(fault) for fault in self.faults]))

    def to_json(self) -> dict[str, Any]:
        """JSON values: ok, model, faults, warnings, facts (by key) and settings (by name)."""
        return {
            "ok": self.ok,
            "model": self.model,
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
            "warnings": self.warnings,
            "facts": {fact.key: fact.value for fact in self.facts},
            "settings": {setting.name: setting.value for setting in self.settings},
        }

    def to_text(self) -> str:
        """An aligned table for people, the faults first."""
        parts = []
        if self.faults:
            parts.append(self._faults_text())
        if self.facts:
            parts.append(_table([(f.label, f.text) for f in self.facts if f.label]))
        if self.settings:
            parts.append("Settings\n" + self.settings_text())
        if self.warnings:
            parts.append("Warnings\n" + "\n".join(f"  - {warning}" for warning in self.warnings))
        count = len(self.faults)
        problem = "one fault" if count == 1 else f"{count} faults"
        parts.append(f"Not OK: {problem}, see above" if count else "OK: no fault found")
        return "\n\n".join(parts)

    def _faults_text(self) -> str:
        lines = [f"Faults: {len(self.faults)}"]
        for number, fault in enumerate(self.faults, 1):
            lines.append(f"  {number}. {fault.cause}")
            if fault.hint:
                lines.append(f"     hint: {fault.hint}")
        return "\n".join(lines)

    def settings_line(self) -> str:
        """The resolved settings that have a value, in one line for a log."""
        values = [(s.name, s.value) for s in self.settings if s.value not in (None, False)]
        return ", ".join(name if value is True else f"{name}={value}" for name, value in values)

    def settings_text(self) -> str:
        """The resolved settings, one a line: name, value, why."""
        rows = [(s.name, str(s.value), s.note) for s in self.settings]
        return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    columns = max(len(row) for row in rows)
    # A long path in one row should not push the notes of all others off the screen.
    widths = [min(36, max(len(row[i]) for row in rows)) for i in range(columns - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(("  " + "  ".join([*cells, row[-1]])).rstrip())
    return "\n".join(lines)


def format_bytes(number: int) -> str:
    """1536 -> '1.50 KiB'."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} B"


def format_count(number: int) -> str:
    """494032768 -> '494.0 M'."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return str(number)
