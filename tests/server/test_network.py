"""Hosts and files for HTTPS that a server cannot use are found before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import ConfigError
from paceline.server.network import check_host, check_tls, listen
from paceline.server.settings import ServerSettings
from server.certificates import CERTIFICATE, ENCRYPTED_KEY, KEY, OTHER_KEY, write


def test_a_certificate_and_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tls(ServerSettings())
    certificate, key = write(tmp_path, "c", CERTIFICATE), write(tmp_path, "k", KEY)
    check_tls(ServerSettings(ssl_certfile=certificate, ssl_keyfile=key))
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell expands this, a configuration file not
    check_tls(ServerSettings(ssl_certfile="~/c", ssl_keyfile="~/k"))


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        (CERTIFICATE, None, r"`ssl_keyfile` \S*/none cannot be read: No such file"),
        (None, KEY, r"`ssl_certfile` \S*/none cannot be read: No such file"),
        (
            None,
            None,
            r"2 problems:\s+1. `ssl_certfile`.*\s+.*\s+2. `ssl_keyfile` \S*/none",
        ),
        (CERTIFICATE, OTHER_KEY, "no certificate and its key .*MISMATCH"),
        (CERTIFICATE, ENCRYPTED_KEY, "is encrypted, and nobody is asked"),
        (CERTIFICATE, "", "no certificate and its key"),
        ("port: 1", KEY, "no certificate and its key"),
        (KEY, CERTIFICATE, "no certificate and its key"),
    ],
)
def test_files_that_are_none(
    certificate: str | None, key: str | None, message: str, tmp_path: Path
) -> None:
    paths = [
        str(tmp_path / "none") if content is None else write(tmp_path, name, content)
        for name, content in (("c", certificate), ("k", key))
    ]
    with pytest.raises(ConfigError, match=message):
        check_tls(ServerSettings(ssl_certfile=paths[0], ssl_keyfile=paths[1]))


def test_a_host_that_can_be_had() -> None:
    check_host(ServerSettings())
    with listen(ServerSettings(port=0)) as taken:
        check_host(ServerSettings(port=taken.getsockname()[1]))  # a server may run there today


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "is no address of this machine"),
        ("no.such.invalid", "there is no address"),
        ("a..b", "there is no address"),
        ("a" * 70, "there is no address"),
    ],
)
def test_a_host_that_cannot(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_host(ServerSettings(host=host))


def test_a_dry_run_says_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", "paceline/demo", "--dry-run", "--host", "192.0.2.1", "--root-path", "llm"]
    argv += ["--ssl-certfile", "none", "--ssl-keyfile", "none", "--served-model-name", ""]
    assert main.main(argv) == 1
    report = capsys.readouterr().out
    assert "Faults: 4" in report
    for part in ("192.0.2.1", "`root_path` must begin", "`ssl_certfile` none", "is empty"):
        assert part in report
