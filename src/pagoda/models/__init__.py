"""Architectures, one file each; a file's `build(config)` writes the model down as a `Program`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pagoda.errors import UnsupportedError
from pagoda.models.config import ModelConfig

if TYPE_CHECKING:
    from pagoda.models.architecture import Architecture
    from pagoda.runtime.program import Program

# `general.architecture` of GGUF files, which is also the name of the module here -> `model_type` of
# config.json. Modules are imported when they are needed, because models know programs and readers of files.
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3", "gemma3_text"),
    "gpt2": ("gpt2",),
    "granite": ("granite",),
    "llama": ("llama", "mistral"),
    "mixtral": ("mixtral",),
    "olmo2": ("olmo2",),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
}


def find_architecture(name: str) -> Architecture:
    """What the file `models/<name>.py` says.

    Raises:
        UnsupportedError: there is no such file; the message names those known.
    """
    if name not in ARCHITECTURES:
        raise _unsupported(name, ARCHITECTURES)
    found: Architecture = import_module(f"pagoda.models.{name}").ARCHITECTURE
    return found


def architecture_of_model_type(model_type: str) -> str:
    """The name here of what config.json calls `model_type`.

    Raises:
        UnsupportedError: nothing here has that model type; the message names those known.
    """
    names = {hf: name for name, model_types in ARCHITECTURES.items() for hf in model_types}
    if model_type not in names:
        raise _unsupported(model_type, names)
    return names[model_type]


def build_program(config: ModelConfig) -> Program:
    """The program of `config.architecture`.

    Raises:
        UnsupportedError: no file of this folder builds that architecture; the message names those known.
    """
    return find_architecture(config.architecture).build(config)


def _unsupported(name: str, known: dict[str, tuple[str, ...]] | dict[str, str]) -> UnsupportedError:
    return UnsupportedError(
        f"architecture {name!r:.80} is not supported",
        hint=f"supported architectures: {', '.join(sorted(known))}",
    )
