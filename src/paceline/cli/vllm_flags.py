"""vLLM's flags that no command here has: what holds instead, and what to do.

Those of engine arguments that change nothing at one value are in ``engine_args``; those of the
server are here. Must not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.no_effect import NoEffect

_LEAVE = "leave it out"


class Absent(NamedTuple):
    """Why there is no such flag, in a clause, and the way out."""

    why: str
    hint: str = _LEAVE


_XGRAMMAR = "structured outputs have one backend, xgrammar"
_ONE_BACKEND = Absent(_XGRAMMAR)
_NO_LORA = Absent("LoRA adapters are not supported")
_NO_PLUGINS = Absent("parsers are part of Paceline")
_NO_TEXT_LOGGED = Absent("prompts and outputs are never logged")
_OWN_PROXY = "put a proxy before the server"

ABSENT: dict[str, Absent] = {
    "--allow-credentials": Absent("keys come in a header, not in cookies"),
    "--allowed-headers": Absent("origins in `--allowed-origins` may send any header"),
    "--allowed-methods": Absent("origins in `--allowed-origins` may use any method"),
    "--attention-backend": Absent("the fastest attention that fits is taken"),
    "--data-parallel-rank": Absent("the engine is one process"),
    "--default-chat-template-kwargs": Absent(
        "there are no defaults", "send `chat_template_kwargs` with each request"
    ),
    "--disable-frontend-multiprocessing": Absent("the engine always has a process of its own"),
    "--enable-force-include-usage": Absent(
        "a stream has its usage when asked", "send `stream_options` with `include_usage`"
    ),
    "--enable-log-deltas": _NO_TEXT_LOGGED,
    "--enable-log-outputs": _NO_TEXT_LOGGED,
    "--enable-reasoning": Absent(
        "naming a parser is enough", "use `--reasoning-parser` alone, with deepseek_r1 or qwen3"
    ),
    "--enable-request-id-headers": Absent("responses carry their id in the body"),
    "--enable-server-load-tracking": Absent("`/health` and `/metrics` tell the load"),
    "--enable-ssl-refresh": Absent("certificates are read once", "start the server again"),
    "--enable-tokenizer-info-endpoint": Absent("there is no such path", "use `/tokenize`"),
    "--exclude-tools-when-tool-choice-none": Absent("the model is never shown tools then"),
    "--guided-decoding-disable-additional-properties": _ONE_BACKEND,
    "--guided-decoding-disable-any-whitespace": Absent(
        "requests say it themselves", "send `disable_any_whitespace` in `structured_outputs`"
    ),
    "--guided-decoding-disable-fallback": _ONE_BACKEND,
    "--headless": Absent("the engine is one process"),
    "--log-config-file": Absent("there is one form of log lines"),
    "--lora-modules": _NO_LORA,
    "--max-cpu-loras": _NO_LORA,
    "--max-log-len": _NO_TEXT_LOGGED,
    "--max-lora-rank": _NO_LORA,
    "--max-loras": _NO_LORA,
    "--middleware": Absent("no code of others is run", _OWN_PROXY),
    "--prompt-adapters": Absent("prompt adapters are not supported"),
    "--reasoning-parser-plugin": _NO_PLUGINS,
    "--return-tokens-as-token-ids": Absent(
        "logprobs have tokens as text", "ask `/tokenize` for their ids"
    ),
    "--ssl-ca-certs": Absent("certificates of clients are not checked", _OWN_PROXY),
    "--ssl-cert-reqs": Absent("certificates of clients are not checked", _OWN_PROXY),
    "--tool-parser-plugin": _NO_PLUGINS,
    "--tool-server": Absent("tools run where the client is"),
    "--trust-request-chat-template": Absent(
        "templates are programs and never taken from requests", "use `--chat-template`"
    ),
    "--uds": Absent("the server listens on a port", "use `--host` and `--port`"),
    "--uvicorn-log-level": Absent(
        "what goes wrong is always logged", "for a line an HTTP request use `--access-log`"
    ),
}
# Flags of vLLM's server that change nothing at these values, by name.
SERVER_NO_EFFECT: dict[str, NoEffect] = {
    "api_server_count": NoEffect((1,), "there is one API process"),
    "chat_template_content_format": NoEffect(("auto",), "the chat template decides it"),
    "disable_uvicorn_access_log": NoEffect(
        (True, False), "HTTP requests are logged only with `--access-log`"
    ),
    "enable_prompt_tokens_details": NoEffect(
        (True, False), "`usage` always has the cached prompt tokens"
    ),
    "guided_decoding_backend": NoEffect(("auto", "xgrammar"), _XGRAMMAR),
    "response_role": NoEffect(("assistant",), "answers always have the role `assistant`"),
    "structured_outputs_config": NoEffect(
        ({}, {"backend": "auto"}, {"backend": "xgrammar"}), _XGRAMMAR
    ),
}
_OPTIMISATION = Absent("there are no optimisation levels; kernels and graphs have no settings")


def absent(flag: str) -> Absent | None:
    """What is to say of a flag of vLLM's that is not here, None for any other.

    ``-O3``, ``-O.mode=3`` and ``--no-`` before a name count as the flag.
    """
    if flag.startswith("-O") or flag == "--optimization-level":
        return _OPTIMISATION
    name = flag.partition(".")[0].removeprefix("--").removeprefix("no-")
    entry = SERVER_NO_EFFECT.get(name.replace("-", "_"))
    if entry is not None:  # of a command that is no server
        return Absent(entry.why)
    return ABSENT.get(flag) or ABSENT.get(f"--{name}")


# Flags that take a JSON object, whose keys vLLM also takes behind a dot.
_DOTTED = re.compile(
    r"--(speculative-config|structured-outputs-config)\.([\w.-]+)(=.*)?", re.DOTALL
)


def translated(argv: Sequence[str]) -> list[str]:
    """Arguments in the one form that our parsers know; vLLM takes flags in several.

    ``--max_num_seqs`` becomes ``--max-num-seqs``, and ``--speculative-config.method ngram`` with
    its like one JSON object. What follows ``--`` stays as it is.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words, plain = [_kebab(word) for word in argv[:end]], []
    objects: dict[str, dict[str, Any]] = {}
    place = 0
    while place < len(words):
        word, following = words[place], words[place + 1 : place + 2]
        dotted = _DOTTED.fullmatch(word)
        place += 1
        if dotted is None or (dotted[3] is None and not following):
            plain.append(word)
            continue
        if dotted[3] is None:
            place += 1
        value = following[0] if dotted[3] is None else dotted[3][1:]
        _put(objects.setdefault(dotted[1], {}), dotted[2].split("."), value)
    merged = [f"--{flag}={json.dumps(content)}" for flag, content in objects.items()]
    return [*merged, *plain, *argv[end:]]


def _kebab(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if re.match(r"--[a-z]", flag) else word


def _put(content: dict[str, Any], path: list[str], text: str) -> None:
    for key in path[:-1]:
        content = content.setdefault(key.replace("-", "_"), {})
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    content[path[-1].replace("-", "_")] = value


# vLLM's subcommands: what to use instead.
COMMANDS = {
    "chat": "use examples/chat.py, or `paceline serve MODEL` and any OpenAI client",
    "collect-env": "`paceline check MODEL` tells what was found on this machine",
    "complete": "use `paceline generate MODEL PROMPT`",
    "launch": "use `paceline serve MODEL`",
    "run-batch": "use `paceline generate MODEL --file FILE`",
}
# Of `vllm bench`.
BENCHES = {
    "latency": "`paceline bench MODEL` has first-token and inter-token latency beside tokens/s",
    "serve": "start `paceline serve` and use a load generator for OpenAI's API, such as GuideLLM",
    "startup": "the log of a start tells the seconds of each phase",
    "sweep": "`paceline bench MODEL --k 0,1,3,5` compares draft lengths",
    "throughput": "use `paceline bench MODEL`",
}
