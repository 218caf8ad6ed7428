"""A stand-in for the Hugging Face hub on localhost: as much of its HTTP as downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubStub:
    """Serves directories as repositories, by id; ``gated`` ids answer as gated ones do."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.log: list[str] = []  # "METHOD path range" of every request
        self.bytes_sent: dict[str, int] = {}  # by file name
        self.url = ""

    def repository_of(self, path: str) -> tuple[str, Path] | None:
        for name, directory in self.repositories.items():
            if f"/{name}/" in f"{path}/":
                return name, directory
        return None


class _Handler(BaseHTTPRequestHandler):
    stub: HubStub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.stub.log.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        found = self.stub.repository_of(path)
        if found is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        elif found[0] in self.stub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        elif path.startswith("/api/"):
            self._send(200, self._api(path, *found), {"Content-Type": "application/json"}, body)
        else:
            self._file(found[1] / path.rpartition("/")[2], body)

    def _api(self, path: str, name: str, directory: Path) -> bytes:
        files = sorted(file for file in directory.rglob("*") if file.is_file())
        names = [str(file.relative_to(directory)) for file in files]
        if "/tree/" in path:
            listing = [
                {"type": "file", "path": n, "size": f.stat().st_size, "oid": _etag(f)}
                for n, f in zip(names, files, strict=True)
            ]
            return json.dumps(listing).encode()
        siblings = [{"rfilename": n} for n in names]
        return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()

    def _file(self, file: Path, body: bool) -> None:
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        data, status = file.read_bytes(), 200
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT}
        span = self.headers.get("Range")
        if span is not None:
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last) if last else len(data) - 1, len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
            data, status = data[int(first) : end + 1], 206
        if body:
            sent = self.stub.bytes_sent
            sent[file.name] = sent.get(file.name, 0) + len(data)
        self._send(status, data, headers, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serve_hub() -> Iterator[HubStub]:
    """A running stub; its ``url`` is the endpoint."""
    stub = HubStub()
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
