"""Fixtures of the download tests: a server, and a cache folder outside which nothing may be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weights.file_server import Served, file_server


@pytest.fixture
def served() -> Iterator[Served]:
    with file_server() as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; everything else that could be written to is in `tmp_path` as well."""
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # pip runs what it finds there to describe itself
    (tmp_path / "tmp").mkdir()
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"
