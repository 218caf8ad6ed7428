"""``paceline synth``: what it prints, refuses and writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.synth.shapes import SHAPES


def test_a_pair_and_what_to_do_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pair"
    argv = ["synth", "--target", "tiny", "--drafter", "tiny", "--acceptance", "0.7"]
    assert main([*argv, "--out", str(out), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "random numbers from cpu" in text
    assert f"{out}/target  tiny, 935.0 k parameters, 1.78 MiB" in text
    assert "conditional acceptance 0.7: the drafter agrees at 2618 of the 3740 ids" in text
    assert f"paceline bench {out}/target --speculative-model {out}/drafter --k 0,1,3,5" in text
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


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["--out", "x"], 2, "required: --target"),
        (["--target", "tiny"], 2, "required: --out"),
        (["--target", "tiny", "--out", "x", "--acceptance", "most"], 2, "invalid float value"),
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
