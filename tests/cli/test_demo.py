"""``paceline demo``: what it says of noise, of the machine, and that it ends well."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.bench.spread import Spread
from paceline.cli import demo
from paceline.cli.main import main


@pytest.mark.parametrize(
    ("gain", "says"),
    [
        (Spread(1.4, 0.9, 1.6), "the rounds disagree on whether it pays"),
        (Spread(1.4, 1.2, 1.6), "a gain in every round"),
        (Spread(0.8, 0.7, 0.9), "a loss in every round"),
    ],
)
def test_the_verdict_follows_the_rounds(gain: Spread, says: str) -> None:
    line = demo.verdict("temperature 0", 5, gain)
    assert line.endswith(f"as fast as k = 0: {says}")
    assert f"k = 5 is {gain.median:.2f} times ({gain.low:.2f} to {gain.high:.2f})" in line


def test_help_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "The whole story in half a minute" in out
    assert "`" not in out


def test_the_story(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it, with fewer lengths and rounds."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(demo, "LENGTHS", (0, 5))
    monkeypatch.setattr(demo, "ROUNDS", 2)
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "float32, 1 thread, on " in out
    assert "== One completion, streamed: k = 5, temperature 0.7\n" in out
    assert "median of 2 interleaved rounds (min to max)" in out
    number = r"\d+(?:\.\d+)?"
    spread = rf"{number}x? \({number} to {number}\)"
    assert len(re.findall(rf"^    0  {spread} +1 +1\.00$", out, re.MULTILINE)) == 2
    assert len(re.findall(rf"^    [35]  {spread} +{spread} +[\d.]+(?:  | )[\d ]+$", out, re.M)) == 2
    for temperature, k in ((0, 5), (1, 3)):
        assert f"  temperature {temperature}: 128 tokens with k = 0 and k = {k}: identical\n" in out
        assert re.search(rf"^  temperature {temperature}: k = {k} is .* as fast as k", out, re.M)
    assert re.search(rf"  continuous is {number} times \({number} to {number}\) as fast", out)


def test_a_changed_text_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class One:
        def __init__(self, ids: list[int]) -> None:
            self.token_ids = [ids]

    same: Any = {0: [[One([1, 2])]], 3: [[One([1, 2])]]}
    other: Any = {0: [[One([1, 2])]], 3: [[One([1, 3])]]}
    assert demo._same_text(same, same)
    assert not demo._same_text(same, other)
    assert "k = 3: DIFFERENT: please report this" in capsys.readouterr().out
