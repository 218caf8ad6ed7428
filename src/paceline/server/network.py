"""What a server needs of the machine before it loads anything: its address, and files for HTTPS.

Standard library only.
"""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import replace
from pathlib import Path

from paceline.engine_args import join_problems
from paceline.errors import ConfigError
from paceline.server.settings import ServerSettings


def listen(settings: ServerSettings) -> socket.socket:
    """A socket bound to the address; it accepts nothing yet.

    Raises:
        ConfigError: the address is taken, not this machine's, or not allowed.
    """
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # a name may have no form that is sent
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"there is no address `{host}`: {cause}. hint: --host takes an address of "
            "this machine, such as 127.0.0.1 or 0.0.0.0"
        ) from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken by another program. hint: end that one, or give "
                "another `--port`; 0 takes a free one"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"`{host}` is no address of this machine. hint: --host takes one, such as "
                "127.0.0.1, or 0.0.0.0 for all"
            ) from error
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return bound


def check_host(settings: ServerSettings) -> None:
    """Whether the host is an address of this machine; its port may be in use.

    Raises:
        ConfigError: it is none, or not allowed.
    """
    listen(replace(settings, port=0)).close()


def tls_files(settings: ServerSettings) -> tuple[Path, Path] | None:
    """Certificate and key, None where there are none."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    return Path(settings.ssl_certfile).expanduser(), Path(settings.ssl_keyfile).expanduser()


def check_tls(settings: ServerSettings) -> None:
    """Read certificate and key, if there are any.

    Raises:
        ConfigError: a file cannot be read, holds something else, needs a passphrase, or the key is
            another certificate's.
    """
    files = tls_files(settings)
    if files is None:
        return
    certificate, key = files
    problems = [
        f"`{name}` {path} cannot be read: {problem}. hint: give a file in PEM form"
        for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key))
        if (problem := _unreadable(path))
    ]
    if problems:
        raise ConfigError(join_problems(problems))
    if b"ENCRYPTED" in key.read_bytes():
        raise ConfigError(
            f"the key in {key} is encrypted, and nobody is asked for a passphrase. hint: give "
            "`--ssl-keyfile` one without, readable by the server alone"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not in PEM form"
        raise ConfigError(
            f"{certificate} and {key} are no certificate and its key ({reason}). hint: "
            "`--ssl-certfile` takes a certificate, or a chain of them, and `--ssl-keyfile` its "
            "private key, both in PEM form"
        ) from error


def _unreadable(path: Path) -> str | None:
    try:
        path.read_bytes()
    except OSError as error:
        return error.strerror
    return None
