"""The file of ``--config``: YAML, JSON and TOML, and what the command line says against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.cli.config_file import read_config_file
from paceline.errors import ConfigError
from paceline.server.settings import ServerSettings

Made = list[tuple[dict[str, Any], ServerSettings]]

FILES = {
    "yaml": """\
# what a program of another engine left
model: paceline/demo
port: 1234
served-model-name: [a, b]
enable_prefix_caching: no
restart-engine: true
speculative_config:
  method: ngram
  num_speculative_tokens: 2
max_num_seqs: 7
host:
""",
    "json": """{
    "model": "paceline/demo",
    "port": 1234,
    "served-model-name": ["a", "b"],
    "enable_prefix_caching": false,
    "restart-engine": true,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    "max_num_seqs": 7,
    "host": null
}""",
    "toml": """\
model = "paceline/demo"
port = 1234
served-model-name = ["a", "b"]
enable_prefix_caching = false
restart-engine = true
max_num_seqs = 7
[speculative_config]
method = "ngram"
num_speculative_tokens = 2
""",
}


@pytest.mark.parametrize("kind", FILES)
def test_flags_from_a_file_and_those_that_win(kind: str, tmp_path: Path, made: Made) -> None:
    path = tmp_path / f"flags.{kind}"
    path.write_text(FILES[kind])
    assert main.main(["serve", "--config", str(path), "--max-num-seqs", "9"]) == 0
    assert main.main(["serve", "other", "--no-restart-engine", f"--config={path}"]) == 0
    (engine, settings), (second, second_settings) = made
    assert engine["model"] == "paceline/demo"
    assert engine["max_num_seqs"] == 9
    assert engine["enable_prefix_caching"] is False
    assert json.loads(engine["speculative_config"])["num_speculative_tokens"] == 2
    assert (settings.port, settings.served_model_name) == (1234, ("a", "b"))
    assert settings.restart_engine
    assert second["max_num_seqs"] == 7
    assert not second_settings.restart_engine


def test_keys_on_the_command_line_win_over_the_files_object(tmp_path: Path, made: Made) -> None:
    path = tmp_path / "flags.json"
    draft = {"method": "ngram", "num_speculative_tokens": 2}
    path.write_text(json.dumps({"speculative_config": draft, "served_model_name": ["a"]}))
    keys = ["--speculative_config.model", "x", "--served_model_name", "b"]
    assert main.main(["serve", "m", "--config", str(path), *keys]) == 0
    path.write_text(json.dumps({"speculative-config.num_speculative_tokens": 3}))
    assert main.main(["serve", "m", "--config", str(path)]) == 0
    (engine, settings), (from_file, _) = made
    assert json.loads(engine["speculative_config"]) == {"model": "x"}
    assert settings.served_model_name == ("b",)
    assert json.loads(from_file["speculative_config"]) == {"num_speculative_tokens": 3}


def test_a_key_that_begins_with_zero(tmp_path: Path, made: Made) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("model: paceline/demo\napi_key: [0123, 5]\nmax_num_seqs: 12\nport: 0")
    assert main.main(["serve", "--config", str(path)]) == 0
    engine, settings = made[0]
    assert settings.api_key == ("0123", "5")
    assert (settings.port, engine["max_num_seqs"]) == (0, 12)


def test_a_file_with_a_mark_at_its_start(tmp_path: Path, made: Made) -> None:
    path = tmp_path / "flags.json"
    path.write_text('{"model": "paceline/demo", "port": 1234}', encoding="utf-8-sig")
    assert main.main(["serve", "--config", str(path)]) == 0
    assert made[0][1].port == 1234


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("flags.toml", "[server]\nport = 1", "unknown argument `--server`"),
        ("flags.json", '{"kv_cache_memory_bytes": 1e8}', "'100000000.0' is not a whole number of"),
    ],
)
def test_values_that_no_flag_has(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(SystemExit):
        main.main(["serve", "paceline/demo", "--config", str(path)])
    assert message in capsys.readouterr().err


def test_a_file_with_a_misspelt_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flags.json"
    path.write_text('{"prot": 1}')
    with pytest.raises(SystemExit):
        main.main(["serve", "paceline/demo", "--config", str(path)])
    assert "did you mean `--port`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("flags.ini", "port=1", "none of the endings .yaml, .yml, .json, .toml"),
        ("flags.yaml", "port: [1", "cannot be read: line 1: expected"),
        ("flags.yaml", "a: 1\n\tb: 2", "cannot be read: line 2: found character"),
        ("flags.yaml", "port: !!python/name:os.system", "cannot be read: line 1: could not"),
        ("flags.yml", "- port", "no settings by name"),
        ("flags.yml", "", "no settings by name"),
        ("flags.yml", "1: 2", "no settings by name"),
        ("flags.json", "{", "cannot be read"),
        ("flags.json", "[" * 100_000, "cannot be read"),
        ("flags.json", "[1]", "no settings by name"),
        ("flags.json", '{"port": 1, "port": 2}', "`port` is there twice"),
        ("flags.yaml", "port: 1\nhost: a\nport: 2", "`port` is there twice"),
        ("flags.toml", "port 1", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_config_file(path)


@pytest.mark.parametrize("name", ["config", "help"])
def test_what_only_the_command_line_has(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(f"{name}: x\nport: y")
    with pytest.raises(SystemExit):
        main.main(["serve", "m", "--config", str(path)])
    message = capsys.readouterr().err
    assert f"a configuration file cannot have `{name}`" in message
    assert "--port: 'y'" in message


def test_yamls_words_for_true_and_false(
    tmp_path: Path, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("latency_path: off\n")
    with pytest.raises(SystemExit):
        main.main(["serve", "m", "--config", str(path)])
    assert "`latency_path` is false in the configuration file" in capsys.readouterr().err
    path.write_text(
        "latency_path: 'off'\ndry-run: no\ncompilation_config: {}\ntrust-remote-code: no"
    )
    assert main.main(["serve", "m", "--config", str(path)]) == 0
    assert made[0][0] == {
        "model": "m",
        "latency_path": "off",
        "compilation_config": {},
        "trust_remote_code": False,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: [8080, 9090]", "`port` is a list"),
        ("port: []", "`port` is a list"),
        ("chat_template: [a]", "`chat_template` is a list"),
        ("api_key: [first, yes]", "`api_key` is true"),
        ("api_key: [null]", "`api_key` is [null]"),
        ("served_model_name: {a: b}", '`served_model_name` is {"a": "b"}'),
        ("allowed_headers: [X-A, '*']", "allowed_headers=['X-A', '*']"),
        ("max-queue: 8\nmax_queue: 64", "`max_queue` and `max-queue` are one setting"),
    ],
)
def test_no_value_of_a_file_is_lost(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(content)
    assert main.main(["serve", "paceline/demo", "--dry-run", "--config", str(path)]) == 1
    assert message in capsys.readouterr().out


def test_lists_of_what_changes_nothing(tmp_path: Path, made: Made) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("allowed_headers: ['*']\nlogits_processors: []\napi_key: [a, 5]")
    assert main.main(["serve", "m", "--config", str(path)]) == 0
    assert made[0][1].api_key == ("a", "5")


def test_every_wrong_setting_of_a_file_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("port: 70000\nmax-num-seqs: many\nresponse_role: bot\nuds: /x\n")
    with pytest.raises(SystemExit):
        main.main(["serve", "m", "--config", str(path)])
    message = capsys.readouterr().err
    assert "4 problems" in message
    for named in ("`port`", "--max-num-seqs", "response_role='bot'", "`--uds`"):
        assert named in message
