"""`Checkpoint`: a model file as the rest of the program sees it, whatever its format did to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType

from pagoda.errors import ModelFileError, PagodaError
from pagoda.models.config import ModelConfig
from pagoda.runtime.program import Program
from pagoda.weights.gguf import GGUFFile, read_gguf
from pagoda.weights.gguf_config import ROPE_TENSORS, model_config_from_gguf
from pagoda.weights.metadata import Metadata
from pagoda.weights.program_tensors import ProgramTensors, gguf_tensors
from pagoda.weights.tensor import Tensor, WeightSource


class Checkpoint:
    """An open model: configuration, metadata and, as a `WeightSource`, tensors in the order Pagoda uses.

    Tensors whose rows the file orders otherwise (queries and keys of llama's files) are copied as they are
    looked up, and the copy is not kept. All others are views of the mapped file.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, tensors: ProgramTensors) -> None:
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

    def config_for(self, max_model_len: int) -> ModelConfig:
        """The configuration for sequences of at most that length, on which some rope scalings depend."""
        return model_config_from_gguf(self.metadata, self._file.tensors, max_model_len)

    def release(self, name: str) -> None:
        self._file.release(self._tensors.stored_name(name))

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
        weights = {name: t for name, t in file.tensors.items() if name not in ROPE_TENSORS}
        tensors = gguf_tensors(weights, config)
    except PagodaError as e:
        file.close()
        raise type(e)(f"{os.fspath(path)}: {e.message}", hint=e.hint) from e
    return Checkpoint(file, config, tensors)


def require_all_read(weights: WeightSource, program: Program) -> None:
    """Check that the program reads every tensor of the file, and that all have the shape it expects.

    A tensor that nothing reads is a bias or a scale left out: the model would load and answer wrongly.

    Raises:
        ModelFileError: the message lists what is missing, unread or of another shape.
    """
    tensors = weights.tensors
    shape_of = tensors.shape if isinstance(tensors, ProgramTensors) else lambda name: tensors[name].shape
    expected = program.weight_shapes()
    problems = []
    missing = [name for name in expected if name not in tensors]
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}")
    unread = [name for name in tensors if name not in expected]
    if unread:
        problems.append(f"tensors that {program.config.architecture} does not read: {_listed(unread)}")
    for name, shape in expected.items():
        if name in tensors and shape_of(name) != shape:
            problems.append(
                f"tensor {name!r} has shape {list(shape_of(name))}, the model needs {list(shape)}"
            )
    if problems:
        raise ModelFileError(
            "the file does not fit the model: " + "; ".join(problems[:8]),
            hint="the file may be damaged, or a variation of the architecture that is not supported",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
