"""`Checkpoint`: a model file as the rest of the program sees it, whatever its format did to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from pagoda.errors import ModelFileError, PagodaError
from pagoda.models.config import ModelConfig
from pagoda.runtime.program import Program
from pagoda.weights.gguf import read_gguf
from pagoda.weights.gguf_config import ROPE_TENSORS, model_config_from_gguf
from pagoda.weights.hf_config import model_config_from_hf
from pagoda.weights.hf_folder import HFFolder, read_hf_folder
from pagoda.weights.metadata import Metadata
from pagoda.weights.packed_int4 import packed_parts, with_packed_layers
from pagoda.weights.program_tensors import ProgramTensors, gguf_tensors, hf_tensors
from pagoda.weights.quantize import Quantization, quantized
from pagoda.weights.safetensors import read_safetensors
from pagoda.weights.tensor import Tensor, TensorOutline, WeightSource, outlines_of
from pagoda.weights.tensor_file import TensorFile


class Checkpoint:
    """An open model: configuration, metadata and, as a `WeightSource`, tensors in the order Pagoda uses.

    A tensor that is not stored as the program reads it (rows of llama's GGUF files, packed or fused layers,
    weights to be quantised) is made when it is looked up, and not kept; all others are views of mapped files.
    `folder` is what a Hugging Face folder says beside its weights; None for a GGUF file.
    """

    def __init__(
        self,
        file: TensorFile,
        config: ModelConfig,
        tensors: ProgramTensors,
        *,
        folder: HFFolder | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.quantization = quantization
        self._file = file
        self._stored = tensors
        self._tensors = tensors if quantization is None else quantized(tensors, quantization)

    @property
    def path(self) -> Path:
        """The model's folder, or the first of its files."""
        return self._file.paths[0] if self.folder is None else self.folder.path

    @property
    def metadata(self) -> Metadata:
        return self._file.metadata

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Raises ModelFileError when the file has shrunk since it was opened."""
        self._file.check_size()
        return self._tensors

    @property
    def outlines(self) -> Mapping[str, TensorOutline]:
        """Types and shapes of `tensors`, for which none is read or made."""
        return outlines_of(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, quantised as they will be."""
        return sum(outline.num_bytes for outline in self.outlines.values())

    def digest(self) -> str:
        """Identifies the model: equal files, wherever they are, have equal digests."""
        digest = self._file.digest()
        if self.folder is not None:  # GGUF files have their configuration in the header
            digest += sha256(json.dumps(self.folder.config, sort_keys=True).encode()).hexdigest()[:8]
        return digest if self.quantization is None else f"{digest}-{self.quantization}"

    def config_for(self, max_model_len: int) -> ModelConfig:
        """The configuration for sequences of at most that length, on which some rope scalings depend."""
        if self.folder is None:
            return model_config_from_gguf(self.metadata, self._file.tensors, max_model_len)
        return model_config_from_hf(self.folder.config, self._stored.stored, max_model_len)

    def release(self, name: str) -> None:
        stored = self._stored.stored_name(name)
        for part in packed_parts(stored) if stored not in self._file.tensors else (stored,):
            self._file.release(part)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_checkpoint(path: str | os.PathLike[str], *, quantization: Quantization | None = None) -> Checkpoint:
    """Open the model at `path`: a GGUF file, any shard of a split one, or a Hugging Face folder.

    Weights are mapped, not read. `quantization` has matrices quantised as they are looked up.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFileError: the file is damaged or inconsistent.
        UnsupportedError: the architecture, a tensor type or a rope scaling is not supported, or
            `quantization` is asked of weights that are quantised already.
    """
    path = Path(path)
    file = read_safetensors(path) if path.is_dir() else read_gguf(path)
    try:
        if path.is_dir():
            return _checkpoint_of_folder(file, read_hf_folder(path), quantization)
        config = model_config_from_gguf(file.metadata, file.tensors)
        weights = {name: t for name, t in file.tensors.items() if name not in ROPE_TENSORS}
        return Checkpoint(file, config, gguf_tensors(weights, config), quantization=quantization)
    except PagodaError as e:
        file.close()
        named = e.message if e.message.startswith(f"{path}") else f"{path}: {e.message}"
        raise type(e)(named, hint=e.hint) from e


def _checkpoint_of_folder(
    file: TensorFile, folder: HFFolder, quantization: Quantization | None
) -> Checkpoint:
    stored = with_packed_layers(file, folder.config)
    config = model_config_from_hf(folder.config, stored)
    tensors = hf_tensors(stored, config)
    return Checkpoint(file, config, tensors, folder=folder, quantization=quantization)


def require_all_read(weights: WeightSource, program: Program) -> None:
    """Check that the program reads every tensor of the file, and that all have the shape it expects.

    A tensor that nothing reads is a bias or a scale left out: the model would load and answer wrongly.

    Raises:
        ModelFileError: the message lists what is missing, unread or of another shape.
    """
    tensors = outlines_of(weights.tensors)
    expected = program.weight_shapes()
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


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
