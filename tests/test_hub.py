"""Local directories as they are; hub ids through the environment's endpoint, on a local stub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_stub import HubStub, serve_hub
from model_dirs import (
    CONFIG,
    num_parameters,
    safetensors_bytes,
    tensor_shapes,
    write_json,
    write_model,
)
from paceline import hub
from paceline.check import run_checks
from paceline.engine_args import EngineArgs
from paceline.errors import ConfigError

MODEL = "team/tiny"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serve_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        directory = write_model(tmp_path / "repo")
        (directory / "pytorch_model.bin").write_bytes(b"pickle")
        (directory / "modeling.py").write_text("raise SystemExit")
        (directory / "consolidated.safetensors").write_bytes(b"copy")
        (directory / "onnx").mkdir()
        write_json(directory / "onnx" / "config.json", {})
        stub.repositories[MODEL] = directory
        yield stub


def test_local_directory_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path / "m")
    assert hub.download(str(directory)) == directory
    assert hub.fetch_metadata(str(directory), tmp_path / "scratch") == directory
    monkeypatch.chdir(tmp_path)
    assert hub.local_directory("m") == Path("m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.local_directory("~/m") == directory


@pytest.mark.parametrize("name", ["/no/such/place", "./x", "../x", "~/x", "a/b/c", "a b/c"])
def test_path_without_a_directory_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no directory .*hub ids look like .*`paceline/demo`"):
        hub.download(name)


def test_models_in_the_package_need_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.is_shipped("paceline/demo")
    assert (hub.download("paceline/demo") / "model.safetensors").is_file()
    (tmp_path / "paceline" / "demo").mkdir(parents=True)
    assert not hub.is_shipped("paceline/demo")
    assert hub.download("paceline/demo") == Path("paceline/demo")


def test_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        hub.download(str(file))


def test_download_takes_what_an_engine_reads_and_no_more(stub: HubStub) -> None:
    path = hub.download(MODEL)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    requests = len(stub.log)
    assert hub.download(MODEL) == path
    assert not any("resolve" in line for line in stub.log[requests:])  # all cached


def test_download_without_weights(stub: HubStub) -> None:
    path = hub.download(MODEL, weights=False)
    assert not (path / "model.safetensors").exists()
    assert (path / "tokenizer.json").exists()


def test_metadata_stands_in_for_weights(stub: HubStub, tmp_path: Path) -> None:
    large = {**CONFIG, "vocab_size": 20000}
    write_model(stub.repositories[MODEL], vocab_size=20000)
    path = hub.fetch_metadata(MODEL, tmp_path / "scratch")
    stand_in = path / "model.safetensors"
    assert stand_in.stat().st_size > 4 * num_parameters(large)
    assert stub.bytes_sent["model.safetensors"] <= 100_001
    report = run_checks(EngineArgs(model=MODEL))
    assert report.faults == []
    assert report.to_json()["facts"]["target"]["num_parameters"] == num_parameters(large)


def test_metadata_of_shards(stub: HubStub, tmp_path: Path) -> None:
    directory = stub.repositories[MODEL]
    (directory / "model.safetensors").unlink()
    shapes = list(tensor_shapes(CONFIG).items())
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for file, part in zip(files, (shapes[:5], shapes[5:]), strict=True):
        (directory / file).write_bytes(safetensors_bytes(dict(part)))
        weight_map |= {name: file for name, _ in part}
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    path = hub.fetch_metadata(MODEL, tmp_path / "scratch")
    assert [f.name for f in sorted(path.glob("*.safetensors"))] == files
    assert run_checks(EngineArgs(model=MODEL)).faults == []


def test_cached_weights_are_checked_themselves(stub: HubStub, tmp_path: Path) -> None:
    cached = hub.download(MODEL)
    assert hub.fetch_metadata(MODEL, tmp_path / "scratch") == cached


def test_pickled_weights_on_the_hub_are_named(stub: HubStub) -> None:
    (stub.repositories[MODEL] / "model.safetensors").unlink()
    (fault,) = run_checks(EngineArgs(model=MODEL)).faults
    assert "pickled" in fault.cause
    assert "pytorch_model.bin" not in stub.bytes_sent


def test_resolve_downloads_after_the_checks(stub: HubStub) -> None:
    config = EngineArgs(model=MODEL).resolve()
    assert (Path(config.model.path) / "model.safetensors").stat().st_size > 4096
    assert (config.model.name, config.tokenizer.path) == (MODEL, config.model.path)
    with pytest.raises(ConfigError):
        EngineArgs(model=MODEL, max_model_len=10**6).resolve()


def test_a_weight_file_outside_the_directory_is_refused(stub: HubStub, tmp_path: Path) -> None:
    directory = stub.repositories[MODEL]
    (directory / "model.safetensors").rename(directory / "evil.safetensors")
    index = {"weight_map": {"x": "../evil.safetensors"}}
    write_json(directory / "model.safetensors.index.json", index)
    with pytest.raises(ConfigError, match=r"evil\.safetensors"):
        hub.fetch_metadata(MODEL, tmp_path / "scratch")
    assert not (tmp_path / "scratch" / "evil.safetensors").exists()


def test_unknown_gated_and_unreachable(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = "`paceline/demo` and its drafter `paceline/demo-draft` need no download"
    with pytest.raises(
        ConfigError, match=rf"neither a local directory nor .*{stub.url}.*{shipped}"
    ):
        hub.download("team/absent")
    with pytest.raises(ConfigError, match="did you mean `paceline/demo-draft`"):
        hub.download("paceline/demo-drafter")
    stub.gated.add(MODEL)
    with pytest.raises(ConfigError, match=r"is gated .*HF_TOKEN"):
        hub.download(MODEL)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=rf"127\.0\.0\.1:9.*set HF_ENDPOINT to a mirror.*{shipped}"
    ):
        hub.download(MODEL)


def test_offline_mode_uses_the_cache_and_says_so_without(stub: HubStub, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_ENDPOINT": stub.url,
    }
    cached = hub.download(MODEL)
    requests = len(stub.log)
    code = (
        "from paceline import hub\n"
        f"print(hub.download({MODEL!r}))\n"
        "try: hub.download('team/other')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    found, error = done.stdout.splitlines()
    assert found == str(cached)
    assert "HF_HUB_OFFLINE is set" in error
    assert "`paceline/demo`" in error
    assert str(tmp_path / "cache") in error
    assert len(stub.log) == requests
