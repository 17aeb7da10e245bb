"""The tiny models of `tiny_hf.py` as the program reads them from a folder."""

from __future__ import annotations

from pagoda.models.config import ModelConfig
from pagoda.weights.dequantize import dequantize
from pagoda.weights.hf_config import model_config_from_hf
from pagoda.weights.program_tensors import hf_tensors
from pagoda.weights.tensor import TensorType
from tests.gguf_files import encode
from tests.models.tiny_checkpoints import ArrayWeights
from tests.models.tiny_hf import TinyHF, hf_weights


def config_of(model: TinyHF) -> ModelConfig:
    return model_config_from_hf(model.config, hf_weights(model).keys(), model.num_tokens)


def weights_of(model: TinyHF, tensor_type: TensorType = TensorType.F32) -> ArrayWeights:
    """Matrices in `tensor_type`, vectors in floats."""
    tensors = hf_tensors(ArrayWeights.of(hf_weights(model)).tensors, config_of(model))
    if tensor_type == TensorType.F32:
        return ArrayWeights(tensors)
    return ArrayWeights(
        {
            name: encode(name, tensor_type, dequantize(tensor)) if len(tensor.shape) == 2 else tensor
            for name, tensor in tensors.items()
        }
    )
