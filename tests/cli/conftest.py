"""Makes ``model_dirs`` importable when only this directory is collected; a server that is not."""

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import serve
from paceline.server.settings import ServerSettings

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], ServerSettings]]:
    """What ``paceline serve`` would have served, instead of serving it."""
    calls: list[tuple[dict[str, Any], ServerSettings]] = []

    class Stub:
        async def run(self) -> int:
            return 0

    def record(engine: dict[str, Any], settings: ServerSettings) -> Any:
        calls.append((engine, settings))
        return Stub()

    monkeypatch.setattr(serve, "_make", record)
    return calls
