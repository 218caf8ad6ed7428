"""Draft length against tokens per second, as a picture. matplotlib is in the extra ``plot``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from paceline.bench.report import Result
from paceline.errors import ConfigError


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
            '--plot needs matplotlib, which is not installed. hint: pip install "paceline[plot]"'
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
        existed = path.exists()
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
    """Write the picture: a line an engine, its points with the bounds of the median."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    summaries = result.summaries()
    for index, plan in enumerate(result.plans):
        points = sorted(
            (variant.k, summary.tokens_per_second)
            for variant, summary in zip(result.variants, summaries, strict=True)
            if variant.engine == index and variant.k is not None
        )
        speeds = [speed for _, speed in points]
        below = [speed.median - speed.low for speed in speeds]
        above = [speed.high - speed.median for speed in speeds]
        axes.errorbar(
            [k for k, _ in points],
            [speed.median for speed in speeds],
            yerr=(below, above),
            marker="o",
            capsize=3,
            label=plan.spec.name or str(plan.arguments["model"]),
        )
    axes.set_title(f"{result.workload['num_requests']} requests at once, {result.temperature()}")
    axes.set_xlabel("draft length k")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
