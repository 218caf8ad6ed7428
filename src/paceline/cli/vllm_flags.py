"""vLLM's flags that no command here has: what holds instead, and what to do.

Those that only change nothing at one value are engine arguments, in ``engine_args``. Must not
import torch.
"""

from __future__ import annotations

from typing import NamedTuple

_LEAVE = "leave it out"


class Absent(NamedTuple):
    """Why there is no such flag, in a clause, and the way out."""

    why: str
    hint: str = _LEAVE


_ONE_BACKEND = Absent("structured outputs have one backend, xgrammar")
_NO_LORA = Absent("LoRA adapters are not supported")
_NO_PLUGINS = Absent("parsers are part of Paceline")
_NO_TEXT_LOGGED = Absent("prompts and outputs are never logged")
_OWN_PROXY = "put a proxy before the server"

ABSENT: dict[str, Absent] = {
    "--allow-credentials": Absent("keys come in a header, not in cookies"),
    "--allowed-headers": Absent("origins in `--allowed-origins` may send any header"),
    "--allowed-methods": Absent("origins in `--allowed-origins` may use any method"),
    "--api-server-count": Absent("there is one API process"),
    "--attention-backend": Absent("the fastest attention that fits is taken"),
    "--chat-template-content-format": Absent("the chat template decides it"),
    "--data-parallel-rank": Absent("the engine is one process"),
    "--default-chat-template-kwargs": Absent(
        "there are no defaults", "send `chat_template_kwargs` with each request"
    ),
    "--disable-frontend-multiprocessing": Absent("the engine always has a process of its own"),
    "--disable-uvicorn-access-log": Absent("HTTP requests are logged only with `--access-log`"),
    "--enable-force-include-usage": Absent(
        "a stream has its usage when asked", "send `stream_options` with `include_usage`"
    ),
    "--enable-log-deltas": _NO_TEXT_LOGGED,
    "--enable-log-outputs": _NO_TEXT_LOGGED,
    "--enable-prompt-tokens-details": Absent("`usage` always has the cached prompt tokens"),
    "--enable-reasoning": Absent(
        "naming a parser is enough", "use `--reasoning-parser` alone, with deepseek_r1 or qwen3"
    ),
    "--enable-request-id-headers": Absent("responses carry their id in the body"),
    "--enable-server-load-tracking": Absent("`/health` and `/metrics` tell the load"),
    "--enable-ssl-refresh": Absent("certificates are read once", "start the server again"),
    "--enable-tokenizer-info-endpoint": Absent("there is no such path", "use `/tokenize`"),
    "--exclude-tools-when-tool-choice-none": Absent("the model is never shown tools then"),
    "--guided-decoding-backend": _ONE_BACKEND,
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
    "--response-role": Absent("answers always have the role `assistant`"),
    "--return-tokens-as-token-ids": Absent(
        "logprobs have tokens as text", "ask `/tokenize` for their ids"
    ),
    "--ssl-ca-certs": Absent("certificates of clients are not checked", _OWN_PROXY),
    "--ssl-cert-reqs": Absent("certificates of clients are not checked", _OWN_PROXY),
    "--structured-outputs-config": _ONE_BACKEND,
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
_OPTIMISATION = Absent("there are no optimisation levels; kernels and graphs have no settings")


def absent(flag: str) -> Absent | None:
    """What is to say of a flag of vLLM's that is not here, None for any other.

    ``-O3``, ``-O.mode=3`` and ``--no-`` before a name count as the flag.
    """
    if flag.startswith("-O") or flag == "--optimization-level":
        return _OPTIMISATION
    return ABSENT.get(flag) or ABSENT.get("--" + flag.removeprefix("--no-"))
