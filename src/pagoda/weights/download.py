"""Files from the network into the cache folder: resumed, verified, published by an atomic rename."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda import __version__
from pagoda.errors import ModelNotFoundError, PagodaError
from pagoda.weights.partial_file import CHUNK_BYTES, Checksum, PartialFile, disk_errors

ANSWER_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0
MAX_FAILURES = 4  # in a row, without real progress between them


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind an http(s) address, and what its bytes must be; see `Checksum` for `checksum`."""

    url: str
    size_bytes: int
    checksum: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a token

    @property
    def checksum_name(self) -> str:
        return "SHA-256" if len(self.checksum) == 64 else "SHA-1"


def is_complete(path: Path, remote: RemoteFile) -> bool:
    """Whether a file is there with the bytes that `remote` has; all of them are read."""
    if not path.is_file() or path.stat().st_size != remote.size_bytes:
        return False
    checksum = Checksum(remote.checksum, remote.size_bytes)
    with disk_errors(path), path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.is_right


def download(
    remote: RemoteFile,
    target: Path,
    *,
    report: Callable[[int], None] = lambda num_bytes: None,
    retry_wait_s: float = 0.5,
) -> None:
    """Fetch `remote` to `target`, going on where an earlier try ended. Call it under `exclusive(target)`.

    Raises:
        ModelNotFoundError: the server has no such file.
        PagodaError: it refuses, does not answer, keeps breaking off, or sends other bytes.
    """
    with PartialFile(target, size_bytes=remote.size_bytes, checksum=remote.checksum) as partial:
        num_inherited = partial.num_bytes
        _fetch(remote, partial, report, retry_wait_s)
        try:
            partial.publish()
            return
        except PagodaError:
            if not num_inherited:
                raise
    # What was inherited may be the wrong part: one try with all bytes from one server.
    with PartialFile(target, size_bytes=remote.size_bytes, checksum=remote.checksum) as partial:
        _fetch(remote, partial, report, retry_wait_s)
        partial.publish()


def check_answers(url: str, *, headers: Mapping[str, str] | None = None) -> None:
    """Return when a server answers for `url` within `ANSWER_TIMEOUT_S`, name look-up included.

    Raises:
        PagodaError: it does not, or it refuses; the message says why.
    """
    failure: list[Exception] = []

    def ask() -> None:
        try:
            _open(url, {**(headers or {}), "Range": "bytes=0-0"}, timeout_s=ANSWER_TIMEOUT_S).close()
        except Exception as error:
            failure.append(error)

    # Name look-up has no time limit of its own, so the whole question runs beside.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT_S)
    if thread.is_alive():
        raise PagodaError(f"{_host(url)} did not answer within {ANSWER_TIMEOUT_S:g} s")
    if failure:
        raise _as_pagoda_error(url, failure[0])


@contextlib.contextmanager
def exclusive(target: Path, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold `<target>.lock`, so that one process at a time makes `target`.

    `waiting` is called once when another process holds it.
    """
    import fcntl

    path = target.with_name(target.name + ".lock")
    told = False
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with disk_errors(path):
            lock = path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                waiting()
                told = True
            fcntl.flock(lock, fcntl.LOCK_EX)
        # The holder before us removed the file it had locked: a lock on that one excludes nobody.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                break
        lock.close()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.close()


def _fetch(
    remote: RemoteFile, partial: PartialFile, report: Callable[[int], None], retry_wait_s: float
) -> None:
    num_failures = 0
    while partial.num_bytes < partial.size_bytes:
        start = partial.num_bytes
        try:
            _fetch_once(remote, partial, report)
            reason = f"the connection to {_host(remote.url)} closed early"
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                partial.restart()  # the server's file ends before ours; the whole file tells why
            elif not _is_transient(error):
                raise _as_pagoda_error(remote.url, error) from error
            reason = _as_pagoda_error(remote.url, error).message
        if partial.num_bytes >= partial.size_bytes:
            return
        num_failures = 1 if partial.num_bytes - start >= CHUNK_BYTES else num_failures + 1
        if num_failures > MAX_FAILURES:
            got = f"{partial.num_bytes} of {partial.size_bytes} bytes"
            raise PagodaError(
                f"{reason}, {num_failures} times in a row, at {got}", hint="try again: it resumes"
            )
        time.sleep(retry_wait_s * 2 ** (num_failures - 1))


def _fetch_once(remote: RemoteFile, partial: PartialFile, report: Callable[[int], None]) -> None:
    start = partial.num_bytes
    wanted = {"Range": f"bytes={start}-"} if start else {}
    with _open(remote.url, {**remote.headers, **wanted}, timeout_s=READ_TIMEOUT_S) as response:
        content_range = str(response.headers.get("Content-Range", ""))
        if response.status != 206 or not content_range.startswith(f"bytes {start}-"):
            start = 0
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and start + int(length) != partial.size_bytes:
            total = start + int(length)
            raise PagodaError(f"{_host(remote.url)} has a file of {total} bytes, not {partial.size_bytes}")
        if not start:
            partial.restart()
        report(partial.num_bytes)
        while chunk := response.read(CHUNK_BYTES):
            partial.write(chunk)
            report(partial.num_bytes)


class _RedirectWithoutSecrets(urllib.request.HTTPRedirectHandler):
    """The hub redirects to other hosts for content; a token is for the host it was given for."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and _origin(newurl) != _origin(req.full_url):
            request.remove_header("Authorization")
        return request


def _open(url: str, headers: Mapping[str, str], *, timeout_s: float) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise PagodaError(f"{url!r} is not an http or https address")
    agent = {"User-Agent": f"pagoda/{__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**agent, **headers})
    return urllib.request.build_opener(_RedirectWithoutSecrets).open(request, timeout=timeout_s)


def _is_transient(error: Exception) -> bool:
    return not isinstance(error, urllib.error.HTTPError) or error.code in (408, 425, 429) or error.code >= 500


def _as_pagoda_error(url: str, error: Exception) -> PagodaError:
    if isinstance(error, PagodaError):
        return error
    if isinstance(error, urllib.error.HTTPError):
        error.close()  # it holds the connection
        message = f"{_host(url)} answered {error.code} {error.reason}"
        hint = "set HF_TOKEN if the repository is private or gated" if error.code in (401, 403) else None
        return (ModelNotFoundError if error.code == 404 else PagodaError)(message, hint=hint)
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return PagodaError(f"{_host(url)} cannot be reached: {reason or type(reason).__name__}")


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc.rpartition("@")[2]


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc
