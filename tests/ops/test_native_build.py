"""Compiling the kernels: the cache, several processes at once, and everything that can fail."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from native_kernels import kernels
from paceline.ops.native import build, library

LOAD = "from paceline.ops.native import load; assert load() is not None"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory; what a test loads is forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_NATIVE", raising=False)
    library._load.cache_clear()
    yield tmp_path / "cache" / "paceline" / "native"
    library._load.cache_clear()


@pytest.fixture(scope="module")  # before a test changes its environment
def compiler() -> str:
    """A compiler that works."""
    kernels()
    return build.find_compiler()[0]


def script(path: Path, text: str) -> str:
    """An executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_built_once(cache: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load() is not None
    assert sorted(file.suffix for file in cache.iterdir()) == [".sha256", ".so"]
    library._load.cache_clear()
    monkeypatch.setattr(library, "_check", lambda path: pytest.fail("compiled again"))
    assert library.load() is not None
    monkeypatch.setattr(library, "build", lambda check: pytest.fail("loaded twice"))
    assert library.load() is not None


def test_another_compiler_makes_another_file(
    cache: Path, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load()
    library._load.cache_clear()
    monkeypatch.setenv("CC", script(tmp_path / "mycc", f'exec {compiler} "$@"'))
    assert library.load() is not None
    assert len(list(cache.glob("*.so"))) == 2


def test_cc_may_have_arguments(cache: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{compiler} -O2")
    assert library.load() is not None


def test_one_openmp_runtime(compiler: str) -> None:
    """The kernels' threads are torch's own."""
    runtimes = build.openmp_runtimes()
    if not runtimes:
        pytest.skip("this system does not list what a process has loaded")
    assert len(runtimes) == 1
    assert build.loaded_openmp() in runtimes


def test_two_processes_at_once(cache: Path, compiler: str) -> None:
    racers = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(2)]
    assert [racer.wait(120) for racer in racers] == [0, 0]
    assert sorted(file.suffix for file in cache.iterdir()) == [".sha256", ".so"]


def test_cache_that_cannot_be_written(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary directory serves, and goes with the process."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "file"),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    seen = "; import glob, os; assert glob.glob(os.environ['TMPDIR'] + '/paceline-native-*/*.so')"
    subprocess.run([sys.executable, "-c", LOAD + seen], env=environment, check=True)
    assert not list((tmp_path / "tmp").glob("paceline-native-*"))


def test_no_home(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    path = build.build(lambda path: None)
    assert path.exists()
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("base", ["", "relative/cache"])
def test_a_relative_cache_home_counts_as_unset(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tmp_path / "home" / ".cache" in build.build(lambda path: None).parents
    assert not (tmp_path / "relative").exists()


def one_line(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    with caplog.at_level(logging.INFO):
        assert library.load() is None
        assert library.load() is None  # remembered, and not said again
    (record,) = caplog.records
    assert record.getMessage().startswith("native CPU kernels: none, torch's are used (slower): ")
    return record


def test_no_compiler(
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    record = one_line(caplog)
    assert record.levelno == logging.INFO
    assert "no C compiler (cc, gcc or clang)" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'kernels.c:1:1: error: no such luck' >&2; exit 3", "status 3: kernels.c:1:1: error"),
        ('case "$*" in *-v*) exit 0;; esac; for last; do :; done; exit 0', "cannot be loaded"),
        ("exit 1", "status 1: no message"),
    ],
    ids=["fails", "writes nothing", "is silent"],
)
def test_broken_compiler(
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    said: str,
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", text))
    record = one_line(caplog)
    assert record.levelno == logging.WARNING
    assert said in record.getMessage()
    assert not cache.exists() or not list(cache.iterdir())


def test_cc_that_does_not_exist(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "nocc")
    record = one_line(caplog)
    assert record.levelno == logging.WARNING
    assert "CC=nocc: no such program" in record.getMessage()


@pytest.mark.parametrize("damage", ["empty", "cut", "zeroed", "no checksum"])
def test_a_damaged_library_is_built_again(cache: Path, compiler: str, damage: str) -> None:
    """Loading one would end the process without a word."""
    built = build.build(lambda path: None)
    content = built.read_bytes()
    damaged = {"empty": b"", "cut": content[:3000], "zeroed": content[:4096] + bytes(4096)}
    if damage == "no checksum":
        built.with_suffix(".sha256").unlink()
    else:
        built.write_bytes(damaged[damage])
    subprocess.run([sys.executable, "-c", LOAD], check=True)
    checked = []
    assert build.build(checked.append) == built
    assert not checked  # the second process has mended it
    assert built.stat().st_size == len(content)


def test_cache_that_cannot_be_read(
    cache: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another user's home: that is no build, not an error."""

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(build, "_checksum", refuse)
    assert not build._is_whole(cache / "x.so")


def test_cc_with_an_open_quote(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    assert "No closing quotation" in one_line(caplog).getMessage()


def test_wrong_results_are_refused(
    cache: Path,
    compiler: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The self-test sees each kernel; here a source whose numbers are off."""
    text = build.SOURCE.read_text()
    spoilt = text.replace("float scale = h->scale * LOG2_E", "float scale = h->scale")
    spoilt = spoilt.replace("sqrtf(sum_lanes(sum) / (float)size + eps)", "sqrtf(eps)")
    spoilt = spoilt.replace("1.0f + exp2_lanes", "2.0f + exp2_lanes")
    assert spoilt != text
    source = tmp_path / "kernels.c"
    source.write_text(spoilt)
    shutil.copy(build.SOURCE.with_name("lanes.h"), tmp_path)
    monkeypatch.setattr(build, "SOURCE", source)
    record = one_line(caplog)
    assert record.levelno == logging.WARNING
    for name in ("rms_norm", "add_rms_norm", "silu_mul", "attend"):
        assert f"{name} (float32)" in record.getMessage()
        assert f"{name} (bfloat16)" in record.getMessage()
    assert not list(cache.iterdir())


def test_without_openmp(cache: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no single runtime can be shared, the kernels have one thread."""
    monkeypatch.setattr(build, "loaded_openmp", lambda: None)
    assert library.load() is not None


def test_runtime_that_cannot_be_linked(
    cache: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "loaded_openmp", lambda: "/nowhere/libgomp.so.1")
    assert library.load() is not None


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert library.load() is None


def test_importing_compiles_nothing(cache: Path) -> None:
    code = "import paceline.ops.native, paceline.worker.build"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not cache.exists()


def test_what_is_supported() -> None:
    reason = library.NativeKernels.unsupported_reason
    assert reason(torch.float32, 256) is None
    assert reason(torch.bfloat16, 64) is None
    assert "float16" in str(reason(torch.float16, 64))
    assert "256" in str(reason(torch.float32, 257))
