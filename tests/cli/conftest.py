"""A tiny model on disk, and surroundings in which every file that a command writes is seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.tiny_chat_model import write_tiny_chat_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("models") / "base.gguf", template=None)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home, cache, temporary and working folder, all empty, under the folder that is returned."""
    for variable, name in (("HOME", "home"), ("PAGODA_CACHE", "cache"), ("TMPDIR", "tmp")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    for name in ("PAGODA_DEBUG", "PAGODA_ISA", "NO_COLOR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if search_path := os.environ.get("PYTHONPATH"):  # for the processes that tests start elsewhere
        folders = [str(Path(folder).absolute()) for folder in search_path.split(os.pathsep)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def files_under(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if not p.is_dir()]
