"""Plans and writes a target and its drafter as model directories.

Everything a user can get wrong is said by ``plan_pair``, before anything is written. Both models
are written under other names beside their places and moved there when both are whole.

    write_pair(plan_pair("qwen2.5-7b", "qwen2.5-0.5b", Path("pair"), acceptance=0.8))
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

from paceline import __version__
from paceline.arrays import Int64Array
from paceline.check.report import format_bytes
from paceline.errors import CapacityError, ConfigError
from paceline.models.weights import expected_weights
from paceline.synth.chain import (
    count_agreeing,
    draw_cycle,
    draw_drafter_cycle,
    draw_stand_ins,
    next_ids,
)
from paceline.synth.shapes import DTYPE_BYTES, Shape, find_shape
from paceline.synth.tokenizer import FIRST_WORD, build_tokenizer, write_tokenizer
from paceline.synth.weights import SyntheticWeights

DEFAULT_ACCEPTANCE = 0.8
NEXT_IDS = "next_ids.npy"  # [rows] int32 in each directory: the id that follows each id
_SHARD_BYTES = 10**9
_WRITERS = 4  # shards made and written at once
_OTHER_FILES = 10**7  # bytes of tokenizer and lists, generously
_LONGEST_DRAFT = 32  # tokens, where ``best_gain`` stops looking
_MODELS = ("target", "drafter")


@dataclass(frozen=True)
class PairPlan:
    """A pair that can be written. acceptance: what was asked for; ``agreeing`` is what is made."""

    target: Shape
    drafter: Shape | None
    out: Path
    acceptance: float
    seed: int
    dtype: str
    device: str

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape by directory name; the drafter first, so that a target is never without it."""
        found = {} if self.drafter is None else {"drafter": self.drafter}
        return found | {"target": self.target}

    @property
    def cycle_length(self) -> int:
        """Ids that greedy output goes through before it repeats."""
        return self.target.vocabulary.plain - FIRST_WORD

    @property
    def agreeing(self) -> int:
        """At how many ids of the cycle the drafter goes on as the target does."""
        return count_agreeing(self.cycle_length, self.acceptance)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        parameters = sum(shape.num_parameters for shape in self.shapes.values())
        return parameters * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all files, at most."""
        return self.weight_bytes + len(self.shapes) * _OTHER_FILES

    @property
    def best_gain(self) -> float | None:
        """The most that drafting can gain for one sequence: plain decode is 1. None: no drafter.

        If reading weights takes all the time, drafting k tokens costs k · cost of a target step and
        yields 1 + a + … + aᵏ tokens.
        """
        if self.drafter is None:
            return None
        share = self.agreeing / self.cycle_length
        cost = self.drafter.num_parameters_read / self.target.num_parameters_read
        return max(
            sum(share**i for i in range(k + 1)) / (1 + k * cost)
            for k in range(1, _LONGEST_DRAFT + 1)
        )


@dataclass(frozen=True)
class Written:
    """One model directory that is complete."""

    path: Path
    shape: Shape
    nbytes: int  # of weights
    seconds: float


def plan_pair(
    target: str,
    drafter: str | None,
    out: Path,
    *,
    acceptance: float | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    device: str | None = None,
    force: bool = False,
) -> PairPlan:
    """Check what a user asks for.

    target, drafter: names of shapes; no drafter: None. acceptance: conditional acceptance, 0.8 if
    None. device: where random numbers are made; None: a GPU if there is one. force: models in
    ``out`` may be replaced.

    Raises:
        ConfigError: unknown shapes, a pair of different vocabularies, values out of range, a place
            that is taken, no such device.
        CapacityError: too little disk space.
    """
    target_shape = find_shape(target)
    drafter_shape = None if drafter is None else find_shape(drafter)
    if drafter_shape is None and acceptance is not None:
        raise ConfigError(
            f"an acceptance of {acceptance} needs a drafter. hint: name one with --drafter, or "
            "leave --acceptance out"
        )
    if drafter_shape is not None and drafter_shape.vocabulary != target_shape.vocabulary:
        raise ConfigError(
            f"`{drafter_shape.name}` cannot draft for `{target_shape.name}`: its vocabulary is "
            f"that of the {drafter_shape.vocabulary.name} models ({drafter_shape.vocabulary.size} "
            f"ids), not of the {target_shape.vocabulary.name} models "
            f"({target_shape.vocabulary.size} ids). hint: use two shapes of one vocabulary"
        )
    acceptance = DEFAULT_ACCEPTANCE if acceptance is None else acceptance
    if not 0.0 <= acceptance <= 1.0:
        raise ConfigError(
            f"the acceptance must be from 0 to 1, got {acceptance}. hint: 0.8 means that four of "
            "five drafts are accepted"
        )
    if seed < 0:
        raise ConfigError(f"the seed must be 0 or more, got {seed}. hint: any such number will do")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype `{dtype}`. hint: one of {', '.join(DTYPE_BYTES)}")
    plan = PairPlan(
        target_shape, drafter_shape, out, acceptance, seed, dtype, _resolve_device(device)
    )
    _check_place(out, force=force)
    _check_space(plan)
    return plan


def write_pair(
    plan: PairPlan, on_written: Callable[[Written], None] = lambda written: None
) -> list[Written]:
    """Write the models of the plan into ``plan.out``; the drafter's first.

    on_written: told of each model as soon as its files are there, under their final path, which
    they get at the end.

    Raises OSError where the system does (nothing half written is left in place then), ConfigError
    if another process writes there.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    with _locked(plan.out):
        return _write_models(plan, on_written)


def _write_models(plan: PairPlan, on_written: Callable[[Written], None]) -> list[Written]:
    for name in _MODELS:
        shutil.rmtree(_partial(plan.out, name), ignore_errors=True)  # of a run that was killed
    rows = max(shape.rows for shape in plan.shapes.values())
    cycles, stand_ins = draw_map(plan, rows)
    tokenizer = build_tokenizer(plan.target.vocabulary)
    written = []
    try:
        for name, shape in plan.shapes.items():
            start = time.perf_counter()
            directory = _partial(plan.out, name)
            directory.mkdir()
            nbytes = _write_model(
                plan, name, directory, cycles[name], stand_ins[: shape.rows], tokenizer
            )
            seconds = time.perf_counter() - start
            written.append(Written(plan.out / name, shape, nbytes, seconds))
            on_written(written[-1])
        for name in _MODELS:
            if (plan.out / name).exists():
                shutil.rmtree(plan.out / name)
        for name in plan.shapes:
            _partial(plan.out, name).rename(plan.out / name)
    finally:
        for name in _MODELS:
            shutil.rmtree(_partial(plan.out, name), ignore_errors=True)
    return written


def draw_map(plan: PairPlan, rows: int) -> tuple[dict[str, Int64Array], Int64Array]:
    """(cycle by directory name, stand-ins [rows]), from seed, acceptance, vocabulary and rows."""
    rng = np.random.default_rng(plan.seed)
    words = np.arange(FIRST_WORD, plan.target.vocabulary.plain)
    cycle = draw_cycle(words, rng)
    stand_ins = draw_stand_ins(rows, cycle, rng)
    cycles = {"target": cycle, "drafter": draw_drafter_cycle(cycle, plan.acceptance, rng)}
    return cycles, stand_ins


# --- checks ---


def _resolve_device(device: str | None) -> str:
    available = torch.cuda.is_available()
    if device is None:
        return "cuda" if available else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device `{device}`. hint: cpu or cuda")
    if device == "cuda" and not available:
        raise ConfigError(
            "torch finds no CUDA device here. hint: use --device cpu, which takes longer"
        )
    return device


def _check_place(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"`{out}` is a file. hint: --out names a directory")
    if not out.is_dir():
        return
    # What a killed run left is ours to clear away.
    leftovers = {_partial(out, name) for name in _MODELS}
    others = sorted(entry.name for entry in out.iterdir() if entry not in leftovers)
    if others and not force:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            f"`{out}` is not empty: it holds {', '.join(others[:3])}{more}. hint: choose another "
            "directory, or replace the target and drafter in it with --force"
        )
    for name in _MODELS:
        place = out / name
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise ConfigError(
                f"`{place}` is not a directory of its own, so it is not replaced. hint: remove it, "
                "or choose another directory"
            )


def _check_space(plan: PairPlan) -> None:
    parent = plan.out.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"`{plan.out}` cannot be made: `{parent}` is not a directory that you may write to. "
            "hint: choose another directory"
        )
    free = shutil.disk_usage(parent).free
    if plan.nbytes > free:
        raise CapacityError(
            f"the models take {format_bytes(plan.nbytes)} in {plan.dtype}, but only "
            f"{format_bytes(free)} are free in `{parent}`. hint: choose a directory on another "
            "disk, or smaller shapes"
        )


# --- files ---


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other processes that write models there out. Raises ConfigError if one is at work."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ConfigError(
            f"another process is writing models to `{directory}`. hint: wait for it, or choose "
            "another directory"
        ) from error
    try:
        yield
    finally:
        os.close(handle)


def _partial(out: Path, name: str) -> Path:
    return out / f".{name}.partial"


def _write_model(
    plan: PairPlan,
    name: str,
    directory: Path,
    cycle: Int64Array,
    stand_ins: Int64Array,
    tokenizer: Tokenizer,
) -> int:
    """Write all files of one model; returns the bytes of its weights."""
    shape = plan.shapes[name]
    weights = SyntheticWeights(
        shape.arch(plan.dtype),
        cycle,
        stand_ins,
        f"{plan.seed}/{name}",
        getattr(torch, plan.dtype),
        plan.device,
    )
    nbytes = _write_weights(weights, shape, DTYPE_BYTES[plan.dtype], directory)
    _write_json(directory / "config.json", shape.config(plan.dtype))
    write_tokenizer(tokenizer, shape.vocabulary, directory)
    np.save(directory / NEXT_IDS, next_ids(cycle, stand_ins).astype(np.int32))
    _write_json(
        directory / "synth.json",
        {
            "made_by": f"paceline synth {__version__}: random weights, no language model",
            "shape": shape.name,
            "drafts_for": plan.target.name if name == "drafter" else None,
            "acceptance": plan.agreeing / plan.cycle_length if name == "drafter" else None,
            "cycle_length": plan.cycle_length,
            "seed": plan.seed,
        },
    )
    return nbytes


def _write_weights(
    weights: SyntheticWeights, shape: Shape, item_bytes: int, directory: Path
) -> int:
    """Write model.safetensors, or shards with their index; returns the bytes of the tensors."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    total = size = 0
    for tensor, dimensions in expected_weights(shape.arch()).items():
        nbytes = int(np.prod(dimensions)) * item_bytes
        if shards[-1] and size + nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][tensor] = dimensions
        size += nbytes
        total += nbytes
    count = len(shards)
    files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]

    def write(file: str, shard: dict[str, tuple[int, ...]]) -> None:
        tensors = {name: weights.make(name, dimensions).cpu() for name, dimensions in shard.items()}
        try:
            save_file(tensors, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:  # what it makes of the system's errors
            raise OSError(f"`{directory / file}` could not be written: {error}") from error
        (directory / file).chmod(0o644)  # safetensors leaves it to its owner alone

    with ThreadPoolExecutor(_WRITERS) as pool:
        try:
            list(pool.map(write, files, shards))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if count > 1:
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(directory / "model.safetensors.index.json", index)
    return total


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
