"""The latency kernel on a CPU: its source, translated, and a driver that runs it.

Every inline assembly statement of the source becomes a call of ``emulator.h``; the rest is C++
already. ``install`` puts this in the place of NVRTC and the CUDA driver, so that ``LatencyForward``
runs as it is, on tensors of a CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.latency import build, forward

HERE = Path(__file__).parent
# By a part of the instruction: the function that does it, called with outputs and inputs.
INSTRUCTIONS = [
    ("mma.sync", "mma"),
    ("movmatrix", "movmatrix"),
    ("cvt.rn.bf16x2", "pack"),
    ("ex2.approx", "exp2_fast"),
    ("max.u16x2", "max_halves"),
    ("ld.global.nc.v4", "load_16"),
    ("ld.relaxed.gpu.global.v4", "poll_16"),
    ("ld.shared.v4", "load_shared"),
    ("ld.relaxed.gpu.global.u32", "poll_4"),
    ("ld.acquire.gpu.global.u32", "poll_4"),
    ("st.relaxed.gpu.global.u16", "store_2"),
    ("st.relaxed.gpu.global.u32 [%0], 1", "store_one"),
    ("st.relaxed.gpu.global.u32", "store_4"),
    ("st.release.gpu.global.u32", "store_4"),
    ("bar.sync 1,", "bar_sync(1,"),
    ("bar.sync", "bar_sync"),
    ("bar.arrive", "bar_arrive"),
    ("mbarrier.init", "barrier_init"),
    ("mbarrier.arrive.expect_tx", "barrier_expect"),
    ("mbarrier.try_wait", "barrier_test"),
    ("mbarrier.test_wait", "barrier_test"),
    ("cp.async.bulk", "bulk_copy"),
    ("mov.u32 %0, %%tid.x", "thread_index"),
    ("prefetch", "nothing"),
    ("createpolicy", "nothing"),
    ("fence.", "nothing"),
    ("", "nothing"),
]
ORDER = ["common", "layout", "exchange", "ring", "products", "attention"]


def translate(directory: Path) -> str:
    """The source as C++ behind ``emulator.h``."""
    files = [directory / f"{name}.cuh" for name in ORDER] + [directory / build.MAIN]
    source = "\n".join(file.read_text() for file in files)
    source = re.sub(
        r'#include "\w+\.cuh"|#pragma (once|unroll.*)|\n *extern __shared__[^;]*;', "", source
    )
    source = re.sub(r"typedef unsigned[^;]*;[^\n]*", "", source)
    source = source.replace(
        "while (issued < total) {", "while (issued < total) { emulator::yield();"
    )
    found, at = [], 0
    for match in re.finditer(r"\basm\s*(volatile)?\s*\(", source):
        end = _closing(source, match.end())
        found += [source[at : match.start()], _call(source[match.end() : end])]
        at = end + 1
    source = "".join(found) + source[at:]
    return f"{source}\n{ENTRY}"


ENTRY = """
static const Params* parameters;
extern "C" int run(const Params* given, int blocks, int threads, int shared) {
  parameters = given;
  return emulator::run(blocks, threads, shared, [] { forward(*parameters); });
}
"""


def _closing(source: str, at: int) -> int:
    """Index of the parenthesis that closes one before ``at``."""
    depth, quoted = 1, False
    while True:
        character = source[at]
        quoted ^= character == '"'
        if not quoted:
            depth += (character == "(") - (character == ")")
        if not depth:
            return at
        at += 1


def _call(statement: str) -> str:
    """An assembly statement's content as a call."""
    strings = re.match(r'(\s*"[^"]*")+', statement)
    assert strings is not None
    instruction = "".join(re.findall(r'"([^"]*)"', strings.group()))
    operands = []
    rest = statement[strings.end() :]
    for match in re.finditer(r'"[=+]?\w"\(', rest):
        operands.append(rest[match.end() : _closing(rest, match.end())])
    name = next(function for part, function in INSTRUCTIONS if part in instruction)
    call = name if "(" in name else f"{name}("
    return f"emulator::{call}{', '.join(operands)})"


def compile_kernel(options: dict[str, int | str], directory: Path) -> bytes:
    """A shared library of the kernel; returns its path."""
    lines = [f"#define {name} {value}" for name, value in options.items()]
    text = "\n".join([*lines, (HERE / "emulator.h").read_text(), translate(build.SOURCES)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    library = directory / f"{digest}.so"
    if not library.exists():
        file = directory / f"{digest}.cpp"
        file.write_text(text)
        command = ["g++", "-std=c++20", "-O2", "-w", "-fno-strict-aliasing", "-fPIC", "-shared"]
        done = subprocess.run(
            [*command, str(file), "-o", str(library)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[:3000]
    return str(library).encode()


class Driver:
    """The calls of ``cuda.bindings.driver`` that ``LatencyForward`` makes."""

    CUfunction_attribute = types.SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared memory"
    )

    def cuModuleLoadData(self, library: bytes) -> tuple[int, Any]:
        return 0, ctypes.CDLL(library.decode())

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[int, Any]:
        return 0, module.run

    def cuFuncSetAttribute(self, *_: Any) -> tuple[int]:
        return (0,)

    def cuLaunchCooperativeKernel(self, function: Any, *shape: int) -> tuple[int]:
        blocks, _, _, threads, _, _, shared, _, arguments = shape
        (pointer,) = (ctypes.c_void_p * 1).from_address(arguments)
        assert function(ctypes.c_void_p(pointer), blocks, threads, shared) == 0, "it waits for ever"
        return (0,)


def install(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Put the emulator in the place of NVRTC, the driver and the current stream."""
    if shutil.which("g++") is None or platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("NO EMULATOR: needs g++ on x86-64 Linux")
    monkeypatch.setattr(forward, "bindings", lambda name: Driver())
    monkeypatch.setattr(forward, "build", lambda options, _: compile_kernel(options, directory))
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
