"""Compiles the latency kernel with NVRTC, and keeps the result in the user's cache directory.

A cubin is named after everything it depends on: sources, options, card and compiler. It is written
beside its place and then renamed, so several processes may do this at once, and a damaged file is
built again. Needs NVIDIA's own ``cuda-bindings``; nothing of it is imported before ``build``.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("cuda")
MAIN = "forward.cu"
KERNEL = "forward"
_DIGEST = 64  # characters of a checksum, before the cubin in its file


class LatencyUnavailable(Exception):
    """There is no kernel; the message says why and what to do."""


def bindings(name: str) -> Any:
    """A module of ``cuda.bindings``, "driver" or "nvrtc".

    Raises LatencyUnavailable when the package or the library behind it is missing.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except (ImportError, RuntimeError) as error:
        raise LatencyUnavailable(
            f"the package cuda-bindings is missing or does not load ({error}). "
            'hint: run `pip install -c constraints.txt -e ".[gpu]"` in your clone of Paceline'
        ) from error


def checked(results: tuple[Any, ...], what: str) -> Any:
    """What a call of the bindings returned besides its status; the only value, or a tuple.

    Raises LatencyUnavailable, with ``what`` was tried, when the status is not success.
    """
    status, *values = results
    if int(status) != 0:
        raise LatencyUnavailable(f"{what} failed: {status!s}")
    return values[0] if len(values) == 1 else tuple(values)


def build(options: dict[str, int | str], capability: tuple[int, int]) -> bytes:
    """The kernel as a cubin, from the cache where possible.

    options: see ``LatencyPlan.options``. Raises LatencyUnavailable with one clear reason.
    """
    nvrtc = bindings("nvrtc")
    try:
        version = checked(nvrtc.nvrtcVersion(), "asking NVRTC for its version")
    except RuntimeError as error:  # the package is there and its library is not
        raise LatencyUnavailable(
            f"NVRTC does not load ({error}). hint: run `pip install -c constraints.txt "
            '-e ".[gpu]"` in your clone of Paceline'
        ) from error
    flags = [f"-D{name}={value}" for name, value in options.items()]
    flags += [f"-arch=sm_{capability[0]}{capability[1]}a", "-std=c++17", "-default-device"]
    sources = {file.name: file.read_bytes() for file in sorted(SOURCES.glob("*.cu*"))}
    identity = hashlib.sha256(repr((sources, flags, version)).encode()).hexdigest()[:24]
    kept = _cache_directory()
    place = None if kept is None else kept / f"{identity}.cubin"
    found = None if place is None else _read(place)
    if found is None:
        found = _compile(nvrtc, sources, flags)
        if place is not None:
            _write(place, found)
    return found


def _compile(nvrtc: Any, sources: dict[str, bytes], flags: list[str]) -> bytes:
    headers = [name for name in sources if name != MAIN]
    program = checked(
        nvrtc.nvrtcCreateProgram(
            sources[MAIN],
            MAIN.encode(),
            len(headers),
            [sources[name] for name in headers],
            [name.encode() for name in headers],
        ),
        "NVRTC",
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [x.encode() for x in flags])
        if int(status) != 0:
            raise LatencyUnavailable(f"NVRTC refused the kernel: {_first_error(nvrtc, program)}")
        cubin: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program), "NVRTC")
        checked(nvrtc.nvrtcGetCUBIN(program, cubin), "NVRTC")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _first_error(nvrtc: Any, program: Any) -> str:
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC")
    checked(nvrtc.nvrtcGetProgramLog(program, log), "NVRTC")
    lines = log.decode(errors="replace").strip("\0 \n").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _cache_directory() -> Path | None:
    """Where builds are kept; None when there is no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home directory is known
        return None
    return Path(base) / "paceline" / "latency"


def _read(place: Path) -> bytes | None:
    """A kept cubin; None when it is missing or damaged."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST], content[_DIGEST:]
    return cubin if digest == hashlib.sha256(cubin).hexdigest().encode() else None


def _write(place: Path, cubin: bytes) -> None:
    """Keep a cubin; where the cache cannot be written, the next process builds again."""
    unfinished = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f".{place.name}-", dir=place.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).hexdigest().encode() + cubin)
        os.replace(unfinished, place)
    except OSError:
        if unfinished is not None:
            Path(unfinished).unlink(missing_ok=True)
