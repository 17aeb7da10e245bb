"""Reading the weights of a Hugging Face folder: `model.safetensors`, or shards that an index names."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

from pagoda.errors import ModelFileError
from pagoda.weights.json_file import read_json
from pagoda.weights.safetensors_header import parse_header
from pagoda.weights.tensor_file import Header, TensorFile, map_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_INDEX_BYTES = 64 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_safetensors(folder: Path) -> TensorFile:
    """Open the weights of a folder. Tensors have the names that the files give them.

    Only headers are read. Every shape and range has been checked against the files when this returns, and
    shards against their index: both name the same tensors.

    Raises:
        ModelFileError: there are no safetensors weights, a shard is missing, or a file is damaged.
    """
    paths, weight_map = weight_files(folder)
    maps: list[mmap.mmap] = []
    try:
        maps = [map_file(path) for path in paths]
        headers = [parse_header(data, str(path)) for data, path in zip(maps, paths, strict=True)]
        _check_shards(folder, paths, headers, weight_map)
    except BaseException:
        for data in maps:
            data.close()
        raise
    return TensorFile(paths, maps, headers)


def weight_files(folder: Path, *, require_all: bool = True) -> tuple[list[Path], Mapping[str, str]]:
    """The files that hold the weights, and by tensor the name of its file: empty for a single file.

    Raises:
        ModelFileError: there are none, the index is damaged, or a shard it names is missing although
            `require_all`.
    """
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE], {}
    if not (folder / INDEX_FILE).exists():
        raise _no_weights(folder)
    weight_map = _read_index(folder / INDEX_FILE)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and require_all:
        raise ModelFileError(
            f"{folder}: {len(missing)} of the model's {len(names)} files are missing: {_listed(missing)}",
            hint="fetch them into the same folder",
        )
    return [folder / name for name in names], weight_map


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: 'weight_map' must be an object that names a file for every tensor")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(".safetensors"):
            raise ModelFileError(
                f"{path}: tensor {tensor!r:.80} is said to be in {name!r:.80}, which is no .safetensors file "
                "of this folder"
            )
    return weight_map


def is_plain_name(name: str) -> bool:
    """Whether a file of this name lies directly in the folder that it is joined to."""
    return name.isprintable() and not set(name) & set('/\\:*?"<>|') and name.strip(". ") != ""


def _check_shards(
    folder: Path, paths: list[Path], headers: list[Header], weight_map: Mapping[str, str]
) -> None:
    """Each tensor is where the index says, none is anywhere else."""
    if not weight_map:
        return
    seen: dict[str, str] = {}
    for path, header in zip(paths, headers, strict=True):
        for info in header.tensors:
            if info.name in seen:
                raise ModelFileError(f"{path}: tensor {info.name!r} is in {seen[info.name]} as well")
            seen[info.name] = path.name
    hint = "fetch all files of the model again, of one revision"
    if unnamed := [name for name in seen if name not in weight_map]:
        raise ModelFileError(
            f"{folder}: {INDEX_FILE} does not name tensors that its files hold: {_listed(unnamed)}", hint=hint
        )
    if missing := [name for name in weight_map if name not in seen]:
        files = sorted({weight_map[name] for name in missing})
        raise ModelFileError(
            f"{folder}: {INDEX_FILE} names tensors that are in no file: {_listed(missing)} "
            f"(should be in {_listed(files)})",
            hint=hint,
        )
    for name, file in seen.items():
        if weight_map[name] != file:
            raise ModelFileError(
                f"{folder}: tensor {name!r} is in {file}, {INDEX_FILE} says {weight_map[name]}", hint=hint
            )


def _no_weights(folder: Path) -> ModelFileError:
    if any(folder.glob("adapter_model*")):
        return ModelFileError(
            f"{folder}: this is an adapter, not a whole model", hint="merge it into its base model first"
        )
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        return ModelFileError(
            f"{folder}: the weights are pickled ({_listed(pickles)}), and loading a pickle can run any code",
            hint="take the model's safetensors files, or convert it with a tool you trust",
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f"; it has {_listed(others)}" if others else ""
    return ModelFileError(
        f"{folder}: the folder has neither {SINGLE_FILE} nor {INDEX_FILE}{found}",
        hint="fetch the model's weights into it",
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
