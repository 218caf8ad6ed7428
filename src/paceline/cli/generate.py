"""``paceline generate``: complete prompts as text or JSON lines.

Everything that can be wrong is said before a model loads; torch is imported only after that. Must
not know what the engine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.check import print_report
from paceline.cli.flags import add_engine_flags, add_sampling_flags
from paceline.cli.main import INTERRUPTED, print_error
from paceline.cli.output import OutputWriter
from paceline.cli.parser import Parser, given
from paceline.cli.prompts import PromptItem, chat_warning, read_prompt_file, read_prompts
from paceline.cli.requests import check_items
from paceline.engine_args import EngineArgs
from paceline.errors import EngineError
from paceline.log import configure_logging
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM

logger = logging.getLogger(__name__)

_ONLY_IN_JSON = ("logprobs", "prompt_logprobs")
# The library's 16 tokens are vLLM's default; on a command line they look like a broken model.
_MAX_TOKENS = 256


def run(argv: Sequence[str]) -> int:
    """Generate, and print as asked. Returns 1 if a prompt failed, else 0."""
    parser = _parser()
    namespace = parser.parse(argv)
    engine, sampling = given(namespace, "engine"), given(namespace, "sampling")
    if "model" not in engine and namespace.positional:
        engine["model"] = namespace.positional.pop(0)
    if "model" not in engine:
        parser.error("no model. hint: `paceline generate MODEL PROMPT`")
    if namespace.dry_run:
        return print_report(engine, as_json=namespace.json)
    SamplingParams(**sampling)
    EngineArgs.from_kwargs(**engine)
    items = _items(parser, namespace)
    for item in items:
        item.sampling_with(sampling)
    check_items(engine, items, sampling)
    watched = _announce(namespace, engine, items, sampling)
    from paceline.llm import LLM  # torch

    with LLM(**engine) as llm:
        defaults = llm.get_default_sampling_params()
        if defaults.max_tokens == SamplingParams().max_tokens:
            sampling.setdefault("max_tokens", _MAX_TOKENS)
        params = [_params(defaults, sampling, item) for item in items]
        alone = len(items) == 1 and params[0].n == 1
        if alone and not namespace.json and sys.stdout.isatty():
            return _stream(llm, items[0], params[0], summary=watched)
        return _write_all(llm, items, params, as_json=namespace.json, bar=watched)


def _parser() -> Parser:
    parser = Parser(
        prog="paceline generate",
        usage="paceline generate MODEL [PROMPT ...] [--chat] [--json] [flags]",
        description="Complete prompts. They come from arguments, --file, or standard input: one a "
        "line, or JSON lines with `prompt`, `prompt_token_ids` or `messages` and, if wanted, "
        "sampling parameters.",
    )
    parser.add_argument(
        "positional",
        nargs="*",
        metavar="MODEL [PROMPT ...]",
        help="without --model the first one is the model; - reads standard input",
    )
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--file", type=Path, help="file of prompts, - for standard input")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print a JSON object a prompt")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quiet", action="store_true", help="no warnings, no progress bar")
    amount.add_argument(
        "--verbose", action="store_true", help="log the resolved settings and what is loaded"
    )
    parser.add_argument("--dry-run", action="store_true", help="the same as `paceline check`")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return parser


def _items(parser: Parser, namespace: argparse.Namespace) -> list[PromptItem]:
    texts = [text for text in namespace.positional if text != "-"]
    items = [PromptItem(text=text) for text in [*texts, *namespace.prompt]]
    from_stdin = "-" in (*namespace.positional, str(namespace.file))
    if namespace.file is not None and str(namespace.file) != "-":
        items += read_prompt_file(namespace.file)
    if sys.stdin is not None and (from_stdin or not (items or sys.stdin.isatty())):
        items += read_prompts(sys.stdin, "standard input")
    if not items:
        parser.error("no prompt. hint: give one after the model, with --file, or on standard input")
    return [item.as_chat() for item in items] if namespace.chat else items


def _announce(
    namespace: argparse.Namespace,
    engine: dict[str, Any],
    items: Sequence[PromptItem],
    sampling: dict[str, Any],
) -> bool:
    """Set up the log and say what begins; whether someone watches standard error."""
    level = logging.INFO if namespace.verbose else logging.WARNING
    configure_logging(logging.ERROR if namespace.quiet else level)
    warning = chat_warning(engine["model"], items)
    if warning is not None:
        logger.warning("%s", warning)
    unseen = [] if namespace.json else [name for name in _ONLY_IN_JSON if name in sampling]
    for name in unseen:
        logger.warning("--%s is not shown in text. hint: add --json", name.replace("_", "-"))
    # Whoever sends standard error to a file wants warnings there, not progress.
    watched = sys.stderr.isatty() and not namespace.quiet
    if watched:
        drafter = engine.get("speculative_model")
        drafts = "" if drafter is None else f", drafts by {drafter}"
        print(f"loading {engine['model']}{drafts}", file=sys.stderr)
    return watched


def _params(defaults: SamplingParams, sampling: dict[str, Any], item: PromptItem) -> SamplingParams:
    with item.located():
        return dataclasses.replace(defaults, **{**sampling, **item.sampling})


def _prompt(llm: LLM, item: PromptItem) -> Any:
    """What ``LLM.generate`` takes for this item."""
    if item.messages is not None:
        with item.located():
            token_ids = llm.get_tokenizer().apply_chat_template(item.messages)
        return {"prompt_token_ids": token_ids}
    return item.text if item.text is not None else {"prompt_token_ids": item.token_ids}


def _write_all(
    llm: LLM,
    items: Sequence[PromptItem],
    params: Sequence[SamplingParams],
    *,
    as_json: bool,
    bar: bool,
) -> int:
    """Write every output, in order, as soon as it and those before it have finished.

    After an interruption, or if the engine fails, those that wait for an earlier one follow: each
    says which prompt it belongs to.
    """
    writer = OutputWriter(items, as_json=as_json)
    prompts = [_prompt(llm, item) for item in items]
    try:
        outputs = llm.generate(prompts, params, use_tqdm=bar, on_output=writer.take)
    except KeyboardInterrupt:
        writer.write_rest()
        print(f"interrupted: {writer.count} of {len(items)} written", file=sys.stderr)
        return INTERRUPTED
    except EngineError:
        writer.write_rest()
        raise
    return _report_failures(outputs)


def _stream(llm: LLM, item: PromptItem, params: SamplingParams, *, summary: bool) -> int:
    """Print one output as it grows, and how fast it came if ``summary``."""
    started = time.monotonic()
    first: float | None = None
    printed = 0
    output: RequestOutput | None = None
    for output in llm.stream(_prompt(llm, item), params):
        text = output.outputs[0].text
        if first is None and output.outputs[0].token_ids:
            first = time.monotonic()
        sys.stdout.write(text[printed:])
        sys.stdout.flush()
        printed = len(text)
    print()
    if output is None:
        return 0
    if summary:
        ended = time.monotonic()
        print(_summary(output, (first or ended) - started, ended - started), file=sys.stderr)
    return _report_failures([output])


def _summary(output: RequestOutput, to_first: float, total: float) -> str:
    count = len(output.outputs[0].token_ids)
    parts = [f"{count} tokens", f"first after {to_first:.2f} s"]
    if count > 1 and total > to_first:
        parts.append(f"then {(count - 1) / (total - to_first):.1f} tokens/s")
    rate = output.metrics.speculative_decoding.acceptance_rate
    if rate is not None:
        parts.append(f"acceptance {rate:.2f}")
    return f"[{', '.join(parts)}, {output.outputs[0].finish_reason}]"


def _report_failures(outputs: Sequence[RequestOutput]) -> int:
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        print_error(f"request {output.request_id} failed: {output.error}")
    return 1 if failed else 0
