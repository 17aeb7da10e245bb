"""`pagoda info MODEL` says what a model is and what of it is honoured, from metadata alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import main
from pagoda.core.cost import CPU_KV_DTYPE
from pagoda.engine.chat_template import ChatTemplate
from pagoda.engine.template_features import template_features
from pagoda.weights.checkpoint import load_checkpoint
from pagoda.weights.tensor import TensorType
from tests.engine.hf_tokenizers import tokenizer_json
from tests.engine.tiny_vocabularies import CHATML
from tests.gguf_files import tiny_metadata, tiny_tensors, write_gguf, write_tiny_model
from tests.models.tiny_checkpoints import TINY_MODELS
from tests.models.tiny_hf import TINY_HF, hf_weights
from tests.real_models import GEMMA3, real_model
from tests.safetensors_files import write_folder
from tests.weights.test_hf_checkpoint import hf_arrays, hf_config

Capture = pytest.CaptureFixture[str]
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHATML
THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def info(model: Path, capsys: Capture) -> dict[str, Any]:
    assert main(["info", str(model), "--json"]) == 0
    described: dict[str, Any] = json.loads(capsys.readouterr().out)
    return described


def rows(model: Path, capsys: Capture) -> list[tuple[str, str]]:
    assert main(["info", str(model)]) == 0
    return [(line[:18].strip(), line[18:]) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", ["hf-gemma3", "hf-qwen3moe", "hf-phi3", "hf-gpt2"])
def test_shapes_and_kv_bytes_are_those_that_will_be_allocated(
    tmp_path: Path, capsys: Capture, name: str
) -> None:
    model = TINY_HF[name]
    folder = write_folder(tmp_path / "m", model.config, hf_weights(model))
    described = info(folder, capsys)
    with load_checkpoint(folder) as checkpoint:
        config, spec = checkpoint.config, checkpoint.config.kv_cache_spec(dtype=CPU_KV_DTYPE)
        num_bytes = checkpoint.num_bytes
    assert described["supported"] is True
    assert described["shape"]["architecture"] == config.architecture
    assert described["shape"]["head_dim"] == config.head_dim
    assert ("experts" in described["shape"]) == (config.experts is not None)
    groups = described["kv_cache"]["groups"]
    assert [g["window"] for g in groups] == [g.window for g in spec.groups]
    assert [g["bytes_per_token"] for g in groups] == [spec.bytes_per_token(i) for i in range(len(groups))]
    assert described["kv_cache"]["bytes_per_token"] == sum(g["bytes_per_token"] for g in groups)
    assert described["kv_cache"]["sequence_bytes"] == spec.sequence_bytes(config.max_position)
    assert described["weight_bytes"] == num_bytes == sum(t["bytes"] for t in described["tensors"])


def test_a_folder_says_what_its_files_say(tmp_path: Path, capsys: Capture) -> None:
    """Tokenizer, template, ends of answers; sampling defaults are not honoured, and it says so."""
    files = {
        "tokenizer.json": tokenizer_json("qwen"),
        "tokenizer_config.json": {"chat_template": THINKING},
        "generation_config.json": {"eos_token_id": [7, 3], "temperature": 0.6, "top_p": 0.9},
    }
    model = TINY_MODELS["qwen2"]
    folder = write_folder(tmp_path / "Tiny-1B", hf_config(model), hf_arrays(model), num_shards=2, files=files)
    described = info(folder, capsys)
    assert described["model"] == "Tiny-1B"
    assert described["format"] == "safetensors"
    assert described["tokenizer"]["kind"] == "BPE"
    assert described["chat_template"]["thinking"] == "switchable"
    assert described["tensors"] == [
        {"type": "F32", "count": len(hf_arrays(model)), "bytes": described["weight_bytes"]}
    ]
    assert described["honoured"] == ["end tokens 3, 7, and those known by name"]
    (not_honoured,) = described["not_honoured"]
    assert "temperature 0.6, top_p 0.9" in not_honoured
    shown = rows(folder, capsys)
    assert ("honoured", "end tokens 3, 7, and those known by name") in shown
    assert ("not honoured", not_honoured) in shown


def test_windows_and_types_are_told(tmp_path: Path, capsys: Capture) -> None:
    metadata = tiny_metadata(TINY_MODELS["llama-window"])
    tensors = tiny_tensors(TINY_MODELS["llama-window"], TensorType.MXFP4)
    described = info(write_gguf(tmp_path / "m.gguf", metadata, tensors), capsys)
    assert described["format"] == "gguf"
    assert described["honoured"] == [
        "sliding window of 20 tokens in 2 of 2 layers",
        "MXFP4 held in 8 bits: exact, twice the memory",
    ]
    types = {entry["type"]: entry["count"] for entry in described["tensors"]}
    assert types == {"MXFP4": sum(t.type is TensorType.MXFP4 for t in tensors.values()), "F32": 5}
    assert described["tokenizer"] is None
    assert described["chat_template"] is None


def test_tensors_that_nothing_reads_are_not_honoured(tmp_path: Path, capsys: Capture) -> None:
    tensors = tiny_tensors(TINY_MODELS["qwen2"])
    tensors["blk.0.attn_gate.weight"] = tensors["blk.0.attn_q.weight"]
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(TINY_MODELS["qwen2"]), tensors)
    (not_honoured,) = info(path, capsys)["not_honoured"]
    assert "does not read: blk.0.attn_gate.weight" in not_honoured


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_model_that_cannot_be_run_is_described_as_far_as_it_goes(
    tmp_path: Path, capsys: Capture, in_folder: bool
) -> None:
    model = TINY_MODELS["qwen2"]
    if in_folder:
        config = hf_config(model) | {"model_type": "mamba"}
        path = write_folder(tmp_path / "m", config, hf_arrays(model))
    else:
        path = write_tiny_model(tmp_path / "m.gguf", model, metadata={"general.architecture": "mamba"})
    described = info(path, capsys)
    assert described["supported"] is False
    assert "'mamba'" in described["reason"]
    assert described["shape"] == {"architecture": "mamba"}
    assert sum(t["count"] for t in described["tensors"]) == len(hf_arrays(model))
    assert dict(rows(path, capsys))["not supported"] == described["reason"]


@pytest.mark.parametrize(
    ("source", "system", "tools", "thinking"),
    [
        (CHATML, "shown", "ignored", "none"),
        (STRICT, "refused", "ignored", "none"),
        ("{{ messages[-1].content }}", "ignored", "ignored", "none"),
        (TOOLS, "shown", "shown", "none"),
        (THINKING, "shown", "ignored", "switchable"),
        (CHATML + "<think>", "shown", "ignored", "always"),
    ],
)
def test_what_a_template_can_do_is_found_by_rendering(
    source: str, system: str, tools: str, thinking: str
) -> None:
    """A template may name a thing only to refuse it."""
    features = template_features(ChatTemplate(source, bos_token="", eos_token=""))
    assert (features.system, features.tools, features.thinking) == (system, tools, thinking)
    assert features.problem is None


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{% for x in y %}", "{% while %}"])
def test_a_template_that_never_renders_is_told(tmp_path: Path, capsys: Capture, template: str) -> None:
    path = write_tiny_model(
        tmp_path / "m.gguf", TINY_MODELS["qwen2"], metadata={"tokenizer.chat_template": template}
    )
    assert info(path, capsys)["chat_template"]["problem"]
    assert any("chat template" in label for label, _ in rows(path, capsys))


def test_a_revision_needs_a_model(capsys: Capture) -> None:
    assert main(["info", "--revision", "v1"]) == 2
    assert "--revision needs a MODEL" in capsys.readouterr().err


def test_the_machine_is_described_as_json_too(capsys: Capture) -> None:
    assert main(["info", "--json"]) == 0
    assert {"pagoda", "cores", "memory limit"} <= set(json.loads(capsys.readouterr().out))


def test_info_reads_no_weight_and_imports_no_backend(tmp_path: Path) -> None:
    """So that it takes well under a second, whatever the size of the model."""
    path = write_tiny_model(
        tmp_path / "m.gguf", TINY_MODELS["qwen2"], metadata={"tokenizer.chat_template": CHATML}
    )
    code = (
        "import sys\nfrom pagoda.cli import main\nfrom pagoda.weights import tensor\n"
        "from pagoda.weights.program_tensors import ProgramTensors\n"
        "def fail(self, name): raise AssertionError(name)\n"
        "ProgramTensors.__getitem__ = tensor.DerivedTensors.__getitem__ = fail\n"
        f"assert main(['info', {str(path)!r}]) == 0\n"
        "heavy = {'pagoda._native', 'tokenizers', 'pagoda.engine.engine', 'fastapi'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.real_model
def test_a_real_model_is_described(capsys: Capture) -> None:
    described = info(real_model(GEMMA3), capsys)
    assert [g["window"] for g in described["kv_cache"]["groups"]] == [512, None]
    assert described["honoured"] == ["sliding window of 512 tokens in 15 of 18 layers"]
    assert described["not_honoured"] == []
