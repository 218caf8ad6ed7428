"""Entry point of ``paceline``: finds the command and turns every error into one clear message.

Must stay cheap to import: a command's module is imported when that command runs, torch only when a
model does.

Exit status: 0 done, 1 it cannot work, 2 wrong usage, 130 interrupted, 141 the reader of the output
went away.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.cli.vllm_commands import about_command
from paceline.errors import PacelineError

# command -> what it does; its module is paceline.cli.<command>, with run(argv) -> exit status
COMMANDS = {
    "demo": "the whole story in half a minute, with the tiny pair in the package",
    "generate": "complete prompts from arguments, a file or standard input",
    "serve": "an OpenAI-compatible server; the engine in a process of its own",
    "check": "find every fault and show the memory plan; loads nothing",
    "bench": "compare draft lengths, batching or any engine argument, measured in rounds",
    "synth": "write a target and drafter of any published shape, with no download",
}

INTERRUPTED = 130
OUTPUT_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's). Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not _prepare_streams():
        return 2
    try:
        try:
            return _dispatch(arguments)
        finally:  # also when a parser has printed its help and ends the process
            sys.stdout.flush()
    except PacelineError as error:
        print_error(str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # What is still buffered would fail again, loudly, when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return OUTPUT_CLOSED
        print_error(f"output or input failed: {error}")
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    name = arguments[0]
    if name in ("-V", "--version"):
        print(f"paceline {__version__}")
        return 0
    vllms = about_command(arguments)
    if vllms is not None:
        print_error(vllms)
        return 2
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"commands: {', '.join(COMMANDS)}"
        print_error(f"unknown command `{name}`. hint: {hint}")
        return 2
    status: int = importlib.import_module(f"paceline.cli.{name}").run(arguments[1:])
    return status


def _prepare_streams() -> bool:
    """Make standard output and error usable; False, with a message, if there is no output."""
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  open for the rest of the process
    if sys.stdout is None:
        print_error("standard output is closed. hint: redirect it to a file or /dev/null")
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    return True


def print_error(message: str) -> None:
    """``paceline: error: cause`` on standard error, each hint on a line of its own."""
    for number, line in enumerate(message.splitlines()):
        cause, _, hint = line.partition(" hint: ")
        print(f"paceline: error: {cause}" if number == 0 else cause, file=sys.stderr)
        if hint:
            print(f"  hint: {_with_flags(hint)}", file=sys.stderr)


def _with_flags(hint: str) -> str:
    from paceline.cli.spelling import with_flags

    return with_flags(hint)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: paceline COMMAND ...",
            "",
            "Continuous batching and exact speculative decoding of language models.",
            "",
            *lines,
            "",
            "`paceline COMMAND --help` shows a command's arguments.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
