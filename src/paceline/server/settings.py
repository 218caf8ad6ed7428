"""What a server is told beside its engine arguments, and vLLM's flags that change nothing here.

Plain values with their help texts, checked for range. Must not know sockets, frameworks or flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from paceline.engine_args import join_problems
from paceline.errors import ConfigError
from paceline.no_effect import NoEffect, refusal, unknown
from paceline.server.reasoning import REASONING_PARSERS

_LEAST = {
    "port": 0,
    "max_queue": 0,
    "max_body_size": 1,
    "request_timeout": 0,
    "shutdown_timeout": 0,
    "engine_stall_timeout": 1,
}
_SECONDS = ("request_timeout", "shutdown_timeout", "engine_stall_timeout")
_LARGEST_PORT = 65535
SPEC_DECODE_METRICS = ("none", "summary", "detailed")
# The keys of ``TOOL_PARSERS``, whose module needs the extra ``serve``.
TOOL_PARSER_NAMES = ("hermes", "llama3_json")


def _setting(default: Any, help_text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the API process; names are vLLM's flags where it has them.

    The help texts are also the command line's. Times are in seconds.

    Raises:
        ConfigError: every value out of range, at construction.
    """

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = _setting(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] = _setting(
        (), "names that clients may call the model by (default: what MODEL says)"
    )
    api_key: tuple[str, ...] = _setting(
        (),
        "keys of which clients must send one; PACELINE_API_KEY (or else VLLM_API_KEY) in the "
        "environment is another, and not seen in the list of processes",
    )
    chat_template: str | None = _setting(
        None, "Jinja template for chats: a file, or the name of one of the model's"
    )
    tool_call_parser: str | None = _setting(
        None,
        "how the model writes tool calls (default: as its chat template asks)",
        TOOL_PARSER_NAMES,
    )
    enable_auto_tool_choice: bool = _setting(False, "let the model decide whether to call tools")
    reasoning_parser: str | None = _setting(
        None, "how the model marks its reasoning", REASONING_PARSERS
    )
    per_request_spec_decode_metrics: str = _setting(
        "none", "what responses say of drafts", SPEC_DECODE_METRICS
    )
    max_queue: int = _setting(
        1024, "outputs that may wait beside max_num_seqs running ones; beyond that clients get 429"
    )
    max_body_size: int = _setting(16 * 1024 * 1024, "bytes of a request's body; beyond that 413")
    request_timeout: float = _setting(0.0, "seconds a request may take; 0 is no limit")
    shutdown_timeout: float = _setting(
        30.0, "seconds that requests may go on after SIGTERM or SIGINT"
    )
    restart_engine: bool = _setting(False, "start the engine process again when it dies")
    engine_stall_timeout: float = _setting(
        300.0, "seconds without a step after which /health says that the engine hangs"
    )
    allowed_origins: tuple[str, ...] = _setting(
        (), "origins whose web pages may call the server (CORS); * allows all"
    )
    root_path: str = _setting("", "path under which a proxy offers the server")
    ssl_keyfile: str | None = _setting(None, "private key for HTTPS")
    ssl_certfile: str | None = _setting(None, "certificate for HTTPS")
    access_log: bool = _setting(False, "log a line for each HTTP request")
    enable_log_requests: bool = _setting(
        False, "log a line for each generation: lengths and limits, never its text"
    )
    disable_fastapi_docs: bool = _setting(False, "no /docs, /redoc and /openapi.json")

    def __post_init__(self) -> None:
        problems = _problems({f.name: getattr(self, f.name) for f in fields(self)})
        if problems:
            raise ConfigError(join_problems([problem.message for problem in problems]))

    @classmethod
    def read(cls, **kwargs: Any) -> tuple[ServerSettings, list[str]]:
        """Settings from keywords, own ones and vLLM's, and every problem there is.

        What has a problem is left at its default.
        """
        known = {f.name: f.default for f in fields(cls)}
        messages: list[str] = []
        for name, value in kwargs.items():
            if name in NO_EFFECT:
                message = refusal(name, value, NO_EFFECT[name])
                messages += [] if message is None else [message]
            elif name not in known:
                messages.append(unknown("setting of the server", name, sorted(known), NO_EFFECT))
        values = {**known, **{name: kwargs[name] for name in kwargs if name in known}}
        problems = _problems(values)
        for problem in problems:
            values.update((name, known[name]) for name in problem.names)
        return cls(**values), messages + [problem.message for problem in problems]


class _Problem(NamedTuple):
    """The settings to blame, and what is wrong with them."""

    names: tuple[str, ...]
    message: str


def _problems(values: Mapping[str, Any]) -> list[_Problem]:
    """Every value out of range; ``values`` has all settings."""
    problems = [
        _Problem((name,), f"`{name}` must be at least {least}, got {values[name]}")
        for name, least in _LEAST.items()
        if not values[name] >= least
    ]
    problems += [
        _Problem((name,), f"`{name}` must be a number of seconds, got {values[name]}")
        for name in _SECONDS
        if values[name] == math.inf
    ]
    if values["port"] > _LARGEST_PORT:
        message = f"`port` must be at most {_LARGEST_PORT}, got {values['port']}"
        problems.append(_Problem(("port",), message))
    for f in fields(ServerSettings):
        value, choices = values[f.name], f.metadata["choices"]
        if choices and value is not None and value not in choices:
            message = f"`{f.name}` must be one of {', '.join(choices)}, got {value!r}"
            problems.append(_Problem((f.name,), message))
    if any(not key for key in values["api_key"]):
        message = "`api_key` is empty. hint: leave it out for a server without keys"
        problems.append(_Problem(("api_key",), message))
    if any(not name.strip() for name in values["served_model_name"]):
        message = "`served_model_name` is empty. hint: leave it out to keep the model's own"
        problems.append(_Problem(("served_model_name",), message))
    path = values["root_path"]
    if path and (not path.startswith("/") or path.endswith("/")):
        message = (
            f"`root_path` must begin with / and not end with it, got {path!r}. hint: such as /llm"
        )
        problems.append(_Problem(("root_path",), message))
    if (values["ssl_keyfile"] is None) != (values["ssl_certfile"] is None):
        message = "HTTPS needs both `ssl_keyfile` and `ssl_certfile`"
        problems.append(_Problem(("ssl_keyfile", "ssl_certfile"), message))
    return problems


# ---- vLLM's flags of the server that have no effect here -----------------------------------------

_TEXT_IS_NEVER_LOGGED = "prompts and outputs are never logged"
_OWN_PROXY = "put a proxy before the server"

NO_EFFECT: dict[str, NoEffect] = {
    # Who may call, and how.
    "allow_credentials": NoEffect((False,), "keys come in a header, not in cookies"),
    "allowed_headers": NoEffect(
        (["*"], "*"), "origins in `--allowed-origins` may send any header", _OWN_PROXY
    ),
    "allowed_methods": NoEffect(
        (["*"], "*"), "origins in `--allowed-origins` may use any method", _OWN_PROXY
    ),
    "enable_ssl_refresh": NoEffect(
        (False,), "certificates are read once", "start the server again"
    ),
    "ssl_cert_reqs": NoEffect((0,), "certificates of clients are not checked", _OWN_PROXY),
    # Processes.
    "api_server_count": NoEffect((None, 1), "there is one API process"),
    "disable_frontend_multiprocessing": NoEffect(
        (False,), "the engine always has a process of its own"
    ),
    "headless": NoEffect((False,), "the server always has its API"),
    # Chats and tools.
    "chat_template_content_format": NoEffect(("auto",), "the chat template decides it"),
    "exclude_tools_when_tool_choice_none": NoEffect((True,), "the model is never shown tools then"),
    "response_role": NoEffect(("assistant",), "answers always have the role `assistant`"),
    "trust_request_chat_template": NoEffect(
        (False,), "templates are programs and never taken from requests", "use `--chat-template`"
    ),
    # What responses have.
    "enable_force_include_usage": NoEffect(
        (False,),
        "a stream has its usage when asked",
        "send `stream_options` with `include_usage`",
    ),
    "enable_prompt_tokens_details": NoEffect(
        (True, False), "`usage` always has the cached prompt tokens"
    ),
    "enable_request_id_headers": NoEffect((False,), "responses carry their id in the body"),
    "enable_server_load_tracking": NoEffect((False,), "`/health` and `/metrics` tell the load"),
    "enable_tokenizer_info_endpoint": NoEffect(
        (False,), "there is no such path", "use `/tokenize`"
    ),
    "return_tokens_as_token_ids": NoEffect(
        (False,), "logprobs have tokens as text", "ask `/tokenize` for their ids"
    ),
    # Logs.
    "disable_uvicorn_access_log": NoEffect(
        (True,), "HTTP requests are logged only when asked for", "use `--access-log`"
    ),
    "enable_log_deltas": NoEffect((True, False), _TEXT_IS_NEVER_LOGGED),
    "enable_log_outputs": NoEffect((False,), _TEXT_IS_NEVER_LOGGED),
    "max_log_len": NoEffect(None, ""),
    "uvicorn_log_level": NoEffect(
        ("info", "warning"),
        "what goes wrong is always logged",
        "for a line an HTTP request use `--access-log`",
    ),
}
