"""`PartialFile`: a file on disk while it grows, hashed as it is written and published when it is right."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from pagoda.errors import PagodaError

CHUNK_BYTES = 1 << 20


class Checksum:
    """What the bytes of a file must hash to: SHA-256, or SHA-1 as git computes it, told by their lengths.

    The hub gives SHA-256 for large files and git's blob id for small ones.
    """

    def __init__(self, expected: str, size_bytes: int) -> None:
        self.expected = expected
        self.name = "SHA-256" if len(expected) == 64 else "SHA-1"
        self._size_bytes = size_bytes
        self.restart()

    def restart(self) -> None:
        if self.name == "SHA-256":
            self._digest = hashlib.sha256()
        else:
            self._digest = hashlib.sha1(b"blob %d\0" % self._size_bytes, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        self._digest.update(chunk)

    @property
    def actual(self) -> str:
        return self._digest.hexdigest()

    @property
    def is_right(self) -> bool:
        return self.actual == self.expected


class PartialFile:
    """`<target>.partial` while it grows: hashed as it is written, and renamed once it is right.

    Opening one that an earlier process left behind goes on at its end.

    Raises (all methods):
        PagodaError: the disk is full or not writable.
    """

    def __init__(self, target: Path, *, size_bytes: int, checksum: str) -> None:
        self.target = target
        self.path = target.with_name(target.name + ".partial")
        self.size_bytes = size_bytes
        self.num_bytes = 0
        self._checksum = Checksum(checksum, size_bytes)
        self._file: IO[bytes]

    def __enter__(self) -> PartialFile:
        with disk_errors(self.path):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            self._file.seek(0)
            while chunk := self._file.read(CHUNK_BYTES):
                self._checksum.update(chunk)
                self.num_bytes += len(chunk)
        if self.num_bytes > self.size_bytes:
            self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported by `write` already
            self._file.close()

    def restart(self) -> None:
        with disk_errors(self.path):
            self._file.truncate(0)
        self._checksum.restart()
        self.num_bytes = 0

    def write(self, chunk: bytes) -> None:
        with disk_errors(self.path):
            self._file.write(chunk)
        self._checksum.update(chunk)
        self.num_bytes += len(chunk)
        if self.num_bytes > self.size_bytes:
            self.restart()
            raise PagodaError(
                f"{self.target.name}: more bytes came than the {self.size_bytes} there should be"
            )

    def publish(self) -> None:
        """Check size and checksum, then give the file its name. A wrong file is removed.

        Raises:
            PagodaError: the bytes are not the expected ones.
        """
        if self.num_bytes != self.size_bytes:
            raise PagodaError(f"{self.target.name}: {self.num_bytes} bytes came, not {self.size_bytes}")
        if not self._checksum.is_right:
            name, actual, expected = self._checksum.name, self._checksum.actual, self._checksum.expected
            self.restart()
            self.path.unlink(missing_ok=True)
            raise PagodaError(f"{self.target.name}: {name} is {actual}, expected {expected}")
        with disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self.path.replace(self.target)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors of the operating system, as one of ours that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise PagodaError(
            f"cannot write {path}: {error.strerror or error}",
            hint="PAGODA_CACHE names another folder for models",
        ) from error
