"""``paceline synth``: what it prints, refuses and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.synth.shapes import SHAPES


def test_a_pair_and_what_to_do_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pair"
    argv = ["synth", "--target", "tiny", "--drafter", "tiny", "--acceptance", "0.7"]
    assert main([*argv, "--out", str(out), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "writing 3.57 MiB of weights to" in text
    assert "random numbers from cpu" in text
    assert f"{out}/target  tiny, 935.0 k parameters, 1.78 MiB" in text
    assert "conditional acceptance 0.7: the drafter agrees at 2618 of the 3740 ids" in text
    # Drafting by a model as large as the target cannot pay, so no bench of it is proposed.
    assert f"paceline bench {out}" not in text
    assert "at best 0.85 times as fast" in text
    assert "paceline bench paceline/demo --speculative-model paceline/demo-draft" in text
    # The check it proposes finds no fault.
    proposed = next(line.split()[1:] for line in text.splitlines() if "paceline check" in line)
    assert main([*proposed, "--max-num-seqs", "4"]) == 0
    capsys.readouterr()
    assert main([*argv, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"paceline: error: `{out}` is not empty: it holds drafter, target.\n")
    assert "  hint: " in error
    assert main([*argv, "--out", str(out), "--force"]) == 0


def test_a_target_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["synth", "--target", "tiny", "--drafter", "none", "--out", str(tmp_path / "one")]
    assert main([*argv, "--dtype", "float16"]) == 0
    text = capsys.readouterr().out
    assert "speculative" not in text
    assert "3740 ids" in text
    assert not (tmp_path / "one" / "drafter").exists()
    generate = ["generate", str(tmp_path / "one" / "target"), " bako", "--temperature", "0"]
    generate += ["--max-tokens", "20", "--max-num-seqs", "4", "--dtype", "float32", "--quiet"]
    assert main(generate) == 0
    words = capsys.readouterr().out.split()
    assert len(set(words)) == 20


def test_a_pair_that_can_gain_is_to_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = replace(SHAPES["tiny"], name="deep", num_layers=40)
    monkeypatch.setitem(SHAPES, "deep", deep)
    argv = ["synth", "--target", "deep", "--drafter", "tiny", "--out", str(tmp_path), "--force"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    pair = f"{tmp_path}/target --speculative-model {tmp_path}/drafter"
    assert text.endswith(f"  paceline bench {pair} --k 0,1,3,5\n")


def test_a_bench_of_a_pair_is_greedy_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["synth", "--target", "tiny", "--drafter", "tiny", "--acceptance", "1"]
    assert main([*argv, "--out", str(tmp_path), "--device", "cpu"]) == 0
    capsys.readouterr()
    argv = ["bench", f"{tmp_path}/target", "--speculative-model", f"{tmp_path}/drafter"]
    argv += ["--k", "0,2", "--rounds", "1", "--num-requests", "2", "--input-len", "4"]
    argv += ["--output-len", "8", "--max-num-seqs", "4", "--dtype", "float32", "--quiet"]
    assert main(argv) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    tables, result = " ".join(" ".join(lines).split()), json.loads(last)
    assert result["workload"]["sampling"] == {}
    assert result["workload"]["temperatures"] == [0]
    assert "temperature 0 (greedy), the model's own" in tables
    assert result["variants"][1]["acceptance"]["conditional"] == [1, 1]
    assert "A pair of `paceline synth` accepts at the rate it was made with" in tables


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["--out", "x"], 2, "required: --target"),
        (["--target", "tiny"], 2, "required: --out"),
        (["--target", "tiny", "--out", "x", "--acceptance", "most"], 2, "'most' is not a number"),
        (["--target", "tiny", "--out", "x", "--seed", "１"], 2, "'１' is not a whole number"),
        (["--target", "tiny", "--out", "x", "--draft", "tiny"], 2, "did you mean `--drafter`"),
        (["--target", "tinny", "--out", "x"], 1, "did you mean `tiny`"),
        (["--target", "tiny", "--out", "x", "--acceptance", "0.5"], 1, "needs a drafter"),
    ],
)
def test_wrong_usage(
    argv: list[str],
    status: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if status == 2:
        with pytest.raises(SystemExit) as ended:
            main(["synth", *argv])
        assert ended.value.code == 2
    else:
        assert main(["synth", *argv]) == status
    error = capsys.readouterr().err
    assert error.startswith("paceline: error: ")
    assert says in error
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_shapes_without_torch() -> None:
    code = (
        "import sys\nfrom paceline.cli.main import main\ntry:\n    main(['synth', '--help'])\n"
        "except SystemExit:\n    print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert lines[-1] == "False"
    assert all(name in result.stdout for name in SHAPES)
