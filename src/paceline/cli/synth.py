"""``paceline synth``: a target and a drafter of published shapes, without a download."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.check.report import format_bytes, format_count
from paceline.cli.flags import Parser
from paceline.synth.shapes import DTYPE_BYTES, SHAPES

if TYPE_CHECKING:
    from paceline.synth.pair import PairPlan, Written


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
    print(f"writing {format_bytes(plan.nbytes)} to {plan.out}, random numbers from {plan.device}")
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
        type=float,
        metavar="X",
        help="share of drafts that the target accepts, given that those before were (default: 0.8)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where they go")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of map and weights")
    parser.add_argument(
        "--dtype", default="bfloat16", metavar="TYPE", help=f"one of {', '.join(DTYPE_BYTES)}"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="cuda or cpu, for random numbers (default: cuda if any)"
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
    target = plan.out / "target"
    models = str(target)
    if plan.drafter is not None:
        models += f" --speculative-model {plan.out / 'drafter'}"
        share = plan.agreeing / plan.cycle_length
        print(
            f"conditional acceptance {share:.6g}: the drafter agrees at {plan.agreeing} of the "
            f"{plan.cycle_length} ids that outputs go through"
        )
        lengths = " --k 0,1,3,5"
        check = f"{models} --num-speculative-tokens 5"
    else:
        print(f"outputs go through {plan.cycle_length} ids before they repeat")
        lengths, check = "", models
    print(f"try next:\n  paceline check {check}\n  paceline bench {models}{lengths}")
