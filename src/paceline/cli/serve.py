"""``paceline serve``: the OpenAI-compatible server.

Reads flags and the configuration file and says what is wrong with them, before anything is loaded.
Must not import torch, and what the extra ``serve`` brings only once there is something to serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml

from paceline.check.files import attempt
from paceline.check.report import Fault
from paceline.cli.check import print_report
from paceline.cli.flags import (
    Parser,
    add_engine_flags,
    add_hidden_flags,
    byte_count,
    decimal_number,
    given,
    whole_number,
)
from paceline.cli.vllm_flags import SERVER_NO_EFFECT
from paceline.engine.tokenizer import Tokenizer
from paceline.engine_args import EngineArgs, join_problems
from paceline.errors import ConfigError
from paceline.hub import local_directory
from paceline.log import configure_logging
from paceline.no_effect import refusal
from paceline.server.chat_template import check_named, read_template
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from paceline.server.run import Serving

_INSTALL = 'run `pip install -c constraints.txt -e ".[serve]"` in your clone of Paceline'


def run(argv: Sequence[str]) -> int:
    """Serve until told to stop. Returns 0, 130 if it was told twice, or the check's status."""
    parser = _parser()
    filed = _read_config(parser, argv)
    model = filed.pop("model", None)
    namespace = parser.parse([*_arguments(parser, filed, argv), *argv])
    engine, server = given(namespace, "engine"), given(namespace, "server")
    if "model" not in engine and namespace.positional:
        engine["model"] = namespace.positional.pop(0)
    if namespace.positional:
        parser.error(f"one model at a time; what is `{namespace.positional[0]}`?")
    if engine.setdefault("model", model) is None:
        parser.error("no model. hint: `paceline serve MODEL`")
    refused = [
        refusal(name, value, SERVER_NO_EFFECT[name])
        for name, value in given(namespace, "ignored").items()
    ]
    if any(refused):
        parser.error(join_problems([message for message in refused if message]))
    server = {name: tuple(v) if isinstance(v, list) else v for name, v in server.items()}
    if "allowed_origins" in server:
        server["allowed_origins"] = _from_json_lists(server["allowed_origins"])
    settings = ServerSettings(**server)
    if namespace.dry_run:
        return print_report(
            engine, as_json=namespace.json, known=_template_faults(engine, settings)
        )
    read_template(settings.chat_template)  # its faults come before the model is read
    return asyncio.run(_make(engine, settings).run())


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
        help="JSON, TOML or YAML file of flags by name, such as port = 8080; flags given here win",
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
    add_engine_flags(parser)
    add_hidden_flags(parser, SERVER_NO_EFFECT, "ignored")
    return parser


def _from_json_lists(values: Sequence[str]) -> tuple[str, ...]:
    """vLLM takes several origins as one JSON list."""
    found: list[str] = []
    for value in values:
        try:
            content = json.loads(value)
        except ValueError:
            content = value
        is_list = isinstance(content, list) and all(isinstance(one, str) for one in content)
        found += content if is_list else [value]
    return tuple(found)


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
    if kind == tuple[str, ...]:
        return {**options, "nargs": "+", "action": "extend", "metavar": "TEXT"}
    return {**options, "metavar": "TEXT"}


# ---- the configuration file ----------------------------------------------------------------------


def _read_config(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What the file of ``--config`` says, {} without one."""
    before = Parser(prog=parser.prog, add_help=False)
    before.add_argument("--config")
    path = before.parse_known_args(list(argv))[0].config
    return {} if path is None else read_config_file(Path(path))


def _arguments(parser: Parser, filed: dict[str, Any], argv: Sequence[str]) -> list[str]:
    """Settings of the file as command line arguments, without those that are given there."""
    switches = {
        option
        for action in parser._actions
        if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0
        for option in action.option_strings
    }
    here = {argument.partition("=")[0] for argument in argv}
    arguments: list[str] = []
    for name, value in filed.items():
        flag = _flag(name)
        opposite = "--no-" + flag[2:]
        if flag in ("--config", "--help"):
            raise ConfigError(
                f"a configuration file cannot have `{name}`. hint: give it on the command line"
            )
        if value is None or flag in here or opposite in here:
            continue
        if isinstance(value, bool) and flag in switches:
            arguments.append(flag if value else opposite)
            continue
        for one in value if isinstance(value, list) else [value]:
            text = json.dumps(one) if isinstance(one, dict) else str(one)
            arguments.append(f"{flag}={text}")
    return arguments


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings in a JSON, TOML or YAML file, by name.

    Raises:
        ConfigError: no such file, another format, or not an object of settings.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            content = yaml.safe_load(text) or {}
        elif path.suffix == ".json":
            content = json.loads(text)
        else:
            raise ConfigError(
                f"{path} is no .json, .toml, .yaml or .yml. hint: --config reads these formats"
            )
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds no settings by name. hint: for example port and max_num_seqs, as in "
            '{"port": 8080, "max_num_seqs": 64}'
        )
    return {str(name): value for name, value in content.items()}
