"""Draft length against tokens per second, as a picture. matplotlib is in the extra ``plot``."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.figures import Summary
from paceline.bench.report import Result
from paceline.bench.spread import Spread, bounds_name
from paceline.errors import ConfigError

_WIDTH = 130  # of a line of small print, in characters


def check_plot(path: Path, ks: Sequence[int]) -> None:
    """Find out before measuring whether ``draw`` will work.

    Raises:
        ConfigError: fewer than two draft lengths, no matplotlib, or no way to write the file.
    """
    if len(ks) < 2:
        raise ConfigError(
            "--plot draws draft length against tokens/s, and there are fewer than two draft "
            "lengths. hint: give them with --k, such as --k 0,1,3,5"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed. hint: run "
            '`pip install -c constraints.txt -e ".[plot]"` in your clone of Paceline'
        )
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ConfigError(
            f"--plot cannot write the format of `{path}`. hint: end the name in .png, .svg or .pdf"
        )
    _check_place(path)


def _check_place(path: Path) -> None:
    """Write nothing to the file: permissions do not tell all, as for root or a full file system."""
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"--plot: there is no directory `{path.parent}`. hint: make it first")
        existed = path.exists() or path.is_symlink()
        if existed and not path.is_file():
            raise ConfigError(
                f"--plot: `{path}` cannot be written: it is not a file. hint: choose another place"
            )
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--plot: `{path}` cannot be written: {error.strerror or error}. hint: choose another "
            "place"
        ) from error


def draw(result: Result, path: Path) -> None:
    """Write the picture: a line an engine, its points with the bounds of the median.

    Beside the speeds stands the ratio to the first variant, taken within each round. A slow round
    spreads the speeds of all draft lengths alike, so that which of them is faster, and whether any
    pays at all, is seen from the ratio alone.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    first = result.variants[0].name
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    speed, ratio = figure.subplots(1, 2)
    for index, plan in enumerate(result.plans):
        points = _points(result, index)
        name = plan.spec.name or str(plan.arguments["model"])
        _line(speed, [(k, one.tokens_per_second) for k, one in points], name)
        _line(ratio, [(k, one.ratio) for k, one in points], name)
    speed.set_ylabel("tokens/s")
    speed.set_ylim(bottom=0)
    ratio.set_ylabel(f"times as fast as {first}, within a round")
    ratio.axhline(1, color="black", linewidth=0.8, linestyle="--")
    for axes in (speed, ratio):
        axes.set_xlabel("draft length k")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    if len(result.plans) > 1:
        speed.legend()
    requests = result.workload["num_requests"]
    many = f"{requests} requests at once" if requests > 1 else "one request"
    figure.suptitle(f"Draft length: {many}, {result.temperature()}")
    # Plain text: a name may hold what matplotlib takes for a formula.
    figure.supxlabel(_conditions(result), fontsize=8, color="0.35", parse_math=False)
    figure.savefig(path, dpi=150)


def _points(result: Result, engine: int) -> list[tuple[int, Summary]]:
    """Draft lengths of an engine in ascending order, with what they came to."""
    points = [
        (variant.k, summary)
        for variant, summary in zip(result.variants, result.summaries(), strict=True)
        if variant.engine == engine and variant.k is not None
    ]
    return sorted(points, key=lambda point: point[0])


def _line(axes: Any, points: Sequence[tuple[int, Spread]], name: str) -> None:
    """Medians with whiskers from low to high."""
    axes.errorbar(
        [k for k, _ in points],
        [one.median for _, one in points],
        yerr=(
            [one.median - one.low for _, one in points],
            [one.high - one.median for _, one in points],
        ),
        marker="o",
        capsize=3,
        label=name,
    )


def _conditions(result: Result) -> str:
    """What it takes to understand the picture away from the tables, in two or three lines."""
    models = dict.fromkeys(
        f"{plan.arguments['model']} with {plan.arguments.get('speculative_model') or 'no drafter'} "
        f"in {plan.config.model.dtype}"
        for plan in result.plans
    )
    machine = result.machines[0]
    device = f"{machine['device_name']}, {result.threads()} of {machine['cores']} cores"
    count = len(result.rounds)
    if count == 1:
        rounds = f"one round, {bounds_name(count)}"
    else:
        rounds = f"medians of {count} interleaved rounds, whiskers: {bounds_name(count)}"
    lines = [*models, f"{device}; {rounds}"]
    return "\n".join(textwrap.fill(line, _WIDTH) for line in lines)
