"""A server's environment variables: its API key, and what vLLM's mean here.

Values are never logged: any of them may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from paceline.server.settings import ServerSettings

KEY_VARIABLE = "PACELINE_API_KEY"
VLLM_KEY_VARIABLE = "VLLM_API_KEY"

# What vLLM reads, and what to use here instead. docs/server.md has the same table.
COUNTERPARTS = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "edit the model's config.json",
    "VLLM_ATTENTION_BACKEND": "the fastest attention that fits is taken",
    "VLLM_BATCH_INVARIANT": "see docs/exactness.md for what is the same in any batch",
    "VLLM_CACHE_ROOT": "set XDG_CACHE_HOME",
    "VLLM_CPU_KVCACHE_SPACE": "use `--kv-cache-memory-bytes`",
    "VLLM_CPU_OMP_THREADS_BIND": "set OMP_NUM_THREADS",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "outputs are never logged",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "use `--engine-stall-timeout`",
    "VLLM_HOST_IP": "use `--host`",
    "VLLM_LOGGING_LEVEL": "use `--access-log` and `--enable-log-requests` for more lines",
    "VLLM_PORT": "use `--port`",
    "VLLM_SERVER_DEV_MODE": "there are no paths for development",
    "VLLM_TARGET_DEVICE": "use `--device`",
    "VLLM_USE_MODELSCOPE": "set HF_ENDPOINT to a mirror, or give a local directory",
}
# They ask for what holds here anyway: nothing is sent to anybody, there is one engine.
_FULFILLED = frozenset({"VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "VLLM_USE_V1"})
# Kubernetes sets these for a service whose name begins with vllm; nobody meant them.
_OF_A_SERVICE = re.compile(
    r"VLLM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def environment_keys(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The API key that the environment has: ours, else vLLM's."""
    key = environment.get(KEY_VARIABLE) or environment.get(VLLM_KEY_VARIABLE)
    return (key,) if key else ()


def start_warnings(settings: ServerSettings, environment: Mapping[str, str]) -> list[str]:
    """What a server's owner should know and may have meant."""
    ignored = ignored_variables(environment)
    warnings = [] if ignored is None else [ignored]
    is_open = not settings.api_key and not environment_keys(environment)
    if is_open and not re.fullmatch(r"localhost|127\.[\d.]+|::1", settings.host):
        warnings.append(
            f"everybody who reaches {settings.host} may use the server. hint: set {KEY_VARIABLE}, "
            "or leave `--host` out if clients are on this machine"
        )
    return warnings


def ignored_variables(environment: Mapping[str, str]) -> str | None:
    """One message about vLLM's variables that are set and have no effect; None if there are none.

    environment: the variables; empty ones count as not set.
    """
    names = sorted(name for name, value in environment.items() if value and _is_meant(name, value))
    if VLLM_KEY_VARIABLE in names and not environment.get(KEY_VARIABLE):
        names.remove(VLLM_KEY_VARIABLE)
    if not names:
        return None
    return f"set in the environment, but without effect here: {'; '.join(_with_way_out(names))}"


def _is_meant(name: str, value: str) -> bool:
    of_a_service = _OF_A_SERVICE.fullmatch(name) or _ADDRESS.match(value)
    return name.startswith("VLLM_") and name not in _FULFILLED and not of_a_service


def _with_way_out(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        hint = COUNTERPARTS.get(name)
        if name == VLLM_KEY_VARIABLE:
            hint = f"{KEY_VARIABLE} comes before it"
        yield f"{name} ({hint})" if hint else name
