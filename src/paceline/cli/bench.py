"""``paceline bench``: does it pay, on your prompts? Variants side by side, in interleaved rounds.

Everything that can be wrong is said before a model loads; torch is imported only after that.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.engines import EngineSet
from paceline.bench.figures import Figures
from paceline.bench.lengths import FORMS, parse_lengths
from paceline.bench.plot import check_plot, draw
from paceline.bench.prepare import EnginePlan, place, prepare
from paceline.bench.report import Result, to_json, to_text
from paceline.bench.rounds import run_rounds
from paceline.bench.variants import Comparison, Variant, make_comparison
from paceline.bench.workload import (
    SyntheticRequests,
    Workload,
    WorkloadSource,
    check_request,
    seeded,
)
from paceline.cli.flags import (
    add_engine_flags,
    add_sampling_flags,
    engine_assignment,
    positive_number,
    whole_number,
)
from paceline.cli.main import INTERRUPTED
from paceline.cli.parser import Parser, given
from paceline.cli.prompts import PromptItem, chat_warning, read_prompt_file
from paceline.cli.requests import token_ids
from paceline.config import EngineConfig
from paceline.log import configure_logging
from paceline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.tokenizer import Tokenizer

_EXAMPLES = """\
examples:
  which draft length pays, on your prompts
    paceline bench MODEL --speculative-model DRAFTER --k 0,1,3,5 --file prompts.txt
  static against continuous batching, one request in four long
    paceline bench MODEL --batching static,continuous --max-num-seqs 16 --num-requests 64 \\
        --input-len 64 --output-len mix:0.75=32-64,0.25=512
  any engine argument; the same value on both sides shows the noise of the machine
    paceline bench MODEL --a block_size=16 --b block_size=32
  nothing to download: the tiny pair in the package
    paceline bench paceline/demo --speculative-model paceline/demo-draft --k 0,1,3,5,8 \\
        --temperature 0
"""

_NUM_REQUESTS = 32
_MOST_REQUESTS = 10**6
_INPUT_LEN = "128"
_OUTPUT_LEN = "64"
_MAX_TOKENS = 256  # of a file's prompts, as `paceline generate`
_ROUNDS = 5
# What would end a synthetic output elsewhere than at its length.
_ENDINGS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")


def run(argv: Sequence[str]) -> int:
    """Measure, and print as asked. Returns 0, or 130 if it was interrupted."""
    parser = _parser()
    options = parser.parse(argv)
    engine, sampling = given(options, "engine"), given(options, "sampling")
    _take_model(parser, options, engine)
    comparison = _comparison(options, engine)
    seed = engine.get("seed", 0)
    SamplingParams(**sampling)  # refuses wrong values
    items = _file_items(parser, options, sampling)
    source = _workload_source(parser, options, items, sampling, seed)
    if options.plot is not None:
        check_plot(options.plot, options.k)
    configure_logging(logging.ERROR)  # the warnings are shown once, below
    plans = prepare(comparison.engines, source)
    placement = place(plans, options.processes)
    progress = _Progress(comparison.variants, options.rounds, quiet=options.quiet)
    progress.warn(plans, items)
    progress.loading(len(plans))
    rounds: list[list[Figures]] = []
    lengths = [[v.k for v in comparison.variants if v.engine == i] for i in range(len(plans))]
    engines = EngineSet(plans, lengths, placement)
    status = 0
    try:
        with engines:
            for figures in run_rounds(
                engines, plans, comparison.variants, options.rounds, progress.ran
            ):
                rounds.append(figures)
                progress.round_ended(len(rounds), figures)
    except KeyboardInterrupt:
        if not rounds:
            raise
        status = INTERRUPTED
    workload = _describe_workload(options, sampling, seed, plans[0].workload)
    machines = [engines.machines[place] for place in range(len(plans))]
    result = Result(comparison.variants, plans, placement, machines, workload, rounds)
    if not options.json:
        print(to_text(result))
    if options.json or not (options.no_json or sys.stdout.isatty()):
        # One line and the last, so that programs find it behind the tables; of 20,000 characters.
        text = json.dumps(to_json(result), ensure_ascii=False)
        print(text if options.json else f"\n{text}")
    if options.plot is not None:
        draw(result, options.plot)
    return status


# ---- what the user wrote -------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="paceline bench",
        usage="paceline bench MODEL [--k 0,3,5] [--batching static,continuous] "
        "[--a NAME=VALUE --b NAME=VALUE] [flags]",
        description="Compare variants of an engine: draft lengths, batching, any argument. They "
        "run the same requests in interleaved rounds. A table for people, then a line of JSON.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("positional", nargs="*", metavar="MODEL", help="the same as --model MODEL")
    _add_comparison_flags(parser)
    _add_workload_flags(parser)
    _add_output_flags(parser)
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return parser


def _add_comparison_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what is compared (a product, if several are given)")
    group.add_argument(
        "--k",
        type=_draft_lengths,
        default=[],
        metavar="K,K,...",
        help="draft lengths; 0 is off (default: the engine's own)",
    )
    for side, other in (("a", "b"), ("b", "a")):
        group.add_argument(
            f"--{side}",
            type=engine_assignment,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"engine argument of side {side}, against side {other}; as often as needed",
        )
    group.add_argument(
        "--rounds",
        type=positive_number,
        default=_ROUNDS,
        metavar="N",
        help="interleaved rounds that are counted (default: %(default)s)",
    )
    group.add_argument(
        "--processes",
        choices=("auto", "shared", "separate"),
        default="auto",
        help="several engines in one process, or in one each; auto: in one if they fit into "
        "memory, else one each, taking turns (default: auto)",
    )


def _add_workload_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what is run")
    group.add_argument(
        "--file", type=Path, help="prompts, as for `paceline generate` (default: random tokens)"
    )
    group.add_argument("--chat", action="store_true", help="send each text as a user's message")
    group.add_argument(
        "--num-requests",
        type=_request_count,
        metavar="N",
        help=f"requests a round (default: the file's prompts once, else {_NUM_REQUESTS})",
    )
    for name, default in (("input", _INPUT_LEN), ("output", _OUTPUT_LEN)):
        group.add_argument(
            f"--{name}-len",
            metavar="LENGTHS",
            help=f"tokens of synthetic {name}s: {FORMS} (default: {default})",
        )


def _add_output_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what comes out")
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--json",
        action="store_true",
        help="only the line of JSON (default: tables, then the line, which a terminal is spared)",
    )
    form.add_argument("--no-json", action="store_true", help="only the tables")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw draft length against tokens/s, and their ratio to the first variant",
    )
    group.add_argument("--quiet", action="store_true", help="no progress, no warnings")


def _draft_lengths(text: str) -> list[int]:
    try:
        ks = [whole_number(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        ks = [-1]
    if min(ks) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of draft lengths such as 0,3,5")
    return ks


def _request_count(text: str) -> int:
    count = positive_number(text)
    if count > _MOST_REQUESTS:
        raise argparse.ArgumentTypeError(f"{count} requests a round are more than {_MOST_REQUESTS}")
    return count


def _take_model(parser: Parser, options: argparse.Namespace, engine: dict[str, Any]) -> None:
    if "model" not in engine and options.positional:
        engine["model"] = options.positional.pop(0)
    if "model" not in engine:
        parser.error("no model. hint: `paceline bench MODEL`")
    if options.positional:
        parser.error(
            f"one model at a time; what is `{options.positional[0]}`? hint: --b model=OTHER "
            "compares two, --file FILE reads prompts"
        )


def _comparison(options: argparse.Namespace, engine: dict[str, Any]) -> Comparison:
    # A cache that earlier rounds have filled would spare later ones their prefill.
    engine.setdefault("enable_prefix_caching", False)
    sides = {"a": dict(options.a), "b": dict(options.b)} if options.a or options.b else {}
    batchings: list[str] = []
    if "," in engine.get("batching", ""):
        batchings = engine.pop("batching").split(",")
    return make_comparison(engine, sides, batchings, options.k)


# ---- requests ------------------------------------------------------------------------------------


def _file_items(
    parser: Parser, options: argparse.Namespace, sampling: dict[str, Any]
) -> list[PromptItem]:
    """The prompts of --file, checked as far as that needs no model; empty without it."""
    if options.file is None:
        if options.chat:
            parser.error("--chat is for the texts of a file. hint: give one with --file")
        return []
    for name in ("input", "output"):
        if getattr(options, f"{name}_len") is not None:
            hint = "--max-tokens limits outputs" if name == "output" else "leave it out"
            parser.error(f"--{name}-len is for synthetic requests, not for --file. hint: {hint}")
    items = read_prompt_file(options.file)
    if not items:
        parser.error(f"`{options.file}` has no prompts. hint: one a line, or JSON lines")
    for item in items:
        item.sampling_with(sampling)
    if options.chat:
        items = [item.as_chat() for item in items]
    return items[: options.num_requests]


def _workload_source(
    parser: Parser,
    options: argparse.Namespace,
    items: Sequence[PromptItem],
    sampling: dict[str, Any],
    seed: int,
) -> WorkloadSource:
    if items:
        count = options.num_requests or len(items)
        return functools.partial(_file_workload, items, count, sampling, seed)
    for name in _ENDINGS:
        if name in sampling:
            parser.error(
                f"--{name.replace('_', '-')} is for prompts of a file: synthetic outputs end at "
                "their length. hint: set it with --output-len"
            )
    return SyntheticRequests(
        options.num_requests or _NUM_REQUESTS,
        parse_lengths(options.input_len or _INPUT_LEN),
        parse_lengths(options.output_len or _OUTPUT_LEN),
        seed,
        sampling,
    )


def _file_workload(
    items: Sequence[PromptItem],
    count: int,
    sampling: dict[str, Any],
    seed: int,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
) -> Workload:
    defaults = {"max_tokens": _MAX_TOKENS, **config.default_sampling, **sampling}
    prompts, params = [], []
    for item in items:
        params.append(item.sampling_with(defaults))
        with item.located():
            prompts.append(token_ids(item, tokenizer))
            check_request(prompts[-1], params[-1], config, tokenizer)
    places = [number % len(items) for number in range(count)]
    return Workload([prompts[i] for i in places], seeded([params[i] for i in places], seed))


def _describe_workload(
    options: argparse.Namespace, sampling: dict[str, Any], seed: int, workload: Workload
) -> dict[str, Any]:
    """As JSON: enough to run it again."""
    synthetic = options.file is None
    return {
        "num_requests": len(workload.prompts),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "file": None if synthetic else str(options.file),
        "chat": options.chat,
        "input_len": (options.input_len or _INPUT_LEN) if synthetic else None,
        "output_len": (options.output_len or _OUTPUT_LEN) if synthetic else None,
        "seed": seed,
        "sampling": sampling,
    }


# ---- while it runs -------------------------------------------------------------------------------


class _Progress:
    """Warnings and progress on standard error.

    A terminal gets a line a round. A file or a pipe, which people follow to see that a long run
    goes on, gets a line a run.
    """

    def __init__(self, variants: Sequence[Variant], num_rounds: int, *, quiet: bool) -> None:
        self._variants = variants
        self._num_rounds = num_rounds
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()

    def warn(self, plans: Sequence[EnginePlan], items: Sequence[PromptItem]) -> None:
        """What the checks warned of, and prompts that the models do not understand."""
        warnings = [warning for plan in plans for warning in plan.warnings]
        chats = [chat_warning(plan.arguments["model"], items) for plan in plans]
        for warning in dict.fromkeys([*warnings, *filter(None, chats)]):
            self._print(f"paceline: warning: {warning}")

    def loading(self, num_engines: int) -> None:
        engines = "the engine" if num_engines == 1 else f"{num_engines} engines"
        self._print(f"loading {engines}; the first pass of each draft length is not counted")

    def ran(self, number: int, variant: Variant, figures: Figures) -> None:
        """A variant's run in round ``number``, counted from 0."""
        if not self._terminal:
            speed = f"{figures.tokens_per_second:.0f} tokens/s"
            self._print(f"round {number + 1} of {self._num_rounds}, {variant.name}: {speed}")

    def round_ended(self, count: int, figures: Sequence[Figures]) -> None:
        if self._terminal:
            speeds = ", ".join(
                f"{variant.name} {one.tokens_per_second:.0f}"
                for variant, one in zip(self._variants, figures, strict=True)
            )
            self._print(f"round {count} of {self._num_rounds}, tokens/s: {speeds}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(line, file=sys.stderr, flush=True)
