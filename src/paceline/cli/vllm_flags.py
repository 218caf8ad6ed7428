"""vLLM's flags that no command here has: what holds instead, and what to do.

Those that change nothing at some value are flags: ``NO_EFFECT`` in ``engine_args`` and in
``server.settings``. Must not import torch.
"""

from __future__ import annotations

from typing import NamedTuple

_LEAVE = "leave it out"


class Absent(NamedTuple):
    """Why there is no such flag, in a clause, and the way out."""

    why: str
    hint: str = _LEAVE


_NO_LORA = Absent("LoRA adapters are not supported")
_NO_PLUGINS = Absent("parsers are part of Paceline")
_OWN_PROXY = "put a proxy before the server"

ABSENT: dict[str, Absent] = {
    "--attention-backend": Absent("the fastest attention that fits is taken"),
    "--data-parallel-rank": Absent("the engine is one process"),
    "--default-chat-template-kwargs": Absent(
        "there are no defaults", "send `chat_template_kwargs` with each request"
    ),
    "--enable-reasoning": Absent(
        "naming a parser is enough", "use `--reasoning-parser` alone, with deepseek_r1 or qwen3"
    ),
    "--log-config-file": Absent("there is one form of log lines"),
    "--lora-modules": _NO_LORA,
    "--max-cpu-loras": _NO_LORA,
    "--max-lora-rank": _NO_LORA,
    "--max-loras": _NO_LORA,
    "--middleware": Absent("no code of others is run", _OWN_PROXY),
    "--prompt-adapters": Absent("prompt adapters are not supported"),
    "--reasoning-parser-plugin": _NO_PLUGINS,
    "--ssl-ca-certs": Absent("certificates of clients are not checked", _OWN_PROXY),
    "--tool-parser-plugin": _NO_PLUGINS,
    "--tool-server": Absent("tools run where the client is"),
    "--uds": Absent("the server listens on a port", "use `--host` and `--port`"),
}
_OPTIMISATION = Absent("there are no optimisation levels; kernels and graphs have no settings")


def absent(flag: str) -> Absent | None:
    """What is to say of a flag of vLLM's that is not here, None for any other.

    ``-O3``, ``-O.mode=3``, ``-cc.mode=3`` and ``--no-`` before a name count as the flag.
    """
    if flag.startswith(("-O", "-cc")) or flag == "--optimization-level":
        return _OPTIMISATION
    return ABSENT.get(flag) or ABSENT.get("--" + flag.removeprefix("--no-"))
