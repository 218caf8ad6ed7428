#!/usr/bin/env python3
"""Write docs/arguments.md from the argument classes, so that names and defaults cannot go stale.

A test fails when the file is not what this script would write. Must not import torch.

    python scripts/arguments_doc.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints

from paceline.check.arguments import argument_faults
from paceline.engine_args import NO_EFFECT, EngineArgs
from paceline.no_effect import NoEffect
from paceline.sampling_params import NO_EFFECT as SAMPLING_NO_EFFECT
from paceline.sampling_params import SamplingParams
from paceline.server.settings import NO_EFFECT as SERVER_NO_EFFECT
from paceline.server.settings import ServerSettings

TARGET = Path(__file__).resolve().parents[1] / "docs" / "arguments.md"

# Fields of SamplingParams say in code what they are; here is what they do, and their range.
SAMPLING_MEANINGS = {
    "n": "outputs of the prompt, each with its own noise; above 1 needs a temperature",
    "temperature": "0 is greedy; 1 is the model's own distribution",
    "top_p": "keep the most probable tokens that make up this share; above 0, at most 1",
    "top_k": "keep this many of the most probable tokens; 0 or -1 keeps all",
    "min_p": "drop tokens below this share of the best token's probability; 0 to 1",
    "presence_penalty": "subtracted from the logits of tokens that occurred in the output; -2 to 2",
    "frequency_penalty": "subtracted once for each time a token occurred in the output; -2 to 2",
    "repetition_penalty": "above 1 makes tokens of prompt and output less likely; above 0",
    "seed": "64 bits; None or -1 derives one from the engine's seed and the request's number",
    "stop": "a text or a list of texts that end the output",
    "stop_token_ids": "ids that end the output, beside the model's own",
    "include_stop_str_in_output": "keep the stop text, or the text of the stop id, in the output",
    "ignore_eos": "go on after the model's own stop ids",
    "max_tokens": "longest output; None is up to the model length",
    "min_tokens": "no stop id and no stop string ends the output before this many tokens",
    "logprobs": "report the chosen token and this many of the most probable at each position",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "structured_outputs": "the form the output must have, a `StructuredOutputsParams` or a dict; "
    "see [structured.md](structured.md)",
    "logit_bias": "token id to a number added to its logit, -100 to 100",
    "skip_special_tokens": "leave special tokens out of the text",
}

INTRO = """\
# Arguments

<!-- Written by scripts/arguments_doc.py; edit the help texts in the code, then run it. -->

Names and meanings are vLLM's where it has them. On the command line every engine argument and every
sampling parameter is a flag: `max_num_seqs` is `--max-num-seqs`, and a flag that is on by default
is turned off with `--no-`, as in `--no-enable-prefix-caching`. `--kv-cache-memory-bytes` takes
`4GiB` or `512MB` too, `--max-model-len` and `--max-num-batched-tokens` take `1k` (1000) or `1K`
(1024), `--max-model-len auto` is the default, `--allowed-origins` takes vLLM's JSON list, `["*"]`,
too, `--stop` may be given several times,
`--stop-token-ids` takes `5,6`, and `--logit-bias` takes JSON. `-tp` is `--tensor-parallel-size`.
Names may be written with underscores, `--max_num_seqs 8`, and an object key by key:
`--speculative-config.method ngram --speculative-config.num_speculative_tokens 5`.

## Engine arguments

Keywords of `LLM(...)`, flags of `paceline generate`, `serve`, `check` and `bench`. A default of
None means that the value is worked out from the model and the machine; what every argument resolved
to is logged at start by `LLM`, `paceline serve` and `paceline generate --verbose`, and shown by
`paceline check`.
"""

AFTER_ENGINE = """\
`LLM` itself takes two more: `policy`, a `DraftLengthPolicy` of your own, and `disable_log_stats`,
which silences the log line every few seconds.

### `speculative_config`

vLLM's form of the speculative arguments is taken too, as a dictionary or as JSON on the command
line. Its keys: `method` (`"draft_model"` or `"ngram"`), `model`, `num_speculative_tokens`,
`prompt_lookup_max`, `prompt_lookup_min`, `max_model_len`, `disable_by_batch_size`, and
`draft_tensor_parallel_size` (only 1).

```python
lookup = {"method": "ngram", "num_speculative_tokens": 5}
llm = LLM("Qwen/Qwen2.5-1.5B-Instruct", speculative_config=lookup)
```

## Sampling parameters

Keywords of `SamplingParams(...)`, flags of `paceline generate` and `bench`, keys of the JSON lines
that both read. Checked at construction. Two differ on the command line: the seed of the requests is
`--sampling-seed`, since `--seed` is the engine's, and `max_tokens` is 256 unless the model's
generation configuration says otherwise.
"""

AFTER_SAMPLING = """\
`LLM.generate(prompts)` without sampling parameters takes the defaults of the model's
`generation_config.json`, where it has one.

## Flags of the server

Flags of `paceline serve` beside the engine arguments, and keys of its configuration file. Every
flag is here; what they do together is in [server.md](server.md). Where "list" is the type, several
values follow the flag.
"""

AFTER_SERVER = """\
`paceline serve` has three more: `--config FILE` reads flags from a file, `--dry-run` is `paceline
check`, with `--json` as one JSON object.

## vLLM's arguments that change nothing here

Accepted with these values, so that a program need not be edited. Any other value is an error that
says why. Engine arguments:
"""

AFTER_ENGINE_NO_EFFECT = """\
Flags of `paceline serve`:
"""

AFTER_NO_EFFECT = """\
Sampling parameters:
"""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def type_name(kind: Any) -> str:
    """``int | None`` as written in the class, readable in a table cell."""
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return f"`{text}`".replace(" | ", " or ").replace("or None`", "or None`")


def default_of(f: Field[Any]) -> str:
    """The default, or that there is none."""
    return "required" if f.default is MISSING else f"`{f.default!r}`"


def engine_rows() -> Iterable[tuple[str, ...]]:
    """Name, type, default and meaning of every engine argument."""
    hints = get_type_hints(EngineArgs)
    for f in fields(EngineArgs):
        meaning = f.metadata["help"] + choices_of(f.name, f.metadata.get("choices", ()))
        yield f"`{f.name}`", type_name(hints[f.name]), default_of(f), meaning


def choices_of(name: str, choices: Sequence[str]) -> str:
    """The values an argument may have, and those that this version still refuses."""
    refused = [c for c in choices if argument_faults(EngineArgs(model="-", **{name: c}))]
    text = ""
    for lead, values in (
        ("; one of", [c for c in choices if c not in refused]),
        ("; not in this version:", refused),
    ):
        if values:
            text += f"{lead} " + ", ".join(f"`{value}`" for value in values)
    return text


def sampling_rows() -> Iterable[tuple[str, ...]]:
    """Name, type, default and meaning of every sampling parameter."""
    hints = get_type_hints(SamplingParams)
    for f in fields(SamplingParams):
        yield f"`{f.name}`", type_name(hints[f.name]), default_of(f), SAMPLING_MEANINGS[f.name]


def server_rows() -> Iterable[tuple[str, ...]]:
    """Flag, type, default and meaning of every setting of the server."""
    hints = get_type_hints(ServerSettings)
    for f in fields(ServerSettings):
        kind = "list" if f.default == () else type_name(hints[f.name]).replace(" or None", "")
        default = "none" if f.default in ((), "", None) else default_of(f)
        if f.default is False:
            kind, default = "switch", "off"
        choices = ", ".join(f"`{choice}`" for choice in f.metadata["choices"])
        meaning = f.metadata["help"] + (f"; one of {choices}" if choices else "")
        yield f"`{_flag(f.name)}`", kind, default, meaning


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def no_effect_rows(table: Mapping[str, NoEffect]) -> Iterable[tuple[str, ...]]:
    """Name, accepted values and what holds otherwise of vLLM's arguments without effect."""
    for name, entry in table.items():
        if name == "disable_log_stats":  # has an effect in ``LLM``
            continue
        if entry.accepted is None:
            yield f"`{name}`", "any", ""
            continue
        values = ", ".join(f"`{value!r}`" for value in entry.accepted)
        yield f"`{name}`", values, entry.why + (f"; {entry.hint}" if entry.hint else "")


def render() -> str:
    """The whole document."""
    head = ("argument", "type", "default", "meaning")
    parts = [
        INTRO,
        table(head, engine_rows()),
        AFTER_ENGINE,
        table(("parameter", *head[1:]), sampling_rows()),
        AFTER_SAMPLING,
        table(("flag", *head[1:]), server_rows()),
        AFTER_SERVER,
        table(("argument", "accepted", "why nothing else"), no_effect_rows(NO_EFFECT)),
        AFTER_ENGINE_NO_EFFECT,
        table(
            ("flag", "accepted", "why nothing else"),
            no_effect_rows({_flag(name): entry for name, entry in SERVER_NO_EFFECT.items()}),
        ),
        AFTER_NO_EFFECT,
        table(("parameter", "accepted", "why nothing else"), no_effect_rows(SAMPLING_NO_EFFECT)),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
