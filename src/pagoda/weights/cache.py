"""Where fetched models are kept. Nothing is written anywhere else."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PAGODA_CACHE, else $XDG_CACHE_HOME/pagoda, else ~/.cache/pagoda."""
    if own := os.environ.get("PAGODA_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache") / "pagoda"


def models_folder() -> Path:
    return cache_folder() / "models"
