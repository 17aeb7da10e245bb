"""Tensors of a file under the names, and in the order of rows, that programs use.

Files fuse matrices that programs keep apart, put rows in another order, or store inputs by outputs; the name
map of an architecture says so (`models/architecture.py`), and here it is undone, one tensor at a time as it
is looked up. Rows are whole runs of bytes whatever their type, so nothing is unpacked for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models import build_program, find_architecture
from pagoda.models.architecture import NameMap
from pagoda.models.config import ModelConfig
from pagoda.runtime.program import Program
from pagoda.weights.settings import CONVERT_AGAIN
from pagoda.weights.tensor import Tensor, TensorOutline, TensorType, outlines_of

_NUMBER = re.compile(r"\.(\d+)(?=\.)")
# Buffers of older Hugging Face files that hold nothing learned.
_HF_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")


@dataclass(frozen=True, slots=True)
class Part:
    """Where a tensor of the program lies: rows of a stored tensor, and what has to be done to them."""

    stored: str
    first_row: int
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # rows pair rotary dimension 2i with 2i + 1
    transposed: bool = False
    offset: float = 0.0


class ProgramTensors(Mapping[str, Tensor]):
    """The program's tensors; those that no part describes are stored under the same name."""

    def __init__(self, stored: Mapping[str, Tensor], parts: Mapping[str, Part]) -> None:
        self.stored = stored
        self.parts = parts
        types = {name: outline.type for name, outline in outlines_of(stored).items()}
        self.outlines = {
            name: TensorOutline(TensorType.F32 if part.offset else types[part.stored], part.shape)
            for name, part in parts.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        part = self.parts[name]
        return _cut(self.stored[part.stored], part, name)

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def stored_name(self, name: str) -> str:
        """The tensor of the file that holds this one."""
        return self.parts[name].stored


def gguf_tensors(stored: Mapping[str, Tensor], config: ModelConfig) -> ProgramTensors:
    """Tensors of a GGUF file as the program of `config` reads them.

    Raises:
        ModelFileError: rows of a tensor do not fit the model.
    """
    described = find_architecture(config.architecture)
    program = build_program(config)
    heads = _interleaved(config) if described.interleaved_rope else {}
    parts = _parts(outlines_of(stored), described.gguf_tensors, program)
    for name, part in parts.items():
        if name in heads:
            if part.shape[0] != heads[name] * config.head_dim:
                raise ModelFileError(
                    f"tensor {name!r} has {part.shape[0]} rows, "
                    f"{heads[name]} heads of {config.head_dim} need {heads[name] * config.head_dim}",
                    hint=CONVERT_AGAIN,
                )
            parts[name] = replace(part, interleaved_heads=heads[name])
    return ProgramTensors(stored, parts)


def hf_tensors(stored: Mapping[str, Tensor], config: ModelConfig) -> ProgramTensors:
    """Tensors of a Hugging Face folder as the program of `config` reads them.

    A head that is tied to the embedding is not read, and neither are the buffers of older files.

    Raises:
        ModelFileError: rows of a tensor do not fit the model.
    """
    described = find_architecture(config.architecture)
    wanted = {
        name: tensor
        for name, tensor in outlines_of(stored).items()
        if not _HF_BUFFERS.search(name)
        and not any(name.startswith(prefix) for prefix in described.hf_ignored)
        and not (config.tied_embeddings and name.removesuffix(".weight").endswith("lm_head"))
    }
    parts = _parts(wanted, described.hf_tensors, build_program(config), described.hf_transposed)
    if described.hf_norm_offset:
        for name, part in parts.items():
            if name.endswith("norm.weight"):
                parts[name] = replace(part, offset=described.hf_norm_offset)
    return ProgramTensors(stored, parts)


def _interleaved(config: ModelConfig) -> dict[str, int]:
    """Query and key projections, and their biases, with their numbers of heads."""
    stems = (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads))
    return {
        f"blk.{i}.{stem}.{kind}": num_heads
        for i in range(config.num_layers)
        for stem, num_heads in stems
        for kind in ("weight", "bias")
    }


def _parts(
    stored: Mapping[str, TensorOutline], names: NameMap, program: Program, transposed: tuple[str, ...] = ()
) -> dict[str, Part]:
    """A stored name without a pattern is kept, so that `require_all_read` can name it."""
    expected = program.weight_shapes()
    experts = program.config.experts
    num_experts = 0 if experts is None else experts.num_experts
    parts: dict[str, Part] = {}
    for name, tensor in stored.items():
        pattern, numbers, suffix = _pattern(name)
        found = names.get(pattern)
        if found is None:
            parts[name] = Part(name, 0, tensor.shape)
            continue
        suffix = suffix or ".weight"
        targets = [f"{t}{suffix}" for t in ((found,) if isinstance(found, str) else found)]
        spread = "{e}" in "".join(targets) and "{e}" not in pattern
        filled = [
            t.format(i=numbers[0] if numbers else 0, e=e)
            for e in (range(num_experts) if spread else [numbers[1] if len(numbers) > 1 else 0])
            for t in targets
        ]
        is_transposed = pattern in transposed and suffix == ".weight"
        if len(filled) > 1 and not all(target in expected for target in filled):
            parts[name] = Part(name, 0, tensor.shape)  # such as a bias that the program does not have
            continue
        parts |= _rows_of(name, tensor, filled, expected, is_transposed)
    return parts


def _rows_of(
    name: str,
    tensor: TensorOutline,
    targets: list[str],
    expected: Mapping[str, tuple[int, ...]],
    transposed: bool,
) -> dict[str, Part]:
    """Cut the rows of one stored tensor into what the program expects, in order."""
    shape = tensor.shape[::-1] if transposed else tensor.shape
    if len(targets) == 1 and len(shape) < 3:
        return {targets[0]: Part(name, 0, shape, transposed=transposed)}
    rows = [expected[target][0] for target in targets]
    num_rows, width = int(np.prod(shape[:-1])) if len(shape) > 1 else shape[0], shape[-1]
    if sum(rows) != num_rows:
        raise ModelFileError(
            f"tensor {name!r} has {num_rows} rows, the model needs {sum(rows)}", hint=CONVERT_AGAIN
        )
    firsts = np.cumsum([0, *rows]).tolist()
    return {
        target: Part(name, first, (n, width) if len(shape) > 1 else (n,), transposed=transposed)
        for target, first, n in zip(targets, firsts, rows, strict=False)
    }


def _pattern(name: str) -> tuple[str, list[int], str]:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.{i}.mlp.up_proj`, [3], `.weight`."""
    stem, dot, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, dot, kind = name, "", ""
    numbers = [int(n) for n in _NUMBER.findall(stem + ".")]
    placeholders = iter(("{i}", "{e}"))
    pattern = _NUMBER.sub(lambda match: "." + next(placeholders, match.group(1)), stem + ".")[:-1]
    return pattern, numbers, dot + kind


def _cut(tensor: Tensor, part: Part, name: str) -> Tensor:
    if part.transposed:
        tensor = _transpose(tensor)
    num_rows = part.shape[0]
    total_rows = int(np.prod(tensor.shape[:-1])) if len(tensor.shape) > 1 else tensor.shape[0]
    data = tensor.data
    if num_rows != total_rows:
        row_bytes = len(data) // total_rows
        data = data[row_bytes * part.first_row : row_bytes * (part.first_row + num_rows)]
    if part.interleaved_heads:
        # Row 2i + s of a head becomes row i + s * head_dim / 2.
        rows = data.reshape(part.interleaved_heads, -1, 2, len(data) // num_rows)
        data = rows.swapaxes(1, 2).reshape(-1)
    if part.offset:
        from pagoda.weights.dequantize import dequantize

        values = dequantize(tensor) + np.float32(part.offset)
        return Tensor(name, TensorType.F32, part.shape, values.view(np.uint8).reshape(-1))
    return Tensor(name, tensor.type, part.shape, data)


def _transpose(tensor: Tensor) -> Tensor:
    if tensor.type.block_elements != 1:
        raise UnsupportedError(f"tensor {tensor.name!r} is stored inputs by outputs, and cannot be quantised")
    item = tensor.type.block_bytes
    rows, cols = tensor.shape
    data = tensor.data.reshape(rows, cols, item).swapaxes(0, 1).reshape(-1)
    return replace(tensor, shape=(cols, rows), data=data)
