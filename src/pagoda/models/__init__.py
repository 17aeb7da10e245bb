"""Architectures, one file each; a file's `build(config)` writes the model down as a `Program`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pagoda.errors import UnsupportedError
from pagoda.models.config import ModelConfig

if TYPE_CHECKING:
    from pagoda.runtime.program import Program

# `general.architecture` of a model file -> the module that builds it. Modules are named, not imported,
# because programs know `ModelConfig` and models know programs.
ARCHITECTURES = {
    "llama": "pagoda.models.llama",
    "qwen2": "pagoda.models.qwen2",
}


def build_program(config: ModelConfig) -> Program:
    """The program of `config.architecture`.

    Raises:
        UnsupportedError: no file of this folder builds that architecture; the message names those known.
    """
    module = ARCHITECTURES.get(config.architecture)
    if module is None:
        raise UnsupportedError(
            f"architecture {config.architecture!r} is not supported",
            hint=f"supported architectures: {', '.join(sorted(ARCHITECTURES))}",
        )
    program: Program = import_module(module).build(config)
    return program
