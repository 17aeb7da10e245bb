"""A Hugging Face folder runs end to end: tokenizer, template, ends of answers, quantised or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagoda import LLM, SamplingParams
from pagoda.cli import main
from pagoda.errors import ConfigError, ModelFileError, UnsupportedError
from tests.engine.hf_tokenizers import tokenizer_json
from tests.engine.tiny_vocabularies import CHATML
from tests.models.tiny_checkpoints import TINY_MODELS
from tests.safetensors_files import write_folder
from tests.weights.test_hf_checkpoint import hf_arrays, hf_config

MODEL = replace(TINY_MODELS["qwen2-untied"], vocab_size=640, name="end-to-end")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "tokenizer.json": tokenizer_json("qwen"),
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "chat_template.jinja": CHATML,
    }
    return write_folder(tmp_path / "m", hf_config(MODEL), hf_arrays(MODEL), num_shards=2, files=files)


def test_a_folder_answers_as_the_reference_backend_does(folder: Path) -> None:
    texts = []
    for backend in ("cpu", "reference"):
        with LLM(folder, backend=backend) as llm:
            (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
            assert llm.engine.tokenizer is not None
            assert output.prompt_token_ids[0] == llm.engine.tokenizer.encode("<|im_start|>")[0]
            texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("quantization", ["q8", "q4"])
def test_weights_quantised_at_load_answer_too(folder: Path, quantization: str) -> None:
    tokens = []
    for backend in ("cpu", "reference"):
        with LLM(folder, backend=backend, quantization=quantization) as llm:
            tokens.append(llm.generate(["The quick"], GREEDY)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_the_command_line_takes_folders_and_quantisations(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(folder), "-p", "hi", "--temperature", "0", "--max-tokens", "4"]
    assert main([*arguments, "--quantization", "q8"]) == 0
    assert capsys.readouterr().out.strip()
    assert main([*arguments, "--quantization", "q3"]) == 1
    assert "quantization is 'q3'; it must be one of q8, q4" in capsys.readouterr().err


def test_what_cannot_be_honoured_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="it must be one of q8, q4"):
        LLM(folder, quantization="awq")
    with pytest.raises(ConfigError, match=r"revision is .main., and"):
        LLM(folder, revision="main")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        LLM(folder)


def test_models_of_unknown_quantisations_are_refused(tmp_path: Path) -> None:
    config = hf_config(MODEL) | {"quantization_config": {"quant_method": "fp8"}}
    folder = write_folder(tmp_path / "m", config, hf_arrays(MODEL))
    with pytest.raises(UnsupportedError, match="quantised with 'fp8'"):
        LLM(folder)
