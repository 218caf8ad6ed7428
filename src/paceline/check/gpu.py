"""What GPU this machine offers, found without loading torch.

Asks the driver's own tool. Must not know models.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIN_CAPABILITY = (8, 0)  # bfloat16 matrix units, and what the kernels are compiled for
_QUERY = "index,uuid,name,memory.total,memory.free,compute_cap"
_SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """The first GPU this process may use."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


def find_gpu() -> Gpu | None:
    """The GPU that ``cuda:0`` would be, None without one (or without its driver's tool)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return choose_gpu(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def choose_gpu(table: str, visible: str | None) -> Gpu | None:
    """The GPU of the tool's table that CUDA_VISIBLE_DEVICES (None: not set) makes the first."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    rows = [row for row in rows if len(row) == 6]
    wanted = None if visible is None else visible.split(",")[0].strip()
    for index, uuid, name, total, free, capability in rows:
        if wanted is not None and not (index == wanted or (wanted and uuid.startswith(wanted))):
            continue
        try:
            major, minor = capability.split(".")
            size = int(total) * 1024**2, int(free) * 1024**2
            return Gpu(name, *size, (int(major), int(minor)))
        except ValueError:  # such as "[N/A]"
            return None
    return None


@functools.cache
def software_fault() -> tuple[str, str] | None:
    """What this Python lacks to use a GPU, and the way out; None when nothing."""
    torch = importlib.util.find_spec("torch")
    version = "" if torch is None or torch.origin is None else _read(torch.origin)
    if not re.search(r"^cuda\b.*=\s*'\d", version, re.MULTILINE):
        return (
            "the installed torch is built without CUDA",
            "install a CUDA build of torch, see https://pytorch.org/get-started/locally",
        )
    if importlib.util.find_spec("triton") is None:
        return (
            "the package triton is missing",
            'run `pip install -c constraints.txt -e ".[gpu]"` in your clone of Paceline',
        )
    return None


def _read(origin: str) -> str:
    try:
        return (Path(origin).parent / "version.py").read_text()
    except OSError:
        return ""
