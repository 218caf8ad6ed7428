"""What this machine offers: native bfloat16, free memory.

Reads /proc and /sys where they exist (Linux); elsewhere it answers cautiously. Must not know
models.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# x86: AVX-512 and AMX instructions; Arm: the "bf16" feature. Without them bfloat16 is emulated.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def has_native_bfloat16(proc: Path = _PROC) -> bool:
    """Whether the CPU multiplies bfloat16 matrices itself."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BF16_FLAGS.isdisjoint(flags.split())
    return False


def packs_weights(dtype: str) -> bool:
    """Whether matrices are likely to be kept in the layout that oneDNN reads fastest."""
    return platform.machine() in ("x86_64", "AMD64") and dtype in ("float32", "bfloat16")


def available_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Bytes a new process can use: free and reclaimable memory, within the cgroup's limit.

    None where the system does not say.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        values = {name: value for name, _, value in (line.partition(":") for line in lines)}
        available = int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None
    limits = [_left(*files) for files in _cgroup_files(proc, cgroup)]
    return min([available, *(limit for limit in limits if limit is not None)])


def _cgroup_files(proc: Path, cgroup: Path) -> list[tuple[Path, str, str, str]]:
    """(directory, limit file, usage file, key of reclaimable bytes) of every group we are in.

    Limits of all ancestors hold. Inside a container the own path may not exist below the mount,
    whose root then is the group.
    """
    found: list[tuple[Path, str, str, str]] = []
    try:
        entries = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return found
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root = cgroup
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        directory = root / path.strip("/")
        while True:
            if (directory / names[0]).is_file():
                found.append((directory, *names))
            if directory == root:
                break
            directory = directory.parent
    return found


def _left(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """Bytes left under one limit, or None where there is none."""
    try:
        limit = int((directory / limit_file).read_text())  # "max" means none
        usage = int((directory / usage_file).read_text())
        stat = dict(
            line.split(maxsplit=1) for line in (directory / "memory.stat").read_text().splitlines()
        )
        return max(0, limit - usage + int(stat.get(reclaimable, 0)))
    except (OSError, ValueError):
        return None
