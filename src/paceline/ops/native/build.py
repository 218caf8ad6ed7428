"""Compile ``kernels.c`` for this machine, once, into the user's cache directory.

A build is named after everything it depends on, so that another compiler, CPU or torch makes
another file. It is written beside its place, checked, and then renamed: several processes may do
this at once. Where the cache cannot be written, a temporary directory serves one process.

Knows how to make a shared library, not what is in it.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
# Nothing that lets the compiler choose: NaN comes out where it went in, sums keep their order, and
# products are fused with sums only where the source says so.
_FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC"]
_TIMEOUT = 120.0  # seconds; a compiler needs about one
_RUNTIMES = ("libgomp", "libomp", "libiomp")


class BuildError(Exception):
    """There is no library. ``unexpected``: a compiler was there and failed."""

    def __init__(self, message: str, *, unexpected: bool) -> None:
        super().__init__(message)
        self.unexpected = unexpected


def build(check: Callable[[Path], None]) -> Path:
    """The compiled library, from the cache where possible.

    check: called with a new library before it gets its name; raises BuildError to refuse it. Where
    a build that shares torch's OpenMP runtime fails, one without threads is made. Raises BuildError
    when there is no compiler or nothing it makes passes.
    """
    compiler = find_compiler()
    identity = _identity(compiler)
    runtime = loaded_openmp()
    attempts = [None] if runtime is None else [runtime, None]
    failure: BuildError | None = None
    for openmp in attempts:
        digest = hashlib.sha256(f"{identity}\n{openmp}".encode()).hexdigest()[:24]
        try:
            return _build_once(compiler, openmp, f"{digest}.so", check)
        except BuildError as error:
            failure = failure or error
    assert failure is not None  # there is at least one attempt
    raise failure


def find_compiler() -> list[str]:
    """The C compiler's command: $CC, else the first of cc, gcc and clang on the path."""
    wanted = os.environ.get("CC", "").strip()
    if wanted:
        try:
            command = shlex.split(wanted)
        except ValueError as error:
            raise BuildError(f"CC={wanted}: {error}", unexpected=True) from error
        if shutil.which(command[0]) is None:
            raise BuildError(f"CC={wanted}: no such program", unexpected=True)
        return command
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return [found]
    raise BuildError("no C compiler (cc, gcc or clang)", unexpected=False)


def loaded_openmp() -> str | None:
    """The one OpenMP runtime of this process (torch's), by its file; None without exactly one.

    The kernels must share it: the threads of a second one would fight with torch's over the cores.
    """
    found = openmp_runtimes()
    return found.pop() if len(found) == 1 else None


def openmp_runtimes() -> set[str]:
    """Files of the OpenMP runtimes this process has loaded; empty where this cannot be known."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return {file for file in files if os.path.basename(file).startswith(_RUNTIMES)}


def _identity(compiler: list[str]) -> str:
    """Everything a build depends on besides the OpenMP runtime."""
    parts = [
        *(file.read_text() for file in (SOURCE, SOURCE.with_name("lanes.h"))),
        " ".join(_FLAGS),
        " ".join(compiler),
        _output([*compiler, "-v"]),
    ]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.platform(), platform.processor()]
    described = {"model name", "flags", "Features", "CPU implementer", "CPU part"}
    first: dict[str, str] = {}
    for line in lines:
        name = line.split(":")[0].strip()
        if name in described or ":" not in line:
            first.setdefault(name, line)
    return "\n".join([*parts, platform.machine(), *first.values()])


def _output(command: list[str]) -> str:
    """What a command prints. Raises BuildError when it fails, with its first line of error."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}", unexpected=True) from error
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        lines = [line for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise BuildError(
            f"{command[0]} failed with status {done.returncode}: {telling[0].strip()}",
            unexpected=True,
        )
    return text


def _build_once(
    compiler: list[str], openmp: str | None, name: str, check: Callable[[Path], None]
) -> Path:
    kept = _cache_directory()
    if kept is not None and _is_whole(kept / name):
        return kept / name
    built = _new_file(kept, name)
    objects = built.with_suffix(".o")
    try:
        # The runtime is named as a file, and -fopenmp left out: it would link the compiler's own.
        threads = [] if openmp is None else ["-fopenmp"]
        libraries = ["-lm"] if openmp is None else [openmp, "-lm", "-Wl,-z,defs"]
        _output([*compiler, *_FLAGS, *threads, "-c", str(SOURCE), "-o", str(objects)])
        _output([*compiler, "-shared", str(objects), "-o", str(built), *libraries])
        check(built)
        target = built.with_name(name)
        objects.write_text(_checksum(built))
        os.replace(objects, _checksum_file(target))
        os.replace(built, target)
    finally:
        built.unlink(missing_ok=True)
        objects.unlink(missing_ok=True)
    return target


def _is_whole(library: Path) -> bool:
    """Whether a kept library is there and what was once written; a damaged one would crash us."""
    try:
        return _checksum_file(library).read_text() == _checksum(library)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _cache_directory() -> Path | None:
    """Where builds are kept; None when there is no home.

    A relative XDG_CACHE_HOME counts as unset (XDG Base Directory Specification).
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # no home directory is known
            return None
    return base / "paceline" / "native" if base.is_absolute() else None


def _new_file(kept: Path | None, name: str) -> Path:
    """An empty file beside the build's place, or in a directory that goes when the process ends."""
    if kept is not None:
        try:
            kept.mkdir(parents=True, exist_ok=True)
            return _empty_file(kept, name)
        except OSError:
            pass  # read-only, full, or not a directory
    try:
        directory = Path(tempfile.mkdtemp(prefix="paceline-native-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return _empty_file(directory, name)
    except OSError as error:
        raise BuildError(f"no place for the compiled file: {error}", unexpected=True) from error


def _empty_file(directory: Path, name: str) -> Path:
    handle, path = tempfile.mkstemp(prefix=f".{name}-", suffix=".so", dir=directory)
    os.close(handle)
    return Path(path)
