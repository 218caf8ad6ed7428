"""What a server is told beside its engine arguments.

Plain values with their help texts, checked for range. Must not know sockets, frameworks or flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from paceline.engine_args import join_problems
from paceline.errors import ConfigError
from paceline.server.reasoning import REASONING_PARSERS

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
        problems = [
            f"`{name}` must be at least {least}, got {getattr(self, name)}"
            for name, least in (
                ("port", 0),
                ("max_queue", 0),
                ("max_body_size", 1),
                ("request_timeout", 0),
                ("shutdown_timeout", 0),
                ("engine_stall_timeout", 1),
            )
            if getattr(self, name) < least
        ]
        if self.port > 65535:
            problems.append(f"`port` must be at most 65535, got {self.port}")
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value is not None and value not in choices:
                problems.append(f"`{f.name}` must be one of {', '.join(choices)}, got {value!r}")
        if any(not key for key in self.api_key):
            problems.append("`api_key` is empty. hint: leave it out for a server without keys")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            problems.append("HTTPS needs both `ssl_keyfile` and `ssl_certfile`")
        if problems:
            raise ConfigError(join_problems(problems))
