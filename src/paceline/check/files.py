"""What the check reads of a model directory: configuration, weight headers, generation defaults.

Every reader adds its faults to a list and goes on, so that all of them are found at once. Must not
import torch or know the machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline import hub
from paceline.check.report import Fault
from paceline.config import ModelArch
from paceline.engine_args import NGRAM, EngineArgs
from paceline.errors import ConfigError, PacelineError, RequestError
from paceline.models.hf_config import read_hf_config
from paceline.models.weights import check_weights, count_parameters
from paceline.sampling_params import SamplingParams
from paceline.spec.vocab import Vocabulary, has_tokenizer, read_vocabulary

T = TypeVar("T")

# generation_config.json's name -> SamplingParams' name
_GENERATION_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class ModelFiles:
    """A model directory as far as it could be read."""

    name: str
    path: Path
    arch: ModelArch
    num_parameters: int


@dataclass(frozen=True)
class Sources:
    """Everything read; None where there is nothing to read or a fault says why not."""

    target: ModelFiles | None
    drafter: ModelFiles | None
    tokenizer_path: Path | None
    vocabulary: Vocabulary | None  # of the tokenizer in use
    drafter_vocabulary: Vocabulary | None
    default_sampling: dict[str, Any]
    generation_eos: tuple[int, ...]


def attempt(faults: list[Fault], function: Callable[..., T], *arguments: Any) -> T | None:
    """The function's result, or None and one more fault."""
    try:
        return function(*arguments)
    except PacelineError as error:
        fault = Fault.from_error(error)
        if fault not in faults:  # two readers may stumble over the same file
            faults.append(fault)
        return None


def read_sources(
    args: EngineArgs, scratch: Path, faults: list[Fault], warnings: list[str]
) -> Sources:
    """Read target, drafter and tokenizer; ``scratch`` takes stand-ins for what is on the hub."""
    path = attempt(faults, hub.fetch_metadata, args.model, scratch)
    target = None if path is None else _read_model(args.model, path, faults)
    drafter, drafter_vocabulary = None, None
    if args.speculative_model is not None and args.speculative_model != NGRAM:
        drafter_path = attempt(faults, hub.fetch_metadata, args.speculative_model, scratch)
        if drafter_path is not None:
            drafter = _read_model(args.speculative_model, drafter_path, faults)
            if has_tokenizer(drafter_path):
                drafter_vocabulary = attempt(faults, read_vocabulary, drafter_path)
    tokenizer_path = path
    if args.tokenizer is not None:
        tokenizer_path = attempt(faults, _tokenizer_directory, args.tokenizer)
    vocabulary = None
    # Without a tokenizer, its files still serve to compare a pair, where they are there.
    if tokenizer_path is not None and (
        not args.skip_tokenizer_init or has_tokenizer(tokenizer_path)
    ):
        vocabulary = attempt(faults, read_vocabulary, tokenizer_path)
    default_sampling: dict[str, Any] = {}
    eos: tuple[int, ...] = ()
    if path is not None:
        generation = attempt(faults, _read_generation, args.generation_config, path, warnings)
        if generation is not None:
            default_sampling, eos = generation
    return Sources(
        target,
        drafter,
        None if args.skip_tokenizer_init else tokenizer_path,
        vocabulary,
        drafter_vocabulary,
        default_sampling,
        eos,
    )


def _tokenizer_directory(name: str) -> Path:
    return hub.download(name, weights=False)


def _read_model(name: str, path: Path, faults: list[Fault]) -> ModelFiles | None:
    arch = attempt(faults, read_hf_config, path)
    if arch is None:
        return None
    attempt(faults, check_weights, path, arch)
    return ModelFiles(name, path, arch, count_parameters(arch))


def _read_generation(
    setting: str, model: Path, warnings: list[str]
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Sampling defaults by SamplingParams' names, and the stop ids of every file read.

    Stop ids belong to the model, so its own file gives them whatever ``generation_config`` says.

    Raises:
        ConfigError: an unreadable file, or one named by ``setting`` with values that SamplingParams
            refuses (in the model's own file they are ignored with a warning).
    """
    own = model / "generation_config.json"
    contents = _load_json(own) if own.is_file() else {}
    eos = _token_ids(contents.get("eos_token_id"), own)
    if setting == "vllm":
        return {}, eos
    if setting != "auto":
        given = Path(setting).expanduser()
        given = given / "generation_config.json" if given.is_dir() else given
        if not given.is_file():
            raise ConfigError(
                f"`generation_config={setting!r}`: there is no file `{given}`. hint: give a "
                "directory with a generation_config.json, 'auto' or 'vllm'"
            )
        contents = _load_json(given)
        eos = (*eos, *_token_ids(contents.get("eos_token_id"), given))
        own = given
    defaults = {
        ours: contents[theirs]
        for theirs, ours in _GENERATION_NAMES.items()
        if contents.get(theirs) is not None
    }
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        if setting != "auto":
            raise ConfigError(f"`{own}` has an unusable sampling default: {error}") from error
        warnings.append(f"the sampling defaults in `{own}` are ignored: {error}")
        return {}, eos
    return defaults, eos


def _load_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}. hint: download it again") from error
    if not isinstance(contents, dict):
        raise ConfigError(f"`{path}` does not hold a JSON object. hint: download it again")
    return contents


def _token_ids(value: object, path: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ConfigError(
            f"`eos_token_id` in `{path}` must be an integer or a list of them, got {value!r}. "
            "hint: correct the file"
        )
    return tuple(ids)
