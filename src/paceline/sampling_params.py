"""How one request is sampled; names, defaults and meanings are vLLM's.

Standard library only: this file must not know tensors, tokenizers or the engine. What depends on a
model (token ids beyond the vocabulary, ``max_tokens`` beyond the context) is checked at admission.

    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256, stop=["\\n\\n"])
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
MAX_N = 16384
_MAX_INTEGER = 2**63 - 1  # what arrays and messages between processes can hold
# Known from vLLM, without a counterpart here: said so instead of a guess at a misspelling.
_ONLY_VLLM = (
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "detokenize",
    "early_stopping",
    "extra_args",
    "flat_logprobs",
    "guided_decoding",
    "length_penalty",
    "logits_processors",
    "output_kind",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "use_beam_search",
)
# The same of ``StructuredOutputsParams``.
_ONLY_VLLM_STRUCTURED = (
    "disable_additional_properties",
    "disable_fallback",
    "structural_tag",
    "whitespace_pattern",
)
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(slots=True)
class StructuredOutputsParams:
    """What the output must look like: exactly one of the first five, checked at construction.

    json: a JSON schema, as a dict or as text. regex: an expression that all of the text matches.
    choice: one of these texts. grammar: EBNF with a rule ``root``, or Lark with a rule ``start``.
    json_object: True asks for any JSON object. disable_any_whitespace: JSON comes on one line, with
    a space after each comma and colon and no other outside of strings. After construction ``json``
    is text.

    Raises:
        RequestError: none or several of the five, an unknown name or a wrong type. What is wrong
            inside a schema, expression or grammar is found when the engine compiles it.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __new__(cls, *args: object, **kwargs: object) -> StructuredOutputsParams:
        for name in kwargs:
            if name in _ONLY_VLLM_STRUCTURED:
                raise RequestError(
                    f"vLLM's structured output parameter `{name}` is not supported. hint: leave "
                    "it out"
                )
            if name not in cls.__match_args__:
                hint = _closest(name, cls.__match_args__)
                raise RequestError(f"unknown structured output parameter `{name}`. hint: {hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check and normalise every field.

        Raises:
            RequestError: the first field found wrong.
        """
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"`{name}` must be True or False, got {value!r}")
        if not self.json_object:
            self.json_object = None
        given = [name for name in _STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured outputs need exactly one of {', '.join(_STRUCTURES)}, got "
                f"{' and '.join(given) or 'none'}. hint: give one of them"
            )
        if self.json is not None:
            self.json = _schema_text(self.json)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"`{name}` must be a string, got {type(value).__name__}")
        if self.choice is not None:
            self.choice = _choice(self.choice)
        if self.disable_any_whitespace and self.json is None and self.json_object is None:
            raise RequestError(
                "`disable_any_whitespace` concerns JSON only. hint: use it with `json` or "
                "`json_object`"
            )

    @property
    def kind(self) -> str:
        """Which of the five was given."""
        return next(name for name in _STRUCTURES if getattr(self, name) is not None)


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of a request, checked at construction.

    After construction ``stop`` and ``stop_token_ids`` are lists, ``logit_bias`` is None or a
    non-empty dict from int to float. A field assigned later is checked by calling ``validate()``,
    which admission does.

    temperature: 0 is greedy. top_k: 0 or -1 keeps all tokens (-1 is normalised to 0). top_p, min_p:
    1 and 0 keep all. seed: None and -1 let the engine derive one. max_tokens: None is "up to the
    model length". logprobs, prompt_logprobs: how many of the most probable tokens to report beside
    the chosen one. logit_bias: added to the logits of these ids, -100 to 100. structured_outputs:
    what the text must look like; a dict of its fields will do.

    Raises:
        RequestError: an unknown name, a wrong type or a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __new__(cls, *args: object, **kwargs: object) -> SamplingParams:
        # The generated __init__ would answer a misspelt name with a bare TypeError.
        for name in kwargs:
            if name in _ONLY_VLLM:
                raise RequestError(
                    f"vLLM's sampling parameter `{name}` is not supported. hint: leave it out"
                )
            if name not in cls.__match_args__:
                hint = _closest(name, cls.__match_args__)
                raise RequestError(f"unknown sampling parameter `{name}`. hint: {hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.validate()

    def clone(self) -> SamplingParams:
        """An independent copy."""
        return copy.deepcopy(self)

    def validate(self) -> None:
        """Check and normalise every field.

        Raises:
            RequestError: the first field found wrong.
        """
        self._validate_numbers()
        self._validate_limits()
        self.stop = _strings("stop", self.stop)
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, str | bytes | dict) or not isinstance(ids, Iterable):
            raise RequestError(f"`stop_token_ids` must be a list of token ids, got {ids!r}")
        self.stop_token_ids = [_integer("stop_token_ids", token_id, 0) for token_id in ids]
        self.logit_bias = _bias(self.logit_bias)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"`{name}` must be True or False, got {getattr(self, name)!r}")
        self._validate_structured()

    def _validate_structured(self) -> None:
        given: object = self.structured_outputs
        if given is None:
            return
        if isinstance(given, dict):
            self.structured_outputs = StructuredOutputsParams(**given)
        elif isinstance(given, StructuredOutputsParams):
            given.validate()
        else:
            raise RequestError(
                "`structured_outputs` must be a StructuredOutputsParams, got "
                f"{type(given).__name__}"
            )
        if self.ignore_eos:
            raise RequestError(
                "`ignore_eos` cannot be used with `structured_outputs`: only an end-of-text token "
                "may follow what is complete. hint: leave out `ignore_eos`"
            )

    def _validate_numbers(self) -> None:
        self.temperature = _number("temperature", self.temperature, 0.0)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError(
                "`top_p` must be above 0 and at most 1, got 0.0. hint: for greedy use "
                "`temperature=0`"
            )
        self.top_k = _integer("top_k", self.top_k, -1)
        if self.top_k == -1:
            self.top_k = 0
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, 0.0)
        if self.repetition_penalty == 0.0:
            raise RequestError("`repetition_penalty` must be above 0, got 0.0. hint: 1.0 is off")
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
            if self.seed == -1:
                self.seed = None

    def _validate_limits(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_N)
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"`n` must be 1 with greedy sampling, got n={self.n} at temperature "
                f"{self.temperature}: all outputs would be the same. hint: raise `temperature`"
            )
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"`min_tokens` ({self.min_tokens}) is above `max_tokens` ({self.max_tokens})"
                )
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _integer("prompt_logprobs", self.prompt_logprobs, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` in its normalised type."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def needs_penalties(self) -> bool:
        """Whether logits depend on how often tokens occurred before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _closest(name: str, known: tuple[str, ...]) -> str:
    """A hint for a name that is not known."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else f"known are: {', '.join(known)}"


def _choice(value: object) -> list[str]:
    if isinstance(value, str):
        raise RequestError("`choice` must be a list of strings, got one string")
    texts = _strings("choice", value)
    if not texts:
        raise RequestError("`choice` is empty. hint: give the texts to choose from")
    return texts


def _schema_text(value: object) -> str:
    """A JSON schema as text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        hint = "pass `Model.model_json_schema()`" if isinstance(value, type) else "pass a dict"
        raise RequestError(
            f"`json` must be a JSON schema, as a dict or as text, got {type(value).__name__}. "
            f"hint: {hint}"
        )
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from error


def _number(name: str, value: object, low: float, high: float = math.inf) -> float:
    """``value`` as a finite float in [low, high]; numpy scalars pass, bool and str do not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"`{name}` must be a number, got {value!r} ({type(value).__name__})")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or not low <= result <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise RequestError(f"`{name}` must be finite and {limits}, got {_shown(value)}")
    return result


def _integer(name: str, value: object, low: int, high: int = _MAX_INTEGER) -> int:
    """``value`` as an int in [low, high]; numpy integers pass, bool, float and str do not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"`{name}` must be an integer, got {value!r} ({type(value).__name__})")
    result = int(value)
    if not low <= result <= high:
        open_end = high == _MAX_INTEGER and result < low
        limits = f"at least {low}" if open_end else f"between {low} and {high}"
        raise RequestError(f"`{name}` must be {limits}, got {_shown(result)}")
    return result


def _shown(value: object) -> str:
    """A value as text; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _strings(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if isinstance(value, bytes | dict) or not isinstance(value, Iterable):
        raise RequestError(f"`{name}` must be a string or a list of strings, got {value!r}")
    result: list[str] = []
    for item in value:
        if not isinstance(item, str):
            raise RequestError(f"`{name}` must hold strings, got {item!r} ({type(item).__name__})")
        if not item:
            raise RequestError(
                f"`{name}` holds an empty string, which would match at once. hint: leave it out"
            )
        result.append(item)
    return result


def _bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"`logit_bias` must map token ids to numbers, got {value!r}")
    result: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has only string keys, so OpenAI clients send {"123": -100}.
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = _integer("logit_bias", int(key) if is_text else key, 0)
        result[token_id] = _number("logit_bias", bias, -100.0, 100.0)
    return result or None
