"""docs/arguments.md is what its script would write."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from paceline.engine_args import NO_EFFECT, EngineArgs
from paceline.sampling_params import NO_EFFECT as SAMPLING_NO_EFFECT
from paceline.sampling_params import SamplingParams
from paceline.server.settings import ServerSettings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "arguments_doc.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("arguments_doc", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_is_current(script: ModuleType) -> None:
    written = script.TARGET.read_text(encoding="utf-8")
    assert written == script.render(), "run `python scripts/arguments_doc.py`"


def test_every_argument_is_in_it(script: ModuleType) -> None:
    text = script.render()
    names = [f.name for f in (*fields(EngineArgs), *fields(SamplingParams))]
    for name in (*names, *NO_EFFECT, *SAMPLING_NO_EFFECT):
        assert f"`{name}`" in text
    assert "`paceline serve`" in text
    for f in fields(ServerSettings):
        assert f"| `--{f.name.replace('_', '-')}` |" in text
    assert set(script.SAMPLING_MEANINGS) == {f.name for f in fields(SamplingParams)}


def test_values_that_are_refused_are_told_apart(script: ModuleType) -> None:
    assert script.choices_of("spec_policy", ("fixed", "auto")) == (
        "; one of `fixed`; not in this version: `auto`"
    )
    assert script.choices_of("device", ()) == ""
