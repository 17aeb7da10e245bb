"""What the model files record."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pagoda.backends.reference import ReferenceBackend
from pagoda.errors import UnsupportedError
from pagoda.models import ARCHITECTURES, build_program, find_architecture
from pagoda.runtime.program import Attention, Embed, Linear, Logits, Program, Rope
from pagoda.weights.checkpoint import load_checkpoint
from pagoda.weights.hf_config import model_config_from_hf
from pagoda.weights.program_tensors import hf_tensors
from tests.gguf_files import write_gguf
from tests.models.load_tiny_hf import config_of
from tests.models.run_program import PagedModel, run_chunked
from tests.models.tiny_checkpoints import TINY_MODELS, ArrayWeights, model_config, weights
from tests.models.tiny_gguf import gguf_metadata_of, gguf_tensors_of
from tests.models.tiny_hf import TINY_HF, hf_token_ids, hf_weights


def program_of(name: str) -> Program:
    return build_program(config_of(TINY_HF[name]) if name in TINY_HF else model_config(TINY_MODELS[name]))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_programs_read_every_tensor_of_their_checkpoint(name: str) -> None:
    """A39: q, k, v biases of qwen2 are read, and a head of its own where there is one."""
    assert set(program_of(name).weight_names()) == set(weights(TINY_MODELS[name]))


@pytest.mark.parametrize("name", [*TINY_MODELS, *TINY_HF])
def test_ops_read_only_values_written_before(name: str) -> None:
    program = program_of(name)
    written: set[int] = set()
    for op in program.ops:
        values = {field: getattr(op, field) for field in op.__slots__}
        read = {
            v.index for f, v in values.items() if f != "out" and hasattr(v, "index") and hasattr(v, "width")
        }
        assert read <= written
        if not isinstance(op, Logits):
            assert op.out.index not in written
            written.add(op.out.index)
    assert len(written) == program.num_values
    assert isinstance(program.ops[0], Embed)
    assert isinstance(program.ops[-1], Logits)


def test_layers_differ_only_in_what_the_configuration_says() -> None:
    config = replace(model_config(TINY_MODELS["llama-gqa"]), windows=(8, None), attention_softcap=3.0)
    attentions = [op for op in build_program(config).ops if isinstance(op, Attention)]
    assert [(a.layer, a.window, a.softcap) for a in attentions] == [(0, 8, 3.0), (1, None, 3.0)]
    assert {a.scale for a in attentions} == {config.head_dim**-0.5}


def test_queries_and_keys_are_rotated_and_values_are_not() -> None:
    ops = program_of("qwen2").ops
    producer = {op.out.index: op for op in ops if not isinstance(op, Logits)}
    for attention in (op for op in ops if isinstance(op, Attention)):
        assert isinstance(producer[attention.q.index], Rope)
        assert isinstance(producer[attention.k.index], Rope)
        assert isinstance(producer[attention.v.index], Linear)


def test_tied_models_read_the_embedding_as_their_head() -> None:
    heads = {name: program_of(name).ops[-1] for name in ("llama-gqa", "llama-mha")}
    assert {name: head.weight for name, head in heads.items() if isinstance(head, Logits)} == {
        "llama-gqa": "token_embd.weight",
        "llama-mha": "output.weight",
    }


def test_unknown_architectures_are_refused_with_those_known() -> None:
    config = replace(model_config(TINY_MODELS["llama-gqa"]), architecture="perceptron")
    with pytest.raises(UnsupportedError, match="'perceptron' is not supported") as error:
        build_program(config)
    assert error.value.hint is not None
    assert all(name in error.value.hint for name in ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_line_of_the_registry_has_its_file(name: str) -> None:
    assert find_architecture(name).build.__doc__


def test_an_architecture_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With no more than that, files of both kinds are read and run."""
    module = ModuleType("pagoda.models.perceptron")
    module.ARCHITECTURE = find_architecture("granite")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagoda.models.perceptron", module)
    monkeypatch.setitem(ARCHITECTURES, "perceptron", ("perceptron_lm",))

    model = TINY_HF["hf-granite"]
    config = model_config_from_hf({**model.config, "model_type": "perceptron_lm"}, hf_weights(model).keys())
    tensors = hf_tensors(ArrayWeights.of(hf_weights(model)).tensors, config)
    from_hf = PagedModel.compile(
        ReferenceBackend(), build_program(config), ArrayWeights(tensors), num_tokens=80
    )
    metadata = {
        key.replace("granite.", "perceptron."): "perceptron" if value == "granite" else value
        for key, value in gguf_metadata_of(model).items()
    }
    path = write_gguf(tmp_path / "perceptron.gguf", metadata, gguf_tensors_of(model))
    with load_checkpoint(path) as checkpoint:
        program = build_program(checkpoint.config)
        from_gguf = PagedModel.compile(ReferenceBackend(), program, checkpoint, num_tokens=80)
    ids = hf_token_ids(model)
    np.testing.assert_allclose(run_chunked(from_hf, [ids])[0], run_chunked(from_gguf, [ids])[0], atol=1e-5)
