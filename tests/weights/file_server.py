"""A stand-in for file servers and the hub on the loopback interface, with the faults of real ones."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """What the server does and what it was asked; tests change the former and read the latter."""

    files: dict[str, bytes] = field(default_factory=dict)
    json: dict[str, object] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)  # path: status, X-Error-Code
    honours_range: bool = True
    sends_length: bool = True
    cut_after_bytes: int | None = None  # each answer's body ends there, the connection too
    statuses: list[int] = field(default_factory=list)  # answered first, one a request
    before_body: Callable[[], None] = lambda: None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def ranges(self) -> list[str | None]:
        """Range headers of the requests for content, without the one-byte questions whether it answers."""
        ranges = [headers.get("range") for _, headers in self.requests]
        return [r for r in ranges if r != "bytes=0-0"]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def hub_repository(
    served: Served,
    repo_id: str,
    files: dict[str, bytes],
    revision: str = "c0ffee",
    *,
    small_files: dict[str, bytes] | None = None,
    branch: str | None = None,
) -> None:
    """Serve a repository as the hub's HTTP API does: its description, and each file at the revision.

    `small_files` are in git itself, so that only their blob ids are known. `branch`: of it, not of `main`.
    """
    siblings: list[dict[str, object]] = [
        {
            "rfilename": name,
            "size": len(content),
            "blobId": "0",
            "lfs": {"size": len(content), "sha256": sha256(content), "pointerSize": 130},
        }
        for name, content in files.items()
    ]
    small_files = {"README.md": b"abc", **(small_files or {})}
    siblings += [
        {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
        for name, content in small_files.items()
    ]
    path = f"/api/models/{repo_id}" + (f"/revision/{branch}" if branch else "")
    served.json[path] = {"id": repo_id, "sha": revision, "siblings": siblings}
    for name, content in {**files, **small_files}.items():
        served.files[f"/{repo_id}/resolve/{revision}/{name}"] = content


@contextmanager
def file_server() -> Iterator[Served]:
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            path = self.path.partition("?")[0]
            served.requests.append((path, headers))
            if served.statuses:
                self._reply(served.statuses.pop(0), b"")
            elif path in served.errors:
                status, code = served.errors[path]
                self._reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})
            elif path in served.redirects:
                self._reply(302, b"", {"Location": served.redirects[path]})
            elif path in served.json:
                body = json.dumps(served.json[path]).encode()
                self._reply(200, body, {"Content-Type": "application/json"})
            elif path in served.files:
                self._file(served.files[path], headers.get("range"))
            else:
                self._reply(404, b"{}")

        def _file(self, content: bytes, wanted: str | None) -> None:
            if wanted is None or not served.honours_range:
                return self._reply(200, content)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last or len(content) - 1)
            if start >= len(content):
                return self._reply(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return self._reply(
                206, content[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
            )

        def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if served.sends_length:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            served.before_body()
            if self.command != "HEAD":
                self.wfile.write(body[: served.cut_after_bytes])
            if served.cut_after_bytes is not None and len(body) > served.cut_after_bytes:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that hangs up early is part of the tests

    server = Server(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
