"""vLLM's commands that are not here, and what does their work. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# command, with its own subcommand if it has one -> what is so here, and what to do
ABSENT = {
    "chat": (
        "nothing here talks to a running server from a terminal",
        "`paceline generate MODEL --chat PROMPT` answers without a server; to ask one use the "
        "OpenAI client or curl, as in examples/openai_chat.py and examples/curl.sh",
    ),
    "complete": (
        "nothing here talks to a running server from a terminal",
        "`paceline generate MODEL PROMPT` completes without a server; to ask one use the OpenAI "
        "client or curl, as in examples/curl.sh",
    ),
    "collect-env": (
        "there is no report of the environment alone",
        "`paceline check MODEL` shows the settings, the memory plan and every fault",
    ),
    "run-batch": (
        "OpenAI's batch files are not read",
        "`paceline generate MODEL --file FILE --json` completes a file of prompts, as text or JSON "
        "lines",
    ),
    "launch": ("there are no components to start one by one", "`paceline serve MODEL`"),
    "preload": (
        "there is no command that only downloads",
        "`paceline serve MODEL` and `generate` fetch what is missing",
    ),
    "bench serve": (
        "there is no load generator for a running server",
        "`python benchmarks/serving.py MODEL --streams 64` compares the server with the engine "
        "alone; any generator of load that speaks OpenAI's API works too",
    ),
    "bench latency": (
        "one command measures both",
        "`paceline bench MODEL --num-requests 1 --input-len 32 --output-len 128` has the times of "
        "a request alone",
    ),
    "bench throughput": (
        "one command measures both",
        "`paceline bench MODEL --input-len 512 --output-len 128` has tokens/s and the times of "
        "requests",
    ),
    "bench sweep": (
        "one command compares",
        "`paceline bench MODEL --k 0,3,5`, or `--a NAME=VALUE --b NAME=VALUE`",
    ),
    "bench startup": ("start-up is not measured", "the log says how long loading took"),
    "bench mm-processor": ("only text is generated", "`paceline bench MODEL`"),
}


def about_command(arguments: Sequence[str]) -> str | None:
    """What is to say of a command line of vLLM's that has no such command here, else None.

    A directory of the name of a subcommand is a model.
    """
    name = arguments[0]
    if name == "bench":
        if len(arguments) == 1 or Path(arguments[1]).is_dir():
            return None
        name = f"bench {arguments[1]}"
    name = name.replace("_", "-")
    if name not in ABSENT:
        return None
    why, hint = ABSENT[name]
    return f"vLLM's `{name}` is not here: {why}. hint: {hint}"
