"""Planning and writing: what is refused, what is left behind, shards, seeds."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from small_shapes import TINY, plan_of

from paceline.errors import CapacityError, ConfigError
from paceline.models.hf_config import read_hf_config
from paceline.models.weights import check_weights
from paceline.synth import pair
from paceline.synth.pair import plan_pair, write_pair
from paceline.synth.shapes import SHAPES
from paceline.synth.weights import SyntheticWeights

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "next_ids.npy",
    "synth.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


def entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": "qwen2.5-8b"}, r"no shape `qwen2\.5-8b`\. hint: did you mean"),
        ({"drafter": "tinny"}, r"no shape `tinny`\. hint: did you mean `tiny`"),
        (
            {"target": "qwen2.5-7b", "drafter": "llama-3.2-1b"},
            r"`llama-3\.2-1b` cannot draft for `qwen2\.5-7b`: .*128256 ids.*151646 ids.* hint: ",
        ),
        ({"acceptance": 1.2}, r"from 0 to 1, got 1\.2\. hint: "),
        ({"acceptance": -0.1}, r"from 0 to 1, got -0\.1"),
        ({"acceptance": float("nan")}, r"from 0 to 1, got nan"),
        ({"drafter": None, "acceptance": 0.5}, r"acceptance of 0\.5 needs a drafter\. hint: "),
        ({"seed": -1}, r"seed must be 0 or more, got -1\. hint: "),
        ({"dtype": "int8"}, r"unknown dtype `int8`\. hint: one of bfloat16, float16, float32"),
        ({"device": "tpu"}, r"unknown device `tpu`\. hint: cpu or cuda"),
    ],
)
def test_refusals_write_nothing(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    arguments = {"target": "tiny", "drafter": "tiny", **options}
    target, drafter = arguments.pop("target"), arguments.pop("drafter")
    with pytest.raises(ConfigError, match=says):
        plan_pair(target, drafter, tmp_path / "new", **arguments)
    assert entries(tmp_path) == []


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA device.*hint: use --device cpu"):
        plan_pair("tiny", None, tmp_path, device="cuda")
    assert plan_pair("tiny", None, tmp_path).device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert plan_pair("tiny", None, tmp_path).device == "cuda"


def test_too_little_disk_is_said_in_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 3 * 2**30))
    with pytest.raises(CapacityError, match=r"take 15\.\d\d GiB in bfloat16.*3\.00 GiB are free"):
        plan_pair("qwen2.5-7b", "qwen2.5-0.5b", tmp_path / "a" / "b")
    assert plan_pair("qwen2.5-0.5b", None, tmp_path / "a" / "b").nbytes < 2**30


def test_places_that_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"file` is a file\. hint: "):
        plan_pair("tiny", None, file)
    with pytest.raises(ConfigError, match=r"cannot be made: `.*file` is not a directory"):
        plan_pair("tiny", None, file / "below")
    with pytest.raises(ConfigError, match=r"is not empty: it holds file\. hint: .*--force"):
        plan_pair("tiny", None, tmp_path)
    (tmp_path / "target").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"target` is not a directory of its own"):
        plan_pair("tiny", None, tmp_path, force=True)


def test_force_replaces_the_models_and_nothing_else(tmp_path: Path) -> None:
    write_pair(plan_pair("tiny", "tiny", tmp_path, seed=1))
    (tmp_path / "notes").write_text("mine")
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="it holds drafter, notes, target"):
        plan_pair("tiny", None, tmp_path)
    write_pair(plan_pair("tiny", None, tmp_path, seed=2, force=True))
    assert entries(tmp_path) == ["notes", "target"]
    assert (tmp_path / "target" / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    ("target", "drafter", "acceptance", "gain"),
    [
        # One draft of a model of the same size: 1.8 tokens for the time of 2.
        ("tiny", "tiny", 0.8, 0.9),
        ("tiny", "tiny", 1.0, 1.0),
        # A step of the drafter reads 0.06987 of what the target's reads; seven drafts are best.
        ("qwen2.5-7b", "qwen2.5-0.5b", 0.8, (1 - 0.8**8) / 0.2 / (1 + 7 * 0.06987)),
        ("qwen2.5-7b", "qwen2.5-0.5b", 0.0, 1 / 1.06987),
    ],
)
def test_what_a_pair_can_gain(
    target: str, drafter: str, acceptance: float, gain: float, tmp_path: Path
) -> None:
    plan = plan_of(SHAPES[target], SHAPES[drafter], tmp_path, acceptance=acceptance)
    assert plan.best_gain == pytest.approx(gain, rel=1e-3)
    assert plan_of(SHAPES[target], None, tmp_path).best_gain is None


def test_what_is_written(tmp_path: Path) -> None:
    told: list[str] = []
    plan = plan_pair("tiny", "tiny", tmp_path / "new" / "pair", acceptance=0.6, seed=3)
    written = write_pair(plan, on_written=lambda one: told.append(one.path.name))
    assert told == ["drafter", "target"]
    assert entries(plan.out) == ["drafter", "target"]
    for one in written:
        assert entries(one.path) == FILES
        weights = one.path / "model.safetensors"
        assert one.nbytes < weights.stat().st_size < one.nbytes + 10_000
        assert weights.stat().st_mode & 0o777 == 0o644
    assert sum(one.nbytes for one in written) == plan.weight_bytes < plan.nbytes
    generation = json.loads((plan.out / "target" / "generation_config.json").read_text())
    assert (generation["do_sample"], generation["temperature"]) == (False, 0)
    about = json.loads((plan.out / "drafter" / "synth.json").read_text())
    assert about["acceptance"] == plan.agreeing / plan.cycle_length == 0.6
    assert (about["shape"], about["drafts_for"], about["seed"]) == ("tiny", "tiny", 3)


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_pair(plan_pair("tiny", "tiny", tmp_path / name, seed=seed))
    for model in ("target", "drafter"):
        for file in FILES:
            first, again, other = (
                (tmp_path / name / model / file).read_bytes() for name in ("a", "b", "c")
            )
            assert first == again
            assert (first == other) == (
                file not in ("model.safetensors", "next_ids.npy", "synth.json")
            )


def test_large_models_come_in_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_pair(plan_of(TINY, None, tmp_path / "whole"))
    monkeypatch.setattr(pair, "_SHARD_BYTES", 600_000)
    write_pair(plan_of(TINY, None, tmp_path / "shards"))
    whole, directory = tmp_path / "whole" / "target", tmp_path / "shards" / "target"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert files == [name for name in entries(directory) if name.endswith(".safetensors")]
    tensors = load_file(whole / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(load_file(directory / index["weight_map"][name])[name], tensor)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert len(check_weights(directory, read_hf_config(directory))) == 3


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_a_run_that_fails_leaves_what_was_there(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_pair(plan_pair("tiny", "tiny", tmp_path, seed=1))
    before = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()}
    make = SyntheticWeights.make

    def failing(self: SyntheticWeights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        # The drafter is complete by then, the target is not.
        if name == "model.layers.1.mlp.up_proj.weight" and "target" in self._seed:
            raise error
        return make(self, name, shape)

    monkeypatch.setattr(SyntheticWeights, "make", failing)
    with pytest.raises(type(error)):
        write_pair(plan_pair("tiny", "tiny", tmp_path, seed=2, force=True))
    assert {
        file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()
    } == before


def test_two_do_not_write_to_one_place(tmp_path: Path) -> None:
    plan = plan_pair("tiny", "tiny", tmp_path / "out")
    plan.out.mkdir()
    handle = os.open(plan.out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match=r"another process is writing models to .*hint: "):
        write_pair(plan)
    assert entries(plan.out) == []
    os.close(handle)
    assert len(write_pair(plan)) == 2


def test_a_full_disk_is_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(pair, "save_file", full)
    with pytest.raises(OSError, match=r"safetensors` could not be written: .*No space left"):
        write_pair(plan_pair("tiny", "tiny", tmp_path / "out"))
    assert entries(tmp_path / "out") == []


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".target.partial").mkdir()
    (tmp_path / ".target.partial" / "config.json").touch()
    write_pair(plan_pair("tiny", None, tmp_path))
    assert entries(tmp_path) == ["target"]
    assert entries(tmp_path / "target") == FILES


def test_the_map_is_that_of_the_pair_whatever_the_shapes(tmp_path: Path) -> None:
    """A target has the same map with and without a drafter of as many rows."""
    write_pair(plan_pair("tiny", "tiny", tmp_path / "pair"))
    write_pair(plan_pair("tiny", None, tmp_path / "alone"))
    maps = [np.load(tmp_path / name / "target" / "next_ids.npy") for name in ("pair", "alone")]
    assert (maps[0] == maps[1]).all()
