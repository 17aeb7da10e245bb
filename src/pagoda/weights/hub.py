"""Models of Hugging Face repositories, kept under the cache folder as `models/<org>/<name>/<file>`.

The library `huggingface_hub` says what a repository holds and where, honouring HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE; the bytes come through `pagoda.weights.download`, so that nothing lands in another cache.
A safetensors model is a folder; its config.json is fetched last, so that a folder that has one is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pagoda.errors import ModelNotFoundError, PagodaError, UnsupportedError
from pagoda.weights.cache import models_folder
from pagoda.weights.download import RemoteFile, download, exclusive, is_complete
from pagoda.weights.hf_folder import CONFIG_FILE, SIDE_FILES, TEMPLATE_FILES, TEMPLATE_FOLDER
from pagoda.weights.hub_files import choose_gguf, whole_models
from pagoda.weights.progress import format_bytes, note, show_progress
from pagoda.weights.safetensors import INDEX_FILE, SINGLE_FILE, weight_files

SAFETENSORS = "safetensors"  # names that format after a colon


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def require_online() -> None:
    """Raises: PagodaError: the user asked for no network by HF_HUB_OFFLINE."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise PagodaError(
            "HF_HUB_OFFLINE is set, and the model is not in the cache folder",
            hint="unset HF_HUB_OFFLINE to allow the network",
        )


def resolve_hub_model(name: str, *, progress: bool, revision: str | None = None) -> Path:
    """The safetensors folder or the GGUF file (its first part when split) of `org/name` or `org/name:wanted`.

    `wanted` is a file name, a quantisation or "safetensors". Without it a repository's safetensors go first,
    then the first of the quantisations that can be read. `revision` is a branch, tag or commit; each has a
    folder of its own. What is here already is used without asking the network.

    Raises:
        ModelNotFoundError: no such repository, revision, file or quantisation, or no access to it.
        UnsupportedError: the repository holds nothing that can be read.
        PagodaError: the hub cannot be reached, the disk is full, or the library is not installed.
    """
    repo_id, _, wanted = name.partition(":")
    folder = models_folder() / (repo_id if revision is None else f"{repo_id}@{quote(revision, safe='')}")
    if wanted in ("", SAFETENSORS) and (folder / CONFIG_FILE).is_file():
        return folder
    here = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    if chosen := choose_gguf(here, wanted):
        return folder / chosen[0]
    require_online()
    remote = _list_repository(repo_id, revision)
    if wanted in ("", SAFETENSORS) and _has_safetensors(remote):
        _fetch_folder(remote, folder, progress=progress)
        return folder
    chosen = choose_gguf(remote, wanted)
    if not chosen:
        raise _nothing_chosen(repo_id, remote, wanted)
    _require_space({name: remote[name] for name in chosen}, folder)
    for file_name in chosen:
        _fetch(remote[file_name], folder / file_name, progress=progress)
    return folder / chosen[0]


def _has_safetensors(names: Iterable[str]) -> bool:
    return CONFIG_FILE in names and (SINGLE_FILE in names or INDEX_FILE in names)


def _fetch_folder(remote: Mapping[str, RemoteFile], folder: Path, *, progress: bool) -> None:
    """Small files, then weights, then config.json."""
    sides = [name for name in (*SIDE_FILES, *TEMPLATE_FILES) if name in remote and name != CONFIG_FILE]
    sides += [name for name in remote if name.startswith(f"{TEMPLATE_FOLDER}/") and name.endswith(".jinja")]
    for name in sides:
        _fetch(remote[name], folder / name, progress=False)
    if SINGLE_FILE in remote:
        weights = [SINGLE_FILE]
    else:
        _fetch(remote[INDEX_FILE], folder / INDEX_FILE, progress=False)
        weights = [path.name for path in weight_files(folder, require_all=False)[0]]
        if missing := [name for name in weights if name not in remote]:
            raise ModelNotFoundError(f"{INDEX_FILE} names files that the repository lacks: {missing[0]}")
    _require_space({name: remote[name] for name in weights}, folder)
    for name in weights:
        _fetch(remote[name], folder / name, progress=progress)
    _fetch(remote[CONFIG_FILE], folder / CONFIG_FILE, progress=False)


def _require_space(remote: Mapping[str, RemoteFile], folder: Path) -> None:
    """Raises: PagodaError: the disk has less room than what is still to come."""
    needed = 0
    for name, file in remote.items():
        sizes = [p.stat().st_size for p in (folder / name, folder / f"{name}.partial") if p.is_file()]
        needed += max(0, file.size_bytes - max(sizes, default=0))
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise PagodaError(
            f"the model needs {format_bytes(needed)} more in {folder}, "
            f"the disk has {format_bytes(free)} left",
            hint="PAGODA_CACHE names another folder for models",
        )


def _fetch(remote: RemoteFile, target: Path, *, progress: bool) -> None:
    with exclusive(
        target, waiting=lambda: note(f"waiting for another pull of {target.name}", enabled=progress)
    ):
        if is_complete(target, remote):
            return
        with show_progress(target.name, remote.size_bytes, enabled=progress) as report:
            download(remote, target, report=report)
    size = format_bytes(remote.size_bytes)
    note(f"{target.name}: {size} from the hub, {remote.checksum_name} verified", enabled=progress)


def _list_repository(repo_id: str, revision: str | None) -> dict[str, RemoteFile]:
    """Files by name, at the commit that `revision` is at now, as all files must come from one commit."""
    try:
        from huggingface_hub import HfApi, get_token, hf_hub_url
    except ImportError as error:
        raise PagodaError(
            f"{repo_id} is on the hub, and the library huggingface_hub is not installed",
            hint="pip install 'pagoda-llm[hub]'",
        ) from error
    try:
        api = HfApi(endpoint=endpoint())
        info = api.model_info(repo_id, revision=revision, files_metadata=True, timeout=10)
    except Exception as error:  # the library lets errors of its HTTP client through, whichever that is
        raise _hub_error(repo_id, revision, error) from error
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    files: dict[str, RemoteFile] = {}
    for sibling in info.siblings or []:
        lfs: Any = sibling.lfs
        if not _stays_inside(sibling.rfilename):
            raise PagodaError(f"{repo_id} names a file outside its folder: {sibling.rfilename!r}")
        size, checksum = (sibling.size, sibling.blob_id) if lfs is None else (lfs.size, lfs.sha256)
        if size is not None and checksum:
            url = hf_hub_url(repo_id, sibling.rfilename, revision=info.sha, endpoint=endpoint())
            files[sibling.rfilename] = RemoteFile(url, size, checksum, headers)
    return files


def _stays_inside(file_name: str) -> bool:
    parts = file_name.replace("\\", "/").split("/")
    return bool(file_name) and "" not in parts and ".." not in parts and ":" not in parts[0]


def _hub_error(repo_id: str, revision: str | None, error: Exception) -> PagodaError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        hint = f"accept its terms at {endpoint()}/{repo_id} and set HF_TOKEN"
        return ModelNotFoundError(f"{repo_id} is gated", hint=hint)
    if isinstance(error, errors.RevisionNotFoundError):
        hint = "a revision is a branch, a tag or a commit"
        return ModelNotFoundError(f"{repo_id} has no revision {revision!r}", hint=hint)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        hint = "check the spelling; a private repository needs HF_TOKEN"
        return ModelNotFoundError(f"the hub has no repository {repo_id}", hint=hint)
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return PagodaError(
        f"the hub at {endpoint()} cannot be asked about {repo_id}: {reason[0]}",
        hint="a path to a model on disk needs no hub",
    )


def _nothing_chosen(repo_id: str, remote: Iterable[str], wanted: str) -> PagodaError:
    models = [group[0] for group in whole_models(remote)]
    if _has_safetensors(remote):
        models.append(SAFETENSORS)
    if not models:
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in remote)
        why = ", only pickled weights, which are never loaded" if pickled else ""
        return UnsupportedError(
            f"{repo_id} holds neither {CONFIG_FILE} with {SINGLE_FILE} nor a GGUF file{why}",
            hint=f"look for a repository named {repo_id.rpartition('/')[2]}-GGUF",
        )
    hint = f"it has {', '.join(models)}"
    if wanted:
        return ModelNotFoundError(f"{repo_id} holds no file or quantisation {wanted!r}", hint=hint)
    return UnsupportedError(
        f"{repo_id} holds no one GGUF file to prefer", hint=f"{hint}; name one after a colon"
    )
