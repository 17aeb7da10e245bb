"""JSON objects out of files that nobody vouches for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pagoda.errors import ModelFileError

MAX_BYTES = 16 << 20  # of a configuration; real ones have a few thousand


def read_json(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelFileError: it cannot be read, is larger than `max_bytes`, or holds no JSON object.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), str(path))


def parse_json(raw: bytes, file: str) -> dict[str, Any]:
    """The JSON object in `raw`; `file` names it in messages."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{file}: the file is not UTF-8 ({error.reason})") from None
    except RecursionError:
        raise ModelFileError(f"{file}: the JSON is nested too deeply") from None
    except ValueError as error:
        if raw.startswith(b"version https://git-lfs"):
            raise ModelFileError(
                f"{file}: this is a git-lfs pointer, not the file it stands for",
                hint="run `git lfs pull` in its repository",
            ) from None
        message = str(error).splitlines()[0][:200]
        raise ModelFileError(f"{file}: the file is not JSON: {message}", hint="fetch it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{file}: the file holds no JSON object")
    return value


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """A whole file of at most `max_bytes`.

    Raises:
        ModelFileError: it is larger, no regular file, or cannot be read.
    """
    try:
        if not path.is_file():
            raise ModelFileError(f"{path}: this is not a regular file")
        with path.open("rb") as file:
            raw = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise ModelFileError(f"{path}: the file is larger than {max_bytes} bytes")
    return raw
