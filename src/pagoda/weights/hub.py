"""GGUF files of Hugging Face repositories, kept under the cache folder as `models/<org>/<name>/<file>`.

The library `huggingface_hub` says what a repository holds and where, honouring HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE; the bytes come through `pagoda.weights.download`, so that nothing lands in another cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagoda.errors import ModelNotFoundError, PagodaError, UnsupportedError
from pagoda.weights.cache import models_folder
from pagoda.weights.download import RemoteFile, download, exclusive
from pagoda.weights.progress import format_bytes, note, show_progress

# Quantisations that can be read, the best trade of size and quality first.
QUANTS = (
    *("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0"),
    *("Q4_1", "Q4_0", "Q5_1", "Q5_0", "BF16", "F16", "F32"),
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANT = re.compile(r"(?:^|[-._/])((?:i?q\d\w*|bf16|f16|fp16|f32|mxfp4))(?=[-./]|$)", re.IGNORECASE)


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def require_online() -> None:
    """Raises: PagodaError: the user asked for no network by HF_HUB_OFFLINE."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise PagodaError("HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE to allow the network")


def resolve_hub_model(name: str, *, progress: bool) -> Path:
    """The GGUF file of `org/name` or `org/name:wanted` (its first part when split), fetched if need be.

    `wanted` is a file name or a quantisation; without one the first of `QUANTS` that there is. A file that
    is here already is used without asking the network.

    Raises:
        ModelNotFoundError: no such repository, file or quantisation, or no access to it.
        UnsupportedError: the repository has no GGUF file, or only of types that cannot be read.
        PagodaError: the hub cannot be reached, or the library is not installed.
    """
    repo_id, _, wanted = name.partition(":")
    folder = models_folder() / repo_id
    here = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    if chosen := choose_gguf(here, wanted):
        return folder / chosen[0]
    require_online()
    remote = _list_repository(repo_id)
    chosen = choose_gguf(remote, wanted)
    if not chosen:
        raise _nothing_chosen(repo_id, remote, wanted)
    for file_name in chosen:
        _fetch(remote[file_name], folder / file_name, progress=progress)
    return folder / chosen[0]


def choose_gguf(names: Iterable[str], wanted: str = "") -> list[str]:
    """The file that is meant, as a list of its parts in order; empty when there is none or no clear one."""
    models = [group for group in _whole_models(names) if "mmproj" not in group[0].lower()]
    if wanted:
        stem = wanted.lower().removesuffix(".gguf")
        for key in (_full_name, _base_name, _quant):
            if matches := [group for group in models if key(group[0]) == stem]:
                return min(matches, key=lambda group: (len(group), len(group[0]), group[0]))
        return []
    for quant in QUANTS:
        if matches := [group for group in models if _quant(group[0]) == quant.lower()]:
            return min(matches, key=lambda group: (len(group), len(group[0]), group[0]))
    unlabelled = [group for group in models if not _quant(group[0])]
    return unlabelled[0] if len(unlabelled) == 1 else []


def _whole_models(names: Iterable[str]) -> list[list[str]]:
    """Files grouped by model: most alone, split ones together, incomplete splits left out."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf"):
            shard = _SHARD.search(name)
            key = (_SHARD.sub("", name), int(shard[2])) if shard else (name, 1)
            groups.setdefault(key, []).append(name)
    return [group for (_, num_parts), group in groups.items() if len(group) == num_parts]


def _full_name(name: str) -> str:
    return name.lower().removesuffix(".gguf")


def _base_name(name: str) -> str:
    return _full_name(_SHARD.sub("", name)).rpartition("/")[2]


def _quant(name: str) -> str:
    found: list[str] = _QUANT.findall(_full_name(_SHARD.sub("", name)))
    return found[-1].replace("fp16", "f16") if found else ""


def _fetch(remote: RemoteFile, target: Path, *, progress: bool) -> None:
    with exclusive(
        target, waiting=lambda: note(f"waiting for another pull of {target.name}", enabled=progress)
    ):
        if target.is_file() and target.stat().st_size == remote.size_bytes:
            return
        with show_progress(target.name, remote.size_bytes, enabled=progress) as report:
            download(remote, target, report=report)
    size = format_bytes(remote.size_bytes)
    note(f"{target.name}: {size} from the hub, SHA-256 verified", enabled=progress)


def _list_repository(repo_id: str) -> dict[str, RemoteFile]:
    """Files by name, at the commit that `main` is at now, as GGUF parts must come from one commit."""
    try:
        from huggingface_hub import HfApi, get_token, hf_hub_url
    except ImportError as error:
        raise PagodaError(
            f"{repo_id} is on the hub, and the library huggingface_hub is not installed",
            hint="pip install 'pagoda-llm[hub]'",
        ) from error
    try:
        info = HfApi(endpoint=endpoint()).model_info(repo_id, files_metadata=True, timeout=10)
    except Exception as error:  # the library lets errors of its HTTP client through, whichever that is
        raise _hub_error(repo_id, error) from error
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    files: dict[str, RemoteFile] = {}
    for sibling in info.siblings or []:
        lfs: Any = sibling.lfs
        if not _stays_inside(sibling.rfilename):
            raise PagodaError(f"{repo_id} names a file outside its folder: {sibling.rfilename!r}")
        if lfs is not None:  # weights always are; anything else has no SHA-256 to check
            url = hf_hub_url(repo_id, sibling.rfilename, revision=info.sha, endpoint=endpoint())
            files[sibling.rfilename] = RemoteFile(url, lfs.size, lfs.sha256, headers)
    return files


def _stays_inside(file_name: str) -> bool:
    parts = file_name.replace("\\", "/").split("/")
    return bool(file_name) and "" not in parts and ".." not in parts and ":" not in parts[0]


def _hub_error(repo_id: str, error: Exception) -> PagodaError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        hint = f"accept its terms at {endpoint()}/{repo_id} and set HF_TOKEN"
        return ModelNotFoundError(f"{repo_id} is gated", hint=hint)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        hint = "check the spelling; a private repository needs HF_TOKEN"
        return ModelNotFoundError(f"the hub has no repository {repo_id}", hint=hint)
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return PagodaError(
        f"the hub at {endpoint()} cannot be asked about {repo_id}: {reason[0]}",
        hint="a path to a .gguf file on disk needs no hub",
    )


def _nothing_chosen(repo_id: str, remote: Iterable[str], wanted: str) -> PagodaError:
    models = [group[0] for group in _whole_models(remote)]
    if not models:
        return UnsupportedError(
            f"{repo_id} holds no GGUF file, and other formats are not read yet",
            hint=f"look for a repository named {repo_id.rpartition('/')[2]}-GGUF",
        )
    hint = f"it has {', '.join(models)}"
    if wanted:
        return ModelNotFoundError(f"{repo_id} holds no file or quantisation {wanted!r}", hint=hint)
    return UnsupportedError(
        f"{repo_id} holds no one GGUF file to prefer", hint=f"{hint}; name one after a colon"
    )
