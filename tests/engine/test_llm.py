"""`LLM`: a model file goes in, answers come out; what cannot be had is refused at load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagoda
from pagoda import LLM, SamplingParams
from pagoda.errors import CapacityError, ConfigError, ModelFileError, PagodaError, RequestError
from pagoda.weights.tensor import TensorType
from tests.engine.engines import EOS, VOCAB_SIZE, check_idle, scripted_engine, tokenizer_metadata
from tests.gguf_files import encode, tiny_metadata, tiny_tensors, write_gguf, write_tiny_model
from tests.models.tiny_checkpoints import TINY_MODELS

MODEL = replace(TINY_MODELS["llama-mqa"], name="llm", vocab_size=VOCAB_SIZE)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_model(path, MODEL, metadata=tokenizer_metadata())


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"backend": "reference", "kv_cache_memory_bytes": 1 << 20, **options})


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    with load(model_file) as llm:
        yield llm


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["a longer prompt than the others", [5, 6, 7], "b"]
    params = [replace(GREEDY, max_tokens=n) for n in (2, 9, 5)]
    outputs = llm.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 9, 5]
    assert [o.prompt for o in outputs] == [prompts[0], None, "b"]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        assert llm.generate(prompt, sampling)[0].outputs == output.outputs
    check_idle(llm.engine)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    message = {"role": "user", "content": "hello"}
    (output,) = llm.chat([message], GREEDY)
    assert bytes(output.prompt_token_ids) == b"<user>hello"
    both = llm.chat([[message], [message, message]], GREEDY)
    assert [bytes(o.prompt_token_ids) for o in both] == [b"<user>hello", b"<user>hello<user>hello"]
    assert both[0].outputs == output.outputs
    streamed = list(llm.stream_chat([message], GREEDY))
    assert "".join(o.outputs[0].text for o in streamed) == output.outputs[0].text


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_one_bad_prompt_refuses_all_before_anything_runs(llm: LLM) -> None:
    num_steps = llm.engine.scheduler.num_steps
    with pytest.raises(RequestError, match="token ids of this model"):
        llm.generate([[1, 2], [1, VOCAB_SIZE]], GREEDY)
    with pytest.raises(RequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.engine.scheduler.num_steps == num_steps
    check_idle(llm.engine)


def test_streams_and_batches_share_an_engine(llm: LLM) -> None:
    """What a step brings for one caller is not lost to another."""
    (expected,) = llm.generate("stream", GREEDY)
    stream = llm.stream("stream", GREEDY)
    first = next(stream)
    other = llm.generate(["x", "y"], GREEDY)
    assert all(o.finished for o in other)
    deltas = [first, *stream]
    assert [t for d in deltas for t in d.outputs[0].token_ids] == expected.outputs[0].token_ids
    assert deltas[-1].finished
    check_idle(llm.engine)


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("stream", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm.engine)
    unread = llm.stream("stream", GREEDY)
    del unread
    check_idle(llm.engine)
    assert llm._inboxes == {}


def test_progress_is_shown_on_stderr_only(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "prompts" in captured.err
    llm.generate(["a"], GREEDY)
    assert capsys.readouterr().err == ""


def test_nothing_but_failures_is_raised() -> None:
    engine = scripted_engine([np.full(VOCAB_SIZE, np.nan)])
    with pytest.raises(PagodaError, match="not finite"):
        LLM.from_engine(engine).generate("a")
    script = {"llm-0": [np.full(VOCAB_SIZE, np.nan)], "llm-1": [97, EOS]}
    failed, done = LLM.from_engine(scripted_engine(script)).generate(["a", "b"])
    assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].error
    assert done.outputs[0].text == "a"


def test_interrupted_generation_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = llm.engine.executor.execute

    def interrupt(step: Any) -> Any:
        if llm.engine.scheduler.num_steps % 3 == 0:
            raise KeyboardInterrupt
        return execute(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=50, ignore_eos=True))
    assert llm.generate("a", GREEDY)[0].finished
    check_idle(llm.engine)


def test_the_seed_makes_unseeded_requests_reproducible(model_file: Path) -> None:
    def texts(**options: Any) -> list[list[int]]:
        with load(model_file, **options) as llm:
            outputs = llm.generate(["a", "a"], SamplingParams(temperature=5.0, max_tokens=12))
            return [list(o.outputs[0].token_ids) for o in outputs]

    first = texts(seed=1)
    assert first == texts(seed=1) and first[0] != first[1]
    assert first != texts(seed=2)


def test_answers_do_not_depend_on_how_the_cache_is_set_up(model_file: Path, llm: LLM) -> None:
    prompts = ["some shared beginning, then this", "some shared beginning, then that"]
    expected = [o.outputs for o in llm.generate(prompts, GREEDY)]
    options: list[dict[str, Any]] = [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 1},
        {"block_size": 4},
        {"max_model_len": 48},
    ]
    for changed in options:
        with load(model_file, **changed) as other:
            assert [o.outputs for o in other.generate(prompts, GREEDY)] == expected


def test_max_model_len_is_the_models_own_or_what_memory_holds(model_file: Path) -> None:
    with load(model_file) as llm:
        assert llm.engine.max_model_len == MODEL.max_position
        bytes_per_block = llm.engine.scheduler.kv.spec.block_bytes(0)
        outputs = llm.generate("a", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert outputs[0].metrics.num_output_tokens == MODEL.max_position - 1
    with load(model_file, kv_cache_memory_bytes=3 * bytes_per_block) as llm:
        assert llm.engine.max_model_len == 48
        assert llm.engine.executor.num_blocks == (3,)
        with pytest.raises(RequestError, match="max_model_len, which is 48"):
            llm.generate([[1] * 48], GREEDY)
    with pytest.raises(CapacityError, match=r"max_model_len = 200 tokens needs .* MiB") as caught:
        load(model_file, max_model_len=200, kv_cache_memory_bytes=3 * bytes_per_block)
    assert caught.value.hint is not None and "--max-model-len 48" in caught.value.hint
    with pytest.raises(CapacityError):
        load(model_file, kv_cache_memory_bytes=bytes_per_block - 1)
    with pytest.raises(ConfigError, match="trained for 256"):
        load(model_file, max_model_len=257)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gpu"}, "cpu, reference"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 2}, "one thread"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kv_cache_dtype": "f8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bf16"}, "bf16"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    model_file: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PagodaError, match=message):
        load(model_file, **options)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_model_whose_logits_say_nothing_is_refused(tmp_path: Path, value: float) -> None:
    """A41: flat or non-finite logits, at load and not in every answer."""
    tensors = dict(tiny_tensors(MODEL))
    head = np.full((VOCAB_SIZE, MODEL.hidden_size), value, np.float32)
    tensors["output.weight"] = head
    path = write_gguf(tmp_path / "bad.gguf", {**tiny_metadata(MODEL), **tokenizer_metadata()}, tensors)
    with pytest.raises(ModelFileError, match="flat" if value == 0.0 else "not finite"):
        load(path)


def test_importing_pagoda_is_cheap_and_names_are_all_there() -> None:
    """`pagoda --version` must not pay for numpy."""
    code = (
        "import sys, pagoda\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'rich', 'pagoda.engine'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "pagoda.SamplingParams()\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in pagoda.__all__:
        assert getattr(pagoda, name) is not None
    assert set(pagoda.__all__) <= set(dir(pagoda))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pagoda.Nothing  # noqa: B018


def test_cached_blocks_are_named_after_the_weights_and_the_kv_type(model_file: Path, tmp_path: Path) -> None:
    """Two engines share names of blocks exactly when their keys and values are the same."""
    copied = tmp_path / "copy.gguf"
    copied.write_bytes(model_file.read_bytes())
    other = write_tiny_model(
        tmp_path / "other.gguf", replace(MODEL, name="other"), metadata=tokenizer_metadata()
    )

    def names(path: Path, **options: Any) -> set[str]:
        with load(path, **options) as llm:
            llm.generate([list(range(60))], GREEDY)
            return {info.hash for info in llm.engine.list_prefixes()}

    one = names(model_file)
    assert one and names(copied) == one
    for different in (
        names(other),
        names(model_file, kv_cache_dtype="f32"),
        names(model_file, backend="cpu"),
    ):
        assert different and not different & one


def test_a_prefix_is_pinned_through_the_engine(llm: LLM) -> None:
    system = list(range(64))
    llm.generate([system], SamplingParams(max_tokens=0))
    assert llm.engine.pin_prefix(system, ttl_s=100.0).num_tokens == 64
    assert [info.num_tokens for info in llm.engine.list_prefixes() if info.pinned] == [64]
    assert llm.engine.unpin_prefix(system)
    assert llm.engine.reset_prefix_cache() > 0
    assert llm.engine.list_prefixes() == []


def test_rope_factors_are_chosen_for_the_longest_sequence(model_file: Path, tmp_path: Path) -> None:
    """A49: once, at load, so that no key in the cache was rotated by other factors than its query."""
    factors = {"short": np.ones(20, np.float32), "long": np.linspace(1, 8, 20, dtype=np.float32)}
    tensors = {
        f"rope_factors_{length}.weight": encode(f"rope_factors_{length}.weight", TensorType.F32, values)
        for length, values in factors.items()
    }
    metadata = tiny_metadata(MODEL) | tokenizer_metadata()
    metadata |= {"llama.rope.scaling.original_context_length": 32}
    path = write_gguf(tmp_path / "longrope.gguf", metadata, tiny_tensors(MODEL) | tensors)
    prompt = list(range(30, 54))

    def answer(file: Path, max_model_len: int) -> tuple[int, ...]:
        with load(file, max_model_len=max_model_len) as llm:
            return tuple(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids)

    plain = answer(model_file, 32)
    assert answer(path, 32) == plain
    assert answer(path, 33) != plain
    assert answer(path, 33) == answer(path, 200)
