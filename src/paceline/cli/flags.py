"""Flags made from ``EngineArgs`` and ``SamplingParams``: one a field, in kebab-case.

Flags that were not given do not appear in the results, so defaults live in one place. Must not
import torch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from paceline.cli.parser import JSON
from paceline.engine_args import NO_EFFECT, EngineArgs
from paceline.no_effect import NoEffect
from paceline.sampling_params import SamplingParams

_MOST_DIGITS = 100  # more than any argument can use, and fewer than ``int`` refuses
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

# vLLM's short names of arguments that have no effect.
_SHORT = {
    "tensor_parallel_size": ("-tp", "--tp"),
    "pipeline_parallel_size": ("-pp", "--pp"),
    "data_parallel_size": ("-dp", "--dp"),
    "api_server_count": ("-asc",),
}

_SAMPLING_HELP = {
    "n": "outputs of each prompt",
    "temperature": "0 is greedy",
    "top_p": "keep the most probable tokens that make up this share",
    "top_k": "keep this many of the most probable tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the best token's probability",
    "presence_penalty": "subtracted from logits of tokens that occurred in the output",
    "frequency_penalty": "subtracted once for each time a token occurred in the output",
    "repetition_penalty": "above 1 makes tokens of prompt and output less likely",
    "seed": "seed of each request (default: derived from --seed)",
    "stop": "end before this text; may be given several times",
    "stop_token_ids": "end at one of these token ids, such as 5,6",
    "include_stop_str_in_output": "keep the stop text in the output",
    "ignore_eos": "go on after the model's end of text",
    "max_tokens": "longest output (default: the model's generation_config, else 256)",
    "min_tokens": "do not end before this many tokens",
    "logprobs": "report log-probabilities of this many tokens at each position",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "logit_bias": 'JSON object of token id to bias, such as {"5": -100}',
    "skip_special_tokens": "leave special tokens out of the text",
    "structured_outputs": 'what the text must look like, such as {"regex": "[0-9]+"}; also json, '
    "choice, grammar, json_object",
}
_SAMPLING_DEFAULTS = {"seed": None, "max_tokens": None}  # not SamplingParams' own here


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every engine argument, and hidden ones for vLLM's that have no effect."""
    group = parser.add_argument_group("engine arguments")
    hints = get_type_hints(EngineArgs)
    for f in fields(EngineArgs):
        options = _engine_options(f.name, hints[f.name])
        options["help"] = _help_text(f)
        if f.metadata.get("choices"):  # shown only: the check says more about a wrong one
            options["metavar"] = "{" + ",".join(f.metadata["choices"]) + "}"
        group.add_argument(_flag(f.name), **options)
    group.add_argument(
        "--speculative-config",
        dest="engine.speculative_config",
        default=argparse.SUPPRESS,
        metavar=JSON,
        help="vLLM's form of the speculative arguments",
    )
    add_no_effect_flags(parser, NO_EFFECT, "engine")


def add_no_effect_flags(
    parser: argparse.ArgumentParser, table: Mapping[str, NoEffect], group: str
) -> None:
    """Hidden flags for vLLM's names that change nothing here; ``group`` as for ``given``."""
    for name, entry in table.items():
        is_flag = any(isinstance(one, bool) for one in entry.accepted or ())
        is_flag = is_flag or (entry.accepted is None and name.startswith(("disable_", "use_")))
        options = _options(bool if is_flag else _literal, f"{group}.{name}")
        names = (_flag(name), *_SHORT.get(name, ()))
        parser.add_argument(*names, **options, help=argparse.SUPPRESS)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every sampling parameter; the request's seed is ``--sampling-seed``."""
    group = parser.add_argument_group(
        "sampling parameters", "what the model's generation_config.json says comes before defaults"
    )
    hints = get_type_hints(SamplingParams)
    for f in fields(SamplingParams):
        options = _options(hints[f.name], f"sampling.{f.name}")
        default = _SAMPLING_DEFAULTS.get(f.name, f.default)
        options["help"] = _SAMPLING_HELP[f.name] + _default_text(default)
        if f.name == "stop":
            options["action"] = "append"
        elif f.name == "stop_token_ids":
            options["type"] = _id_list
            options["metavar"] = "IDS"
        elif f.name in ("logit_bias", "structured_outputs"):
            options["type"] = _json_object
            options["metavar"] = JSON
        flag = "--sampling-seed" if f.name == "seed" else _flag(f.name)
        group.add_argument(flag, **options)


def engine_assignment(text: str) -> tuple[str, Any]:
    """``name=value`` as an engine argument and its value, read as the argument's flag reads it.

    Arguments whose flag takes no value take true and false; none stands for the default. A name
    that is no engine argument passes, as ``EngineArgs.from_kwargs`` says more about it.
    """
    name, equals, value = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    kind = get_type_hints(EngineArgs).get(name)
    if kind is None:
        return name, _literal(value)
    if value.lower() == "none":
        return name, None
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{name} must be true or false, got {value!r}")
        return name, value.lower() == "true"
    convert = _engine_options(name, kind).get("type", str)
    try:
        return name, convert(value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None


def whole_number(text: str) -> int:
    """An int in plain digits; ``int`` itself also takes "1_000" and digits of other scripts."""
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 5")
    if len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"a number of {len(text)} digits is too large")
    return int(text)


def positive_number(text: str) -> int:
    """A whole number from 1 on."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def text_list(text: str) -> list[str]:
    """One text, or several as a JSON list, as vLLM has them."""
    if not text.lstrip().startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of texts")
    return values


def decimal_number(text: str) -> float:
    """A float in plain digits, as ``whole_number``."""
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text.strip().lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5")
    return float(text)


def token_count(text: str) -> int:
    """A whole number of tokens, in vLLM's short forms too: 1k is 1000, 1K is 1024."""
    match = re.fullmatch(
        rf"([0-9]{{1,{_MOST_DIGITS}}}(?:\.[0-9]+)?)([kmgKMG])", text.strip(), re.ASCII
    )
    if match is None:
        return whole_number(text)
    unit = match[2] if match[2].islower() else match[2].lower() + "i"
    return round(float(match[1]) * _UNITS[unit])


def length_limit(text: str) -> int | None:
    """As ``token_count``; ``auto`` is what the model and the KV pool allow."""
    return None if text.strip() == "auto" else token_count(text)


def byte_count(text: str) -> int:
    """``4GiB``, ``512MB`` or plain bytes as an int."""
    match = re.fullmatch(
        rf"([0-9]{{1,{_MOST_DIGITS}}}(?:\.[0-9]+)?)\s*([kmg]i?)?b?", text.strip().lower(), re.ASCII
    )
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size such as 4GiB, 512MB or 1073741824"
        )
    if match[2] is None and "." in match[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes")
    return int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(match[1])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _engine_options(name: str, kind: Any) -> dict[str, Any]:
    """Keywords of ``add_argument`` for an engine argument."""
    options = _options(kind, f"engine.{name}")
    if name == "kv_cache_memory_bytes":
        options |= {"type": byte_count, "metavar": "BYTES"}
    elif name == "max_model_len":
        options["type"] = length_limit
    elif name == "max_num_batched_tokens":
        options["type"] = token_count
    return options


def _options(kind: Any, dest: str) -> dict[str, Any]:
    """Keywords of ``add_argument`` for a field of this type."""
    options: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS}
    if kind is bool:
        return {**options, "action": argparse.BooleanOptionalAction}
    if kind in (int, int | None):
        return {**options, "type": whole_number, "metavar": "N"}
    if kind is float:
        return {**options, "type": decimal_number, "metavar": "X"}
    if kind is _literal:
        return {**options, "type": _literal, "metavar": JSON}
    return {**options, "metavar": "TEXT"}


def _help_text(f: Field[Any]) -> str:
    text: str = f.metadata["help"]
    says_it = "(default" in text or f.default is MISSING
    return text.replace("%", "%%") + ("" if says_it else _default_text(f.default))


def _default_text(default: object) -> str:
    return "" if default is None or isinstance(default, bool) else f" (default: {default})"


def _literal(text: str) -> object:
    """A value of a no-effect argument: JSON where it is JSON, ``None``, else the text itself."""
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _id_list(text: str) -> list[int]:
    try:
        return [whole_number(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
