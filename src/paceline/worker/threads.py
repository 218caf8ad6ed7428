"""How many threads a pass on a CPU takes, set for the calling thread alone.

torch's own setting is the process's: other threads that meet it while it is lowered keep the lower
number. The OpenMP runtime that torch uses has one for each thread, and torch goes by it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.config import ModelArch
from paceline.models.weights import count_parameters
from paceline.ops.native.build import loaded_openmp

# Measured on two cores: a 7M-parameter model gains at most a fifth from the second thread, one of
# 135M a third and more.
_TEAM_PARAMETERS = 30_000_000


def choose_threads(arch: ModelArch) -> int:
    """Threads of a pass: torch's own number, or one where the target is tiny.

    A team of threads meets hundreds of times in a pass; the passes of a tiny model are so short
    that this gains little at best, and on busy cores, where a meeting waits for whoever is not
    running, a step takes up to 100 times as long. OMP_NUM_THREADS is obeyed.
    """
    if _is_chosen() or _runtime() is None or count_parameters(arch) >= _TEAM_PARAMETERS:
        return torch.get_num_threads()
    return 1


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let the calling thread's work be done by ``count`` threads."""
    before, runtime = torch.get_num_threads(), _runtime()
    if count == before or runtime is None:
        yield
        return
    runtime.omp_set_num_threads(count)
    try:
        yield
    finally:
        runtime.omp_set_num_threads(before)


def _is_chosen() -> bool:
    """Whether OMP_NUM_THREADS names a number; others are ignored, by the runtime too."""
    value = os.environ.get("OMP_NUM_THREADS", "").strip()
    return re.fullmatch(r"0*[1-9]\d*(\s*,\s*\d+)*", value, re.ASCII) is not None


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, None where it is another kind of build."""
    path = loaded_openmp()
    return None if path is None else ctypes.CDLL(path)
