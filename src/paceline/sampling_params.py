"""How one request is sampled; names, defaults and meanings are vLLM's.

Standard library only: this file must not know tensors, tokenizers or the engine. What depends on a
model (token ids beyond the vocabulary, ``max_tokens`` beyond the context) is checked at admission.

    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256, stop=["\\n\\n"])
"""

from __future__ import annotations

import copy
import json
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.no_effect import NoEffect, checked_names

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
MAX_N = 16384
# Stops cost time at every token, which everybody waits for.
MAX_STOPS = 128
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_IDS = 4096
_MAX_INTEGER = 2**63 - 1  # what arrays and messages between processes can hold
_NO_BEAMS = "there is no beam search"
_SAMPLE = "use `n` with a `temperature` above 0"
_BIAS = "use `logit_bias` or `structured_outputs`"

# vLLM's parameters that change nothing here, at these values.
NO_EFFECT: dict[str, NoEffect] = {
    "allowed_token_ids": NoEffect((None,), "tokens cannot be limited to a list", _BIAS),
    "bad_words": NoEffect((None, []), "words cannot be forbidden", _BIAS),
    "best_of": NoEffect(
        (None, 1), "every output that is made is returned", "use `n` and choose among the outputs"
    ),
    "detokenize": NoEffect(
        (True,), "outputs have their text", "start the engine with `skip_tokenizer_init=True`"
    ),
    "early_stopping": NoEffect((False, None), _NO_BEAMS, _SAMPLE),
    "extra_args": NoEffect((None, {}), "nothing reads them"),
    "flat_logprobs": NoEffect((False,), "logprobs have one form"),
    "guided_decoding": NoEffect(
        (None,), "it has vLLM's newer name here", "use `structured_outputs`"
    ),
    "length_penalty": NoEffect((1.0,), _NO_BEAMS, _SAMPLE),
    "logits_processors": NoEffect((None, []), "custom logits processors are not supported", _BIAS),
    "logprob_token_ids": NoEffect((None,), "logprobs are those of the best tokens"),
    "output_kind": NoEffect((None,), "a call says how outputs come", "use `LLM.stream`"),
    "output_text_buffer_length": NoEffect((0,), "text is given out once it is certain"),
    "repetition_detection": NoEffect((None,), "nothing looks for it", "use `repetition_penalty`"),
    "skip_clone": NoEffect(None, ""),
    "skip_reading_prefix_cache": NoEffect(
        (None, False),
        "the prefix cache is the engine's",
        "start the engine with `enable_prefix_caching=False`",
    ),
    "spaces_between_special_tokens": NoEffect(
        (True,), "text is written as the model's tokenizer writes it"
    ),
    "thinking_token_budget": NoEffect((None,), "reasoning has no budget", "use `max_tokens`"),
    "truncate_prompt_tokens": NoEffect(
        (None,), "no prompt is cut", "shorten the prompt before you pass it"
    ),
    "use_beam_search": NoEffect((False,), _NO_BEAMS, _SAMPLE),
}
# The same of ``StructuredOutputsParams``.
_STRUCTURED_NO_EFFECT: dict[str, NoEffect] = {
    "disable_additional_properties": NoEffect(
        (False,), "a schema says itself what it allows", "set `additionalProperties` in it"
    ),
    "disable_fallback": NoEffect(None, ""),
    "structural_tag": NoEffect(
        (None,), "there are no structural tags", "use `grammar`; a server has `tools`"
    ),
    "whitespace_pattern": NoEffect(
        (None,), "whitespace is free or absent", "use `disable_any_whitespace`"
    ),
}
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


@checked_names("structured output parameter", _STRUCTURED_NO_EFFECT)
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


@checked_names("sampling parameter", NO_EFFECT)
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
        characters = sum(map(len, self.stop))
        if len(self.stop) > MAX_STOPS or characters > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"`stop` has {len(self.stop)} strings with {characters} characters, and "
                f"{MAX_STOPS} with {MAX_STOP_CHARACTERS} are allowed. hint: give fewer or shorter "
                "ones; each is searched for behind every token"
            )
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, str | bytes | dict) or not isinstance(ids, Iterable):
            raise RequestError(f"`stop_token_ids` must be a list of token ids, got {ids!r}")
        if len(ids) > MAX_STOP_IDS:
            raise RequestError(
                f"`stop_token_ids` has {len(ids)} ids, and {MAX_STOP_IDS} are allowed. hint: give "
                "fewer"
            )
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
            odd = next((key for key in given if not isinstance(key, str)), None)
            if odd is not None:
                raise RequestError(
                    f"`structured_outputs` has the key {odd!r}, which is no name. hint: its keys "
                    f"are {', '.join(_STRUCTURES)} and disable_any_whitespace"
                )
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
