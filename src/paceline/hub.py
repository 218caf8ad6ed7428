"""Where model files come from: a local directory as it is, the package, else the hub.

Only what an engine reads is fetched: JSON, safetensors, tokenizer and template files of the
repository's top level; never pickled weights, never code. ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``,
``HF_HOME`` and ``HF_TOKEN`` act as they do in ``huggingface_hub``, which is imported only for hub
ids. This file must not know what the files mean.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

_METADATA = ["*.json", "*.jinja", "tokenizer.model", "merges.txt"]
_ALL = [*_METADATA, "*.safetensors"]
# Subdirectories hold other formats (onnx/, original/); a consolidated file is a second copy.
_IGNORED = ["*/*", "consolidated*.safetensors"]
# Models that ship inside the package, wherever a model is taken.
_SHIPPED = {"paceline/demo": "demo", "paceline/demo-draft": "demo-draft"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WAYS_OUT = (
    "give a local directory, set HF_ENDPOINT to a mirror you can reach, or download the model "
    "beforehand and set HF_HUB_OFFLINE=1"
)
_NO_GGUF = (
    "give the model that it was made from: a directory or hub id with config.json and "
    "*.safetensors files in float32, bfloat16 or float16"
)
_NO_DOWNLOAD = "`paceline/demo` and its drafter `paceline/demo-draft` need no download"


def is_shipped(name: str) -> bool:
    """Whether ``name`` is a model in the package, and no directory of that name hides it."""
    return name in _SHIPPED and not Path(name).is_dir()


def local_directory(name: str) -> Path | None:
    """The directory that ``name`` is, or None if it is a hub id.

    Raises:
        ConfigError: a file, a path where nothing lies, or neither a path nor a hub id.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        raise ConfigError(f"`{name}` is a GGUF file, and GGUF is not supported. hint: {_NO_GGUF}")
    if is_shipped(name):
        return Path(__file__).parent / "assets" / _SHIPPED[name]
    if path.exists():
        raise ConfigError(
            f"`{name}` is a file, not a model directory. hint: give the directory that holds "
            "config.json and the *.safetensors files"
        )
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    if looks_like_path or not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"there is no directory `{name}` (looked in {Path.cwd()}), and it is not a hub id "
            f"either. hint: hub ids look like `Qwen/Qwen2.5-0.5B-Instruct`; {_NO_DOWNLOAD}"
        )
    return None


def download(name: str, *, weights: bool = True) -> Path:
    """The directory of ``name`` with everything an engine needs, downloaded if it is a hub id.

    weights: False leaves out the safetensors files.

    Raises:
        ConfigError: not found, gated, offline without a cached copy, or no network.
    """
    local = local_directory(name)
    if local is not None:
        return local
    return _snapshot(name, _ALL if weights else _METADATA)


def fetch_metadata(name: str, scratch: Path) -> Path:
    """A directory that looks like ``name`` to everything that reads only headers.

    A local directory and a complete cached snapshot are returned as they are. Otherwise the small
    files are downloaded and each safetensors file is stood in for by a sparse file of its true
    length with the true header, under ``scratch``, which the caller owns and removes.

    Raises:
        ConfigError: as ``download``.
    """
    local = local_directory(name)
    if local is not None:
        return local
    snapshot = _snapshot(name, _METADATA)
    try:
        complete = _snapshot(name, _ALL, cached_only=True)
        if any(complete.glob("*.safetensors")):
            return complete
    except ConfigError:
        pass  # the weights are not cached, so only their headers are fetched
    directory = scratch / name.replace("/", "--")
    directory.mkdir(parents=True, exist_ok=True)
    for file in snapshot.iterdir():
        target = directory / file.name
        if file.is_file() and not target.exists():
            target.symlink_to(file.resolve())
    _write_header_files(name, directory)
    return directory


def _write_header_files(name: str, directory: Path) -> None:
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        metadata = _api().get_safetensors_metadata(name)
    except NotASafetensorsRepoError:
        # Whoever checks the directory can tell by the names what is there instead.
        for file in _api().list_repo_files(name):
            if file.endswith((".bin", ".pt", ".pth", ".gguf")) and "/" not in file:
                (directory / file).touch()
        return
    except Exception as error:
        raise _explain(name, error) from error
    for filename, file in metadata.files_metadata.items():
        if Path(filename).name != filename:
            raise ConfigError(f"`{name}` lists a weight file outside its directory: `{filename}`")
        header: dict[str, Any] = {"__metadata__": file.metadata} if file.metadata else {}
        for tensor, info in file.tensors.items():
            header[tensor] = {
                "dtype": info.dtype,
                "shape": info.shape,
                "data_offsets": list(info.data_offsets),
            }
        data = json.dumps(header).encode()
        size = max((info.data_offsets[1] for info in file.tensors.values()), default=0)
        with open(directory / filename, "wb") as out:
            out.write(struct.pack("<Q", len(data)) + data)
            out.truncate(8 + len(data) + size)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="paceline")


def _snapshot(name: str, patterns: list[str], *, cached_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                local_files_only=cached_only,
                endpoint=os.environ.get("HF_ENDPOINT"),
                library_name="paceline",
            )
        )
    except Exception as error:
        raise _explain(name, error) from error


def _explain(name: str, error: Exception) -> ConfigError:
    """The one message for what went wrong while ``name`` was fetched."""
    from huggingface_hub import constants, errors

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"`{name}` is gated at {endpoint}. hint: accept its licence on the model page and set "
            "HF_TOKEN to a token that may read it, or give a local directory"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"`{name}` is neither a local directory nor a model that {endpoint} shows to you. "
            f"hint: {_spelling(name)}; for a private model set HF_TOKEN; {_NO_DOWNLOAD}"
        )
    if constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(
            f"`{name}` is not a local directory, HF_HUB_OFFLINE is set, and the cache "
            f"({constants.HF_HUB_CACHE}) does not hold all of it. hint: give a local directory, or "
            f"unset HF_HUB_OFFLINE once to download it; {_NO_DOWNLOAD}"
        )
    if isinstance(error, OSError) and error.errno is not None and not _is_network(error):
        return ConfigError(
            f"`{name}` could not be stored in {constants.HF_HUB_CACHE}: {error.strerror}. "
            "hint: free space there or set HF_HOME to another disk"
        )
    cause = str(error).removeprefix("Got: ").partition("\n")[0] or type(error).__name__
    return ConfigError(
        f"`{name}` is no directory in {Path.cwd()}, and could not be fetched from {endpoint}: "
        f"{cause}. hint: {_WAYS_OUT}; {_NO_DOWNLOAD}"
    )


def _spelling(name: str) -> str:
    close = difflib.get_close_matches(name, _SHIPPED, n=1, cutoff=0.8)
    return f"did you mean `{close[0]}`?" if close else "check the spelling"


def _is_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError)
