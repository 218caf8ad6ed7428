"""The package as its users meet it: public names, light imports, dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline
from paceline import vllm_names

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
PUBLIC = {
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineConfig",
    "EngineError",
    "Logprob",
    "PacelineError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
}
PURE = (
    "paceline",
    "paceline.arrays",
    "paceline.check",
    "paceline.cli.check",
    "paceline.cli.main",
    "paceline.config",
    "paceline.core",
    "paceline.engine.core",
    "paceline.engine_args",
    "paceline.errors",
    "paceline.hub",
    "paceline.models.hf_config",
    "paceline.models.registry",
    "paceline.models.weights",
    "paceline.outputs",
    "paceline.request",
    "paceline.sampling_params",
    "paceline.spec",
)
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2"}


def modules_of(package: str) -> list[str]:
    """The module, and every module below it if it is a package."""
    folder = SOURCE.joinpath(*package.split(".")[1:])
    if package == "paceline" or not folder.is_dir():
        return [package]
    names = (path.stem for path in sorted(folder.glob("*.py")) if path.stem != "__init__")
    return [package, *(f"{package}.{name}" for name in names)]


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_public_names_are_exactly_these() -> None:
    assert set(paceline.__all__) == PUBLIC
    assert len(paceline.__all__) == len(PUBLIC)
    assert set(dir(paceline)) == PUBLIC
    for name in PUBLIC:
        assert getattr(paceline, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLm'"):
        _ = paceline.LLm  # type: ignore[attr-defined]


def test_vllms_classes_are_answered_by_name() -> None:
    with pytest.raises(ImportError, match=r"`AsyncLLMEngine` is not here. hint: use `LLM`"):
        exec("from paceline import AsyncLLMEngine")


def test_vllms_methods_are_answered_by_name() -> None:
    llm = object.__new__(paceline.LLM)
    with pytest.raises(AttributeError, match=r"`LLM.get_metrics` is not here. hint: use `llm.engi"):
        llm.get_metrics()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'genrate'"):
        llm.genrate()  # type: ignore[attr-defined]
    assert not hasattr(llm, "sleep")


def test_names_said_to_be_absent_are_absent() -> None:
    assert not set(vllm_names.CLASSES) & PUBLIC
    assert not [name for name in vllm_names.METHODS if name in vars(paceline.LLM)]


def test_the_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert paceline.__version__ == project["version"]


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_pure_modules_import_nothing_heavy() -> None:
    names = [name for package in PURE for name in modules_of(package)]
    assert "paceline.core.scheduler" in names
    assert "paceline.spec.policy" in names
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    print(name, *({HEAVY!r} & sys.modules.keys()))
"""
    loaded = run_python(code)
    assert loaded.splitlines() == names


def test_importing_the_package_is_light() -> None:
    loaded = run_python("import sys, paceline; print(*sys.modules)").split()
    assert "numpy" not in loaded
    assert [name for name in loaded if name.startswith("paceline")] == ["paceline"]


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[\[<>=~! ]", entry)[0] for group in groups for entry in group}
    justified = re.findall(
        r"^\| `([\w-]+)` \|", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE
    )
    assert set(justified) == names - {"paceline"}
    assert len(justified) == len(set(justified))
