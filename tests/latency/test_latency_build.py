"""The kernel's builds: the cache, a missing package, errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from latency.latency_models import SMALL, planned, small_arch
from paceline.config import ModelArch
from paceline.latency import build as module
from paceline.latency.build import LatencyUnavailable, build

OPTIONS: dict[str, int | str] = {"TOKENS": 1}


class FakeNvrtc:
    """Counts compilations; ``log`` makes them fail."""

    def __init__(self, log: str = "") -> None:
        self.log = log.encode()
        self.compiled = 0

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return 0, 13, 0

    def nvrtcCreateProgram(self, source: bytes, *_: Any) -> tuple[int, str]:
        assert b"forward" in source
        return 0, "program"

    def nvrtcCompileProgram(self, program: str, count: int, flags: list[bytes]) -> tuple[int]:
        assert count == len(flags)
        assert b"-arch=sm_90a" in flags
        assert b"-DTOKENS=1" in flags
        self.compiled += 1
        return (6 if self.log else 0,)

    def nvrtcGetCUBINSize(self, program: str) -> tuple[int, int]:
        return 0, 4

    def nvrtcGetCUBIN(self, program: str, cubin: bytes) -> tuple[int]:
        return (0,)

    def nvrtcGetProgramLogSize(self, program: str) -> tuple[int, int]:
        return 0, len(self.log)

    def nvrtcGetProgramLog(self, program: str, log: bytes) -> tuple[int]:
        return (0,)

    def nvrtcDestroyProgram(self, program: str) -> tuple[int]:
        return (0,)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "latency"


def use(monkeypatch: pytest.MonkeyPatch, nvrtc: FakeNvrtc) -> None:
    monkeypatch.setattr(module, "bindings", lambda name: nvrtc)


def test_built_once_and_again_when_damaged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = FakeNvrtc()
    use(monkeypatch, nvrtc)
    first = build(OPTIONS, (9, 0))
    assert build(OPTIONS, (9, 0)) == first
    assert nvrtc.compiled == 1
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert build(OPTIONS, (9, 0)) == first
    assert nvrtc.compiled == 2
    assert [kept.name for kept in cache.iterdir()] == [file.name]
    build(OPTIONS | {"PACE": 0}, (9, 0))
    assert nvrtc.compiled == 3


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    nvrtc = FakeNvrtc()
    use(monkeypatch, nvrtc)
    assert build(OPTIONS, (9, 0)) == build(OPTIONS, (9, 0))
    assert nvrtc.compiled == 2


def test_a_failed_build_in_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeNvrtc("some note\n"))
    monkeypatch.setattr(module, "_first_error", lambda nvrtc, program: "x.cu(3): error: no")
    with pytest.raises(LatencyUnavailable, match=r"NVRTC refused the kernel: x.cu\(3\): error: no"):
        build(OPTIONS, (9, 0))
    assert not cache.exists()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(LatencyUnavailable, match=r"cuda-bindings is missing.*hint: run `pip"):
        build(OPTIONS, (9, 0))


@pytest.mark.parametrize("arch", SMALL.values(), ids=SMALL.keys())
def test_the_source_compiles(arch: ModelArch, cache: Path) -> None:
    """With NVRTC, which needs no card."""
    pytest.importorskip("cuda.bindings.nvrtc")
    for tokens in (1, 8):
        cubin = build(planned(arch).options(tokens), (9, 0))
        assert cubin.startswith(b"\x7fELF")


def test_the_source_refuses_what_does_not_fit(cache: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    options = planned(small_arch()).options(1) | {"SMEM": 1000}
    with pytest.raises(LatencyUnavailable, match="too little shared memory"):
        build(options, (9, 0))
