"""Reading /proc and control groups, on copies of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.check.machine import available_memory, has_native_bfloat16

MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    8000 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("flags\t\t: fpu avx512f avx2", False),
        ("Features\t: fp asimd bf16", True),
        ("model name\t: bf16", False),
    ],
)
def test_native_bfloat16(tmp_path: Path, line: str, native: bool) -> None:
    proc = write(tmp_path, {"cpuinfo": f"processor\t: 0\n{line}\n"})
    assert has_native_bfloat16(proc) is native


def test_no_cpuinfo_means_no(tmp_path: Path) -> None:
    assert has_native_bfloat16(tmp_path) is False


def test_memory_without_limits(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": "0::/\n"})
    assert available_memory(proc, tmp_path / "cgroup") == 8000 * 1024


def test_memory_under_a_unified_group(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": "0::/a/b\n"})
    cgroup = write(
        tmp_path / "cgroup",
        {
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "100\n",
            "a/memory.max": "5000000\n",
            "a/memory.current": "2000000\n",
            "a/memory.stat": "anon 1\ninactive_file 500000\n",
        },
    )
    assert available_memory(proc, cgroup) == 3_500_000


def test_memory_under_a_version_1_group_seen_from_inside(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": "4:memory:/out/side\n"})
    cgroup = write(
        tmp_path / "cgroup",
        {
            "memory/memory.limit_in_bytes": "1000\n",
            "memory/memory.usage_in_bytes": "400\n",
            "memory/memory.stat": "total_inactive_file 10\n",
        },
    )
    assert available_memory(proc, cgroup) == 610


def test_memory_elsewhere_is_what_the_system_has(tmp_path: Path) -> None:
    found = available_memory(tmp_path, tmp_path)
    assert found is None or found > 0
