"""Every forward kernel compiles for the cards it is meant for, within their shared memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

SCRIPT = Path(__file__).with_name("cross_compile.py")
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes a program may use
SHORT = ["elementwise 7B", "rotary D=128 norm", "attention D=128", "attention D=8"]
KERNELS = {
    "_rms_norm_kernel",
    "_silu_mul_kernel",
    "_embed_rows_kernel",
    "_decode_kernel",
    "_prefill_kernel",
    "_split_kernel",
    "_combine_kernel",
}


def compile_for(sm: int, cases: list[str], cache: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), str(sm), str(SHARED_MEMORY[sm]), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {entry["kernel"] for entry in compiled} == KERNELS
    for entry in compiled:
        assert entry["shared"] <= SHARED_MEMORY[sm], entry


@pytest.mark.parametrize("sm", list(SHARED_MEMORY))
def test_main_configurations(sm: int, tmp_path: Path) -> None:
    compile_for(sm, SHORT, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sm", list(SHARED_MEMORY))
def test_all_configurations(sm: int, tmp_path: Path) -> None:
    compile_for(sm, [], tmp_path)
