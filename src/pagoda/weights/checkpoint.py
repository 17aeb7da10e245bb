"""`Checkpoint`: a model file as the rest of the program sees it, whatever its format did to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType

from pagoda.errors import ModelFileError, PagodaError
from pagoda.models.config import ModelConfig
from pagoda.runtime.program import Embed, Linear, Logits, Program, RMSNorm
from pagoda.weights.gguf import GGUFFile, read_gguf
from pagoda.weights.gguf_config import ROPE_FREQS, family_of, model_config_from_gguf
from pagoda.weights.metadata import Metadata
from pagoda.weights.tensor import Tensor, WeightSource


class Checkpoint:
    """An open model: configuration, metadata and, as a `WeightSource`, tensors in the order Pagoda uses.

    Looking up a query or key projection of llama's files copies it with its rows put in order; the copy
    is not kept. All other tensors are views of the mapped file.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self._file = file
        self._tensors = tensors

    @property
    def metadata(self) -> Metadata:
        return self._file.metadata

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Raises ModelFileError when the file has shrunk since it was opened."""
        self._file.check_size()
        return self._tensors

    @property
    def stored_tensors(self) -> Mapping[str, Tensor]:
        """Tensors with their rows as the file has them, for types and sizes: nothing is copied."""
        return self._file.tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they lie in the file, quantised."""
        return self._file.num_bytes

    def digest(self) -> str:
        """Identifies the file's content: equal files, wherever they are, have equal digests."""
        return self._file.digest()

    def release(self, name: str) -> None:
        self._file.release(name)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the model at `path`, a GGUF file or any shard of a split one. Weights are mapped, not read.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFileError: the file is damaged or inconsistent.
        UnsupportedError: the architecture, a tensor type or a rope scaling is not supported.
    """
    file = read_gguf(path)
    try:
        config = model_config_from_gguf(file.metadata, file.tensors)
        _, family = family_of(file.metadata)
        weights = {name: t for name, t in file.tensors.items() if name != ROPE_FREQS}
        heads = _heads_to_reorder(weights, config) if family.interleaved_rope else {}
    except PagodaError as e:
        file.close()
        raise type(e)(f"{os.fspath(path)}: {e.message}", hint=e.hint) from e
    return Checkpoint(file, config, _RowsInOrder(weights, heads))


def require_all_read(weights: WeightSource, program: Program) -> None:
    """Check that the program reads every tensor of the file, and that all have the shape it expects.

    A tensor that nothing reads is a bias or a scale left out: the model would load and answer wrongly.

    Raises:
        ModelFileError: the message lists what is missing, unread or of another shape.
    """
    tensors = weights.tensors
    if isinstance(tensors, _RowsInOrder):
        tensors = tensors.as_stored  # shapes do not depend on the order of rows
    expected = expected_shapes(program)
    problems = []
    missing = [name for name in expected if name not in tensors]
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}")
    unread = [name for name in tensors if name not in expected]
    if unread:
        problems.append(f"tensors that {program.config.architecture} does not read: {_listed(unread)}")
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            problems.append(
                f"tensor {name!r} has shape {list(tensors[name].shape)}, the model needs {list(shape)}"
            )
    if problems:
        raise ModelFileError(
            "the file does not fit the model: " + "; ".join(problems[:8]),
            hint="the file may be damaged, or a variation of the architecture that is not supported",
        )


def expected_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a program reads, by name, in order of first use."""
    vocab_size = program.config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for op in program.ops:
        if isinstance(op, Embed):
            shapes[op.weight] = (vocab_size, op.out.width)
        elif isinstance(op, RMSNorm):
            shapes[op.weight] = (op.width,)
        elif isinstance(op, Linear):
            shapes[op.weight] = (op.out.width, op.x.width)
            if op.bias is not None:
                shapes[op.bias] = (op.out.width,)
        elif isinstance(op, Logits):
            shapes[op.weight] = (vocab_size, op.x.width)
    return shapes


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _heads_to_reorder(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, int]:
    """Query and key projections, and their biases, with their numbers of heads."""
    heads = {}
    for i in range(config.num_layers):
        for stem, num_heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
            for name in (f"blk.{i}.{stem}.weight", f"blk.{i}.{stem}.bias"):
                if name in tensors:
                    if tensors[name].shape[0] != num_heads * config.head_dim:
                        raise ModelFileError(
                            f"tensor {name!r} has {tensors[name].shape[0]} rows, "
                            f"{num_heads} heads of {config.head_dim} need {num_heads * config.head_dim}",
                            hint="convert the model again with a current converter",
                        )
                    heads[name] = num_heads
    return heads


class _RowsInOrder(Mapping[str, Tensor]):
    """Tensors with the rows of some put back in order, one at a time as they are looked up."""

    def __init__(self, tensors: Mapping[str, Tensor], num_heads: Mapping[str, int]) -> None:
        self.as_stored = tensors
        self._num_heads = num_heads

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.as_stored[name]
        num_heads = self._num_heads.get(name)
        return tensor if num_heads is None else _undo_interleaving(tensor, num_heads)

    def __contains__(self, name: object) -> bool:
        return name in self.as_stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_stored)

    def __len__(self) -> int:
        return len(self.as_stored)


def _undo_interleaving(tensor: Tensor, num_heads: int) -> Tensor:
    """Row 2i + s of a head, as llama's GGUF files store it, becomes row i + s * head_dim / 2.

    Rows are whole runs of bytes whatever their type, so nothing is unpacked.
    """
    row_bytes = len(tensor.data) // tensor.shape[0]
    rows = tensor.data.reshape(num_heads, -1, 2, row_bytes)
    return replace(tensor, data=rows.swapaxes(1, 2).reshape(-1))
