from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tiny_chat_model import write_tiny_chat_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny.gguf")
