"""``paceline synth``: a target and a drafter of published shapes, without a download."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.check.report import format_bytes, format_count
from paceline.cli.flags import decimal_number, whole_number
from paceline.cli.parser import Parser
from paceline.synth.shapes import DTYPE_BYTES, SHAPES

if TYPE_CHECKING:
    from paceline.synth.pair import PairPlan, Written

_WORTHWHILE = 1.05
_NO_GAIN = """\
this pair tests that drafting works, not that it pays: by the weights that a step reads, it decodes
at best {gain:.2f} times as fast as the target alone. A bench that can show a gain:
  paceline bench paceline/demo --speculative-model paceline/demo-draft --k 0,1,3,5 --temperature 0
or a pair with a smaller drafter or a higher acceptance, such as
  paceline synth --target qwen2.5-1.5b --drafter qwen2.5-0.5b --acceptance 0.9 --out DIR"""


def run(argv: Sequence[str]) -> int:
    """Write the models and say what to try with them. Returns the exit status."""
    parser = _parser()
    namespace = parser.parse(argv)
    # Imports torch, so a look at --help stays quick.
    from paceline.synth.pair import plan_pair, write_pair

    plan = plan_pair(
        namespace.target,
        None if namespace.drafter == "none" else namespace.drafter,
        namespace.out,
        acceptance=namespace.acceptance,
        seed=namespace.seed,
        dtype=namespace.dtype,
        device=namespace.device,
        force=namespace.force,
    )
    size = format_bytes(plan.weight_bytes)
    print(f"writing {size} of weights to {plan.out}, random numbers from {plan.device}")
    write_pair(plan, on_written=_print_written)
    _print_end(plan)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="paceline synth",
        usage="paceline synth --target SHAPE [--drafter SHAPE] [--acceptance X] --out DIR [flags]",
        description="Write DIR/target and DIR/drafter: models of published shapes with random "
        "weights, whose greedy output is a fixed walk through the vocabulary and whose drafts are "
        "accepted at exactly the rate you set. They measure speed, they write no sense.",
        epilog=f"shapes: {', '.join(SHAPES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, metavar="SHAPE", help="shape of the target")
    parser.add_argument(
        "--drafter", default="none", metavar="SHAPE", help="shape of the drafter (default: none)"
    )
    parser.add_argument(
        "--acceptance",
        type=decimal_number,
        metavar="X",
        help="share of drafts that the target accepts, given that those before were (default: 0.8)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory for them")
    parser.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        metavar="N",
        help="seed of map and weights (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        metavar="TYPE",
        help=f"one of {', '.join(DTYPE_BYTES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="where random numbers are made, cuda or cpu (default: cuda if there is one)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace DIR/target and DIR/drafter if they exist"
    )
    return parser


def _print_written(written: Written) -> None:
    parameters = format_count(written.shape.num_parameters)
    size = format_bytes(written.nbytes)
    print(
        f"  {written.path}  {written.shape.name}, {parameters} parameters, {size}, "
        f"{written.seconds:.1f} s",
        flush=True,
    )


def _print_end(plan: PairPlan) -> None:
    target, gain = plan.out / "target", plan.best_gain
    if gain is None:
        print(f"outputs go through {plan.cycle_length} ids before they repeat")
        print(f"try next:\n  paceline check {target}\n  paceline bench {target}")
        return
    share = plan.agreeing / plan.cycle_length
    print(
        f"conditional acceptance {share:.6g}: the drafter agrees at {plan.agreeing} of the "
        f"{plan.cycle_length} ids that greedy outputs go through"
    )
    pair = f"{target} --speculative-model {plan.out / 'drafter'}"
    print(f"try next:\n  paceline check {pair} --num-speculative-tokens 5")
    if gain >= _WORTHWHILE:
        print(f"  paceline bench {pair} --k 0,1,3,5")
    else:
        print(_NO_GAIN.format(gain=gain))
