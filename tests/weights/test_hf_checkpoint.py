"""A Hugging Face folder is the same model as its tensors in memory, and as its GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.backends.cpu import CPUBackend
from pagoda.backends.reference import ReferenceBackend
from pagoda.errors import ModelFileError, PagodaError, UnsupportedError
from pagoda.models import build_program
from pagoda.weights.checkpoint import Checkpoint, load_checkpoint, require_all_read
from pagoda.weights.dequantize import dequantize
from pagoda.weights.tensor import TensorType
from tests.gguf_files import write_tiny_model
from tests.models.run_program import PagedModel, run_chunked
from tests.models.tiny_checkpoints import TINY_MODELS, TinyModel, weights
from tests.models.tiny_hf import TINY_HF, hf_token_ids, hf_weights
from tests.safetensors_files import bf16, write_folder
from tests.weights.test_packed_int4 import AWQ, GPTQ, awq_files, gptq_files, random_layer

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
HF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def hf_name(name: str) -> str:
    """`blk.1.attn_q.weight` -> `model.layers.1.self_attn.q_proj.weight`."""
    parts = name.split(".")
    stem = HF_NAMES[parts[-2]]
    return f"model.layers.{parts[1]}.{stem}.{parts[-1]}" if parts[0] == "blk" else f"{stem}.{parts[-1]}"


def hf_config(model: TinyModel) -> dict[str, Any]:
    return {
        "model_type": model.architecture,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied_embeddings,
    }


def hf_arrays(model: TinyModel) -> dict[str, Any]:
    return {hf_name(name): array for name, array in weights(model).items()}


def run(checkpoint: Checkpoint, token_ids: list[int], backend: Any = None) -> np.ndarray:
    paged = PagedModel.compile(
        backend or ReferenceBackend(),
        build_program(checkpoint.config),
        checkpoint,
        num_tokens=600,
        kv_dtype="f32" if backend is None else None,
    )
    (logits,) = run_chunked(paged, [token_ids])
    return np.asarray(logits)


@pytest.mark.parametrize("name", ["hf-mistral", "hf-gemma3", "hf-phi3", "hf-gpt2", "hf-qwen3moe"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_logits_from_a_folder_are_those_of_transformers(tmp_path: Path, name: str, num_shards: int) -> None:
    """D14: windows, fused, transposed and routed layers, norms stored less one; whole and in shards."""
    model = TINY_HF[name]
    folder = write_folder(tmp_path / "m", model.config, hf_weights(model), num_shards=num_shards)
    with np.load(GOLDEN / f"{name}.npz") as stored:
        golden = stored["logits"]
    with load_checkpoint(folder) as checkpoint:
        require_all_read(checkpoint, build_program(checkpoint.config))
        logits = run(checkpoint, hf_token_ids(model))
    np.testing.assert_allclose(logits, golden, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa", "qwen2", "qwen2-untied"])
def test_a_folder_and_a_gguf_file_are_the_same_model(tmp_path: Path, name: str) -> None:
    """D16, D10: q and k rows too, with fewer KV heads than heads; tied heads and heads of their own."""
    model = TINY_MODELS[name]
    folder = write_folder(tmp_path / "m", hf_config(model), hf_arrays(model))
    path = write_tiny_model(tmp_path / "m.gguf", model)
    with load_checkpoint(folder) as a, load_checkpoint(path) as b:
        assert a.config == replace(b.config, norm_eps=1e-5)  # which GGUF rounds to float32
        assert a.tensors.keys() == b.tensors.keys()
        for weight in a.tensors:
            assert np.array_equal(dequantize(a.tensors[weight]), dequantize(b.tensors[weight])), weight
            a.release(weight)
        assert a.num_bytes == b.num_bytes
        assert a.digest() != b.digest()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_runs_on_the_native_backend(tmp_path: Path, dtype: str) -> None:
    model = TINY_MODELS["llama-gqa"]
    arrays = {n: a.astype(np.float16) if dtype == "f16" else bf16(a) for n, a in hf_arrays(model).items()}
    folder = write_folder(tmp_path / "m", hf_config(model), arrays)
    token_ids = list(range(40))
    with load_checkpoint(folder) as checkpoint:
        assert {t.type.name for t in checkpoint.outlines.values()} == {dtype.upper()}
        expected, logits = run(checkpoint, token_ids), run(checkpoint, token_ids, CPUBackend())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize(("quantization", "lost"), [("q8", 0.02), ("q4", 0.25)])
def test_quantising_at_load_costs_little(tmp_path: Path, quantization: Any, lost: float) -> None:
    model = TINY_MODELS["qwen2-untied"]
    folder = write_folder(tmp_path / "m", hf_config(model), hf_arrays(model))
    token_ids = list(range(40))
    with load_checkpoint(folder) as plain, load_checkpoint(folder, quantization=quantization) as checkpoint:
        assert checkpoint.outlines["token_embd.weight"].type is TensorType.Q8_0
        assert checkpoint.outlines["blk.0.attn_norm.weight"].type is TensorType.F32
        assert checkpoint.num_bytes < plain.num_bytes / 3
        assert checkpoint.digest() != plain.digest()
        exact, reference = run(plain, token_ids), run(checkpoint, token_ids)
        native = run(checkpoint, token_ids, CPUBackend())
    size = np.sqrt(np.mean(exact**2))
    assert 0 < np.sqrt(np.mean((reference - exact) ** 2)) < lost * size
    assert np.sqrt(np.mean((native - reference) ** 2)) < 0.03 * size


def test_a_gguf_file_of_floats_can_be_quantised_too(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TINY_MODELS["llama-gqa"])
    with load_checkpoint(path, quantization="q8") as checkpoint, load_checkpoint(path) as plain:
        for name, tensor in checkpoint.tensors.items():
            exact = dequantize(plain.tensors[name])
            bound = np.abs(exact).max() / 200 if tensor.type is TensorType.Q8_0 else 0
            np.testing.assert_allclose(dequantize(tensor), exact, rtol=0, atol=bound)
    quantised = write_tiny_model(tmp_path / "q.gguf", TINY_MODELS["llama-gqa"], tensor_type=TensorType.Q8_0)
    with pytest.raises(UnsupportedError, match=r"q\.gguf: the model's weights are quantised already"):
        load_checkpoint(quantised, quantization="q4")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_packed_layers_are_the_model_of_their_integers(tmp_path: Path, method: str) -> None:
    """The same model with those layers in floats gives the same logits, but for rounded minima."""
    model = TINY_MODELS["qwen2-untied"]
    floats, packed = hf_arrays(model), hf_arrays(model)
    for name, array in hf_arrays(model).items():
        if array.ndim == 2 and ".layers." in name:
            outputs, inputs = array.shape
            layer, weight = random_layer(inputs, outputs, 32, seed=len(packed))
            stem = name.removesuffix(".weight")
            del packed[name]
            packed |= awq_files(layer, stem) if method == "awq" else gptq_files(layer, 32, name=stem)
            floats[name] = weight.astype(np.float32)
    config = hf_config(model)
    quantization = (AWQ if method == "awq" else GPTQ) | {"group_size": 32}
    token_ids = list(range(30))
    packed_config = config | {"quantization_config": quantization}
    with (
        load_checkpoint(write_folder(tmp_path / "f", config, floats)) as plain,
        load_checkpoint(write_folder(tmp_path / "p", packed_config, packed)) as checkpoint,
    ):
        assert checkpoint.config == plain.config
        assert checkpoint.outlines["blk.1.ffn_up.weight"].type is TensorType.Q4_1
        require_all_read(checkpoint, build_program(checkpoint.config))
        expected, logits = run(plain, token_ids), run(checkpoint, token_ids)
        native = run(checkpoint, token_ids, CPUBackend())
        for name in checkpoint.tensors:
            checkpoint.release(name)
    size = np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.005 * size)
    np.testing.assert_allclose(native, expected, rtol=0, atol=0.05 * size)
    with pytest.raises(UnsupportedError, match="quantised already"):
        load_checkpoint(tmp_path / "p", quantization="q4")


def test_a_digest_names_weights_and_configuration(tmp_path: Path) -> None:
    """H06: keys of one model are not those of another with the same weights and another rotation."""
    model = TINY_MODELS["qwen2"]
    digests = []
    for name, theta in (("a", 10000.0), ("b", 10000.0), ("c", 500000.0)):
        config = hf_config(model) | {"rope_theta": theta}
        with load_checkpoint(write_folder(tmp_path / name, config, hf_arrays(model))) as checkpoint:
            digests.append(checkpoint.digest())
    assert digests[0] == digests[1] != digests[2]


def test_tensors_that_nothing_reads_are_an_error(tmp_path: Path) -> None:
    """A39."""
    model = TINY_MODELS["qwen2"]
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}
    folder = write_folder(tmp_path / "m", hf_config(model), hf_arrays(model) | extra)
    with (
        load_checkpoint(folder) as checkpoint,
        pytest.raises(ModelFileError, match=r"does not read: model\.layers\.0\.self_attn\.q_norm"),
    ):
        require_all_read(checkpoint, build_program(checkpoint.config))


def test_missing_tensors_are_an_error(tmp_path: Path) -> None:
    """D14."""
    arrays = hf_arrays(TINY_MODELS["qwen2"])
    del arrays["model.layers.1.mlp.up_proj.weight"]
    folder = write_folder(tmp_path / "m", hf_config(TINY_MODELS["qwen2"]), arrays)
    with (
        load_checkpoint(folder) as checkpoint,
        pytest.raises(ModelFileError, match=r"missing tensors: blk\.1\.ffn_up\.weight"),
    ):
        require_all_read(checkpoint, build_program(checkpoint.config))


def test_errors_name_the_folder(tmp_path: Path) -> None:
    arrays = hf_arrays(TINY_MODELS["qwen2"])
    folder = write_folder(tmp_path / "m", hf_config(TINY_MODELS["qwen2"]) | {"model_type": "mamba"}, arrays)
    with pytest.raises(UnsupportedError, match=rf"^{folder}: .*'mamba'"):
        load_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(PagodaError, match=rf"^{folder}: the folder has no config\.json"):
        load_checkpoint(folder)
