"""Which GPU is found, and what is said when none can be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.check import gpu
from paceline.check.gpu import Gpu, choose_gpu, software_fault
from paceline.check.plan import resolve_device, resolve_dtype
from paceline.check.report import Fault

FindGpu = Callable[[], Gpu | None]
MIB = 1024**2
TABLE = """\
0, GPU-aaaa-1, NVIDIA H200, 143771, 142000, 9.0
1, GPU-bbbb-2, NVIDIA A100-SXM4-80GB, 81920, 80000, 8.0
"""
H200 = Gpu("NVIDIA H200", 143771 * MIB, 142000 * MIB, (9, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", 81920 * MIB, 80000 * MIB, (8, 0))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, H200),
        ("0", H200),
        ("1", A100),
        ("1,0", A100),
        ("GPU-bbbb", A100),
        ("", None),
        ("-1", None),
        ("7", None),
    ],
)
def test_visible_devices_choose(visible: str | None, expected: Gpu | None) -> None:
    assert choose_gpu(TABLE, visible) == expected


@pytest.mark.parametrize("table", ["", "No devices were found\n", "0, GPU-1, X, [N/A], 5, 9.0\n"])
def test_tables_without_a_usable_gpu(table: str) -> None:
    assert choose_gpu(table, None) is None


def fake_tool(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "expected"),
    [(f"printf '%s' '{TABLE}'", H200), ("echo no driver; exit 9", None), ("sleep 5", None)],
)
def test_the_tool_is_asked(
    find_gpu: FindGpu,
    script: str,
    expected: Gpu | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_tool(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu, "_SECONDS", 0.5)
    assert find_gpu() == expected


def test_no_tool_no_gpu(find_gpu: FindGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpu() is None


OLD = Gpu("Tesla V100", 10**10, 10**10, (7, 0))
NO_CUDA = ("the installed torch is built without CUDA", "install a CUDA build of torch")


@pytest.mark.parametrize(
    ("setting", "card", "software", "chosen", "says", "num_faults"),
    [
        ("cpu", H200, None, None, "", 0),
        ("auto", H200, None, H200, "NVIDIA H200", 0),
        ("auto", None, None, None, "no NVIDIA GPU", 0),
        ("auto", OLD, None, None, "compute capability 7.0, 8.0 is needed", 0),
        ("auto", H200, NO_CUDA, None, "built without CUDA", 0),
        ("cuda", H200, None, H200, "NVIDIA H200", 0),
        ("cuda", None, None, None, "no NVIDIA GPU", 1),
        ("cuda", OLD, None, None, "7.0", 1),
        ("cuda", H200, NO_CUDA, None, "without CUDA", 1),
    ],
)
def test_where_the_model_runs(
    setting: str,
    card: Gpu | None,
    software: tuple[str, str] | None,
    chosen: Gpu | None,
    says: str,
    num_faults: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "find_gpu", lambda: card)
    monkeypatch.setattr(gpu, "software_fault", lambda: software)
    faults: list[Fault] = []
    assert (found := resolve_device(setting, faults))[0] == chosen
    assert says in found[1]
    assert len(faults) == num_faults
    for fault in faults:
        assert says in fault.cause
        assert fault.hint


def test_a_gpu_computes_in_bfloat16() -> None:
    assert resolve_dtype("auto", H200)[0] == "bfloat16"
    assert resolve_dtype("float16", H200)[0] == "float16"


@pytest.mark.parametrize(
    ("version", "triton", "says"),
    [
        ("cuda: Optional[str] = '13.0'\n", True, None),
        ("cuda = '12.8'\n", True, None),
        ("cuda: Optional[str] = '13.0'\n", False, "triton"),
        ("cuda: Optional[str] = None\n", True, "without CUDA"),
    ],
)
def test_software_a_gpu_needs(
    version: str,
    triton: bool,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ["torch", "triton"] if triton else ["torch"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(version)

    def find(name: str) -> object:
        class Spec:
            origin = str(tmp_path / name / "__init__.py")

        return Spec if (tmp_path / name).exists() else None

    monkeypatch.setattr("importlib.util.find_spec", find)
    software_fault.cache_clear()
    try:
        found = software_fault()
    finally:
        software_fault.cache_clear()
    assert (found is None) == (says is None)
    if found is not None and says is not None:
        assert says in found[0]
        assert found[1]
