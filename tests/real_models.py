"""Where the real models lie on this machine; a test that needs one that is absent is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SMOLLM2 = "smollm2-135m-instruct-q4_1"
QWEN2_5_CODER = "qwen2.5-coder-0.5b-instruct-q4_k_m"
GEMMA3 = "gemma-3-270m-q4_k_m"
REAL_MODELS = (SMOLLM2, QWEN2_5_CODER, GEMMA3)


def real_models_folder() -> Path:
    """$PAGODA_TEST_MODELS, else `pagoda-test-models` in the user's cache."""
    if folder := os.environ.get("PAGODA_TEST_MODELS"):
        return Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pagoda-test-models"


def real_model(name: str) -> Path:
    path = real_models_folder() / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not on this machine")
    return path
