"""Engines over a `ScriptedExecutor`, whose scheduler is checked against its invariants in every step.

engine = scripted_engine([ord("a"), ord("b"), EOS])
outputs = run(engine, {"x": (b"prompt", SamplingParams(max_tokens=8))})
outputs["x"].outputs[0].text == "ab"
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.cost import KVCacheSpec, LayerGroup
from pagoda.core.invariants import check_state, check_step
from pagoda.core.scheduler import Scheduler
from pagoda.core.step import SchedulerOutput
from pagoda.engine.engine import Engine
from pagoda.engine.output import RequestOutput
from pagoda.engine.token_bytes import byte_alphabet
from pagoda.engine.tokenizer import Tokenizer
from pagoda.sampling_params import SamplingParams
from pagoda.sim.scripted_executor import Script, ScriptedExecutor

EOS = 256
PIECES = ("DEF", "G", "HI", "J", "X", "?\n", "ple", "as", "assistant<|x|>")
VOCAB_SIZE = 257 + len(PIECES)


def token(text: str) -> int:
    """The token of one of `PIECES`."""
    return 257 + PIECES.index(text)


def tokenizer_metadata() -> dict[str, object]:
    """GGUF metadata: ids 0 to 255 are bytes, then `EOS`, then `PIECES`."""
    alphabet = byte_alphabet()
    pieces = ["".join(alphabet[byte] for byte in piece.encode()) for piece in PIECES]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "<|eos|>", *pieces],
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] + [1] * len(pieces), np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    }


def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(tokenizer_metadata())


def scripted_engine(
    script: Script,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: Sequence[int | None] = (None,),
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    before_step: Callable[[SchedulerOutput], None] | None = None,
    cache: CacheConfig | None = None,
    tokenizer: Tokenizer | None = None,
    with_tokenizer: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **engine_options: Any,
) -> Engine:
    """An engine whose executor follows `script`. One layer group for each of `windows`."""
    spec = KVCacheSpec(
        tuple(LayerGroup((layer,), 1, 8, window) for layer, window in enumerate(windows)), block_size
    )
    blocks = (num_blocks,) * len(windows)

    def check(step: SchedulerOutput) -> None:
        check_step(scheduler, step)
        if before_step is not None:
            before_step(step)

    executor = ScriptedExecutor(
        script, vocab_size=VOCAB_SIZE, num_blocks=blocks, block_size=block_size, before_step=check
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        spec,
        blocks,
        cache=cache or CacheConfig(block_size=block_size),
        clock=clock,
    )
    if with_tokenizer and tokenizer is None:
        tokenizer = byte_tokenizer()
    return Engine(
        executor,
        scheduler,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        eos_token_ids={EOS},
        clock=clock,
        **engine_options,
    )


def drain(engine: Engine, max_steps: int = 2000) -> list[RequestOutput]:
    """All outputs until nothing is left, with the invariants checked after every step."""
    outputs = []
    for _ in range(max_steps):
        if not engine.has_unfinished:
            check_idle(engine)
            return outputs
        outputs += engine.step()
        check_state(engine.scheduler)
    raise AssertionError(f"not done after {max_steps} steps")


def check_idle(engine: Engine) -> None:
    """No table of engine or scheduler remembers a request that has ended (E12)."""
    assert not engine.has_unfinished
    assert engine._groups == {} and engine._choices == {} and engine._undelivered == []
    assert engine.scheduler.requests == {}
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
    assert all(usage.num_held == 0 for usage in engine.scheduler.kv.usage())
    check_state(engine.scheduler)


Requests = Mapping[str, tuple[Sequence[int] | str, SamplingParams]]


def run(engine: Engine, requests: Requests, **options: Any) -> dict[str, RequestOutput]:
    """Add all requests at once; their final outputs by id, each of which came exactly once."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params, **options)
    outputs = drain(engine)
    final = {output.request_id: output for output in outputs if output.finished}
    assert len([o for o in outputs if o.finished]) == len(final) == len(requests)
    return final
