"""``paceline serve``: the OpenAI-compatible server.

Reads flags and the configuration file and says what is wrong with them, before anything is loaded.
Must not import torch, and what the extra ``serve`` brings only once there is something to serve.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline.check.arguments import argument_faults
from paceline.check.files import attempt
from paceline.check.report import Fault, Setting
from paceline.cli.argv import with_dashes
from paceline.cli.check import print_report
from paceline.cli.config_file import as_arguments, read_config_file
from paceline.cli.flags import (
    add_engine_flags,
    add_no_effect_flags,
    byte_count,
    decimal_number,
    text_list,
    whole_number,
)
from paceline.cli.parser import Parser, given
from paceline.engine.tokenizer import Tokenizer
from paceline.engine_args import EngineArgs, join_problems
from paceline.errors import ConfigError
from paceline.hub import local_directory
from paceline.log import configure_logging
from paceline.server.chat_template import check_named, read_template
from paceline.server.environment import environment_keys, start_warnings
from paceline.server.network import check_host, check_tls, listen
from paceline.server.settings import NO_EFFECT, ServerSettings

if TYPE_CHECKING:
    from paceline.server.run import Serving

_INSTALL = 'run `pip install -c constraints.txt -e ".[serve]"` in your clone of Paceline'


def run(argv: Sequence[str]) -> int:
    """Serve until told to stop. Returns 0, 130 if it was told twice, or the check's status.

    Everything that is wrong with flags and settings is said in one message.
    """
    parser = _parser()
    namespace, engine, faults = _read(parser, argv)
    wrong_usage = bool(faults)
    settings, problems = ServerSettings.read(**_server_keywords(namespace))
    faults += map(Fault.from_message, problems)
    if any("`tool_call_parser`" in problem for problem in problems):
        settings = replace(settings, enable_auto_tool_choice=False)  # no fault beside that one
    if namespace.json and not namespace.dry_run:
        faults.append(Fault("`--json` is there for `--dry-run` only", "give both, or neither"))
    if engine.get("skip_tokenizer_init"):
        faults.append(Fault("the server needs a tokenizer", "leave `--skip-tokenizer-init` out"))
    attempt(faults, check_tls, settings)
    if namespace.dry_run and "model" in engine:
        attempt(faults, check_host, settings)
        return print_report(
            engine,
            as_json=namespace.json,
            known=[*faults, *_template_faults(engine, settings)],
            settings=_shown(settings),
            warnings=_warnings(settings),
        )
    attempt(faults, read_template, settings.chat_template)
    if faults:
        message = join_problems([str(one) for one in [*faults, *_engine_faults(engine, faults)]])
        if wrong_usage:
            parser.error(message)
        raise ConfigError(message)
    return asyncio.run(_make(engine, settings).run())


def _shown(settings: ServerSettings) -> list[Setting]:
    """Those of the server for the report; of keys, how many there are."""
    keys = len(settings.api_key + environment_keys(os.environ))
    shown = []
    for f in fields(settings):
        value = getattr(settings, f.name)
        if f.name == "api_key":
            shown.append(Setting(f.name, keys, "keys, of the command line and the environment"))
        else:
            shown.append(Setting(f.name, None if value in ("", ()) else value))
    return shown


def _warnings(settings: ServerSettings) -> list[str]:
    """What a start would warn of, and a port that is taken today."""
    taken: list[Fault] = []
    attempt(taken, lambda: listen(settings).close())
    warnings = start_warnings(settings, os.environ)
    return warnings + [str(fault) for fault in taken if "is taken" in fault.cause]


def _read(
    parser: Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any], list[Fault]]:
    """What command line and configuration file say, the engine arguments of it, and its faults."""
    argv = with_dashes(argv)
    filed = _read_config(parser, argv)
    model = filed.pop("model", None)
    arguments, problems = as_arguments(parser, filed, argv)
    namespace, faults = parser.parse_all([*arguments, *argv])
    faults = [*map(Fault.from_message, problems), *faults]
    engine, positional = given(namespace, "engine"), namespace.positional
    if "model" not in engine and positional:
        model = positional.pop(0)
    if positional and not faults:  # behind a wrong flag nobody can tell a value from a model
        hint = f"`{parser.prog} --help` shows all arguments"
        faults.append(Fault(f"one model at a time; what is `{positional[0]}`?", hint))
    if model is not None:
        engine.setdefault("model", model)
    if "model" not in engine:
        hint = "`paceline serve MODEL`"
        if _several(namespace):
            hint += ", with MODEL before flags that take several values, such as --api-key"
        faults.append(Fault("no model", hint))
    return namespace, engine, faults


def _read_config(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What the file of ``--config`` says, {} without one."""
    before = Parser(prog=parser.prog, add_help=False)
    before.add_argument("--config", nargs="?")  # without a value it is refused with the rest
    path = before.parse_known_args(list(argv))[0].config
    return {} if path is None else read_config_file(Path(path).expanduser())


def _server_keywords(namespace: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``ServerSettings.read``; flags that may be given several times as tuples."""
    server = given(namespace, "server")
    several = _several(namespace)
    if "allowed_origins" in several:
        server["allowed_origins"] = itertools.chain.from_iterable(server["allowed_origins"])
    return server | {name: tuple(server[name]) for name in several}


def _several(namespace: argparse.Namespace) -> set[str]:
    """Settings that were given and take several values."""
    names = {f.name for f in fields(ServerSettings) if f.default == ()}
    return names & given(namespace, "server").keys()


def _engine_faults(engine: dict[str, Any], known: list[Fault]) -> list[Fault]:
    """What is wrong with the engine arguments by themselves, beside what is ``known``."""
    if "model" not in engine:
        return []
    args, problems = EngineArgs.read(**engine)
    faults = list(map(Fault.from_message, problems))
    return faults + argument_faults(args, [*known, *faults])


def _template_faults(engine: dict[str, Any], settings: ServerSettings) -> list[Fault]:
    """What is wrong with the chat template, and with tool calls, as they depend on it.

    The model's own templates are read where it lies in a directory.
    """
    faults: list[Fault] = []
    template = attempt(faults, read_template, settings.chat_template)
    if faults or (template is None and not settings.enable_auto_tool_choice):
        return faults
    # What is wrong with the model itself, the check reports.
    path = attempt([], local_directory, engine.get("tokenizer") or engine["model"])
    tokenizer = None if path is None else attempt([], Tokenizer.load, path)
    if tokenizer is None or engine.get("skip_tokenizer_init"):
        return faults
    templates = attempt(faults, lambda: tokenizer.chat_templates)
    if templates is not None:
        attempt(faults, check_named, template, templates)
    if settings.enable_auto_tool_choice and not faults:
        attempt(faults, _server_module().find_tool_parser, settings, tokenizer, template)
    return faults


def _make(engine: dict[str, Any], settings: ServerSettings) -> Serving:
    module = _server_module()
    configure_logging()
    config = EngineArgs.from_kwargs(**engine).resolve()
    log_stats = not engine.get("disable_log_stats", False)
    serving: Serving = module.Serving(config, settings, log_stats=log_stats)
    return serving


def _server_module() -> ModuleType:
    try:
        import paceline.server.run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("paceline"):
            raise
        raise ConfigError(
            f"`paceline serve` needs the package `{error.name}`. hint: {_INSTALL}"
        ) from error
    return paceline.server.run


# ---- flags ---------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="paceline serve",
        usage="paceline serve MODEL [flags]",
        description="Serve a model over HTTP, as OpenAI's API does. Stops on SIGTERM or Ctrl-C "
        "once running requests have ended; a second signal ends it at once.",
    )
    parser.add_argument("positional", nargs="*", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML, JSON or TOML file of flags by name, such as port: 8080; flags given here win",
    )
    parser.add_argument("--dry-run", action="store_true", help="the same as `paceline check`")
    parser.add_argument("--json", action="store_true", help="with --dry-run: one JSON object")
    group = parser.add_argument_group("server")
    hints = get_type_hints(ServerSettings)
    for f in fields(ServerSettings):
        options = _options(f.name, hints[f.name])
        if f.metadata["choices"]:
            options["metavar"] = "{" + ",".join(f.metadata["choices"]) + "}"
        text = f.metadata["help"]
        if f.default not in (None, (), "") and not isinstance(f.default, bool):
            text += f" (default: {f.default})"
        group.add_argument(_flag(f.name), help=text, **options)
    add_no_effect_flags(parser, NO_EFFECT, "server")
    add_engine_flags(parser)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _options(name: str, kind: Any) -> dict[str, Any]:
    """Keywords of ``add_argument`` for a setting of this type."""
    options: dict[str, Any] = {"dest": f"server.{name}", "default": argparse.SUPPRESS}
    if kind is bool:
        return {**options, "action": argparse.BooleanOptionalAction}
    if name == "max_body_size":
        return {**options, "type": byte_count, "metavar": "BYTES"}
    if kind is int:
        return {**options, "type": whole_number, "metavar": "N"}
    if kind is float:
        return {**options, "type": decimal_number, "metavar": "X"}
    if name == "allowed_origins":  # vLLM takes a JSON list
        return {**options, "nargs": "+", "action": "extend", "type": text_list, "metavar": "TEXT"}
    if kind == tuple[str, ...]:
        return {**options, "nargs": "+", "action": "extend", "metavar": "TEXT"}
    return {**options, "metavar": "TEXT"}
