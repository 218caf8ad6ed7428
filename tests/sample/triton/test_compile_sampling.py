"""Every decision kernel compiles for the cards it is meant for, within their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_kernels import load

load("triton")  # by way of ``load``: in this process kernels may have to be interpreted

SCRIPT = Path(__file__).with_name("compile_sampling.py")
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes a program may use
KERNELS = {
    "threshold_kernel",
    "part_kernel",
    "choose_kernel",
    "_accept_kernel",
    "_count_kernel",
    "_lookup_kernel",
}


@pytest.mark.parametrize("sm", list(SHARED_MEMORY))
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), str(sm)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {entry["kernel"] for entry in compiled} == KERNELS
    for entry in compiled:
        assert entry["shared"] <= SHARED_MEMORY[sm], entry
