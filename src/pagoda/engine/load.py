"""From a model's name to a running `Engine`: the one place that knows every part."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike, fspath

from pagoda import machine
from pagoda.backends.base import Backend
from pagoda.config import CacheConfig, SchedulerConfig
from pagoda.core.cost import KVCacheSpec
from pagoda.core.events import EventSink
from pagoda.core.scheduler import Scheduler
from pagoda.engine.engine import Engine
from pagoda.engine.hf_tokenizer import tokenizer_of
from pagoda.engine.memory import default_kv_bytes, longest_sequence, plan_num_blocks
from pagoda.engine.self_check import SENTENCE, check_logits
from pagoda.errors import ConfigError
from pagoda.models import build_program
from pagoda.models.config import ModelConfig
from pagoda.runtime.model_runner import ModelRunner
from pagoda.weights.catalog import resolve_model
from pagoda.weights.checkpoint import Checkpoint, load_checkpoint
from pagoda.weights.quantize import check_quantization

BACKENDS = ("cpu", "reference")


def load_engine(
    model: str | PathLike[str],
    *,
    max_model_len: int | None = None,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    backend: str = "cpu",
    num_threads: int | None = None,
    seed: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_event: EventSink | None = None,
    progress: bool = False,
    quantization: str | None = None,
    revision: str | None = None,
) -> Engine:
    """Find and open the model, reserve its KV cache, pack its weights and check that it answers.

    `max_model_len` takes the place of the scheduler configuration's; None is what the model was trained
    for, or less where the KV memory cannot hold it. `progress` shows fetching on stderr. `quantization`
    "q8" or "q4" packs weights of floats in that many bits; `revision` is one of a Hugging Face repository.
    `on_event` receives what happens in the control plane (`core/events.py`).

    Raises:
        ModelNotFoundError, ModelFileError, UnsupportedError: from finding and reading the model.
        CapacityError: the KV memory does not hold one sequence of `max_model_len`.
        ConfigError: a setting does not fit the model or its backend.
    """
    scheduler = scheduler or SchedulerConfig()
    cache = cache or CacheConfig()
    packing = check_quantization(quantization)
    chosen_backend = make_backend(backend, num_threads)
    with ExitStack() as on_failure:
        path = resolve_model(fspath(model), progress=progress, revision=revision)
        checkpoint = load_checkpoint(path, quantization=packing)
        on_failure.callback(checkpoint.close)
        config = checkpoint.config
        tokenizer = tokenizer_of(checkpoint)
        dtype = chosen_backend.default_kv_dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
        spec = config.kv_cache_spec(block_size=cache.block_size, dtype=dtype)
        scheduler, num_blocks = plan_capacity(checkpoint, spec, max_model_len, scheduler, cache)
        config = checkpoint.config_for(scheduler.max_model_len)
        model_digest = f"{checkpoint.digest()}-{config.rope_digest()}"
        namespace = cache_namespace(model_digest, dtype, backend, cache.cache_namespace)
        cache = replace(cache, cache_namespace=namespace)
        compiled = chosen_backend.compile(build_program(config), checkpoint, spec, num_blocks)
        on_failure.callback(compiled.close)
        check_logits(compiled, spec, tokenizer.encode(SENTENCE))
        engine = Engine(
            ModelRunner(compiled, spec, num_blocks),
            Scheduler(scheduler, spec, num_blocks, cache=cache, clock=clock, on_event=on_event),
            vocab_size=config.vocab_size,
            max_model_len=scheduler.max_model_len,
            tokenizer=tokenizer,
            eos_token_ids=tokenizer.eos_token_ids,
            clock=clock,
            seed=seed,
            on_close=checkpoint.close,
        )
        on_failure.pop_all()
        return engine


def cache_namespace(model_digest: str, kv_cache_dtype: str, backend: str, extra: str = "") -> str:
    """What keys and values depend on beside tokens, salt and adapter; part of every block hash.

    Two backends round differently, so they do not share blocks.
    """
    return "/".join((model_digest, kv_cache_dtype, backend, extra))


def make_backend(name: str, num_threads: int | None = None) -> Backend:
    """The backend of that name. `num_threads` None is one a usable core; "reference" has one thread.

    Raises:
        ConfigError: there is no such backend, or it does not have that many threads.
    """
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}; it must be 1 or more", param="num_threads")
    if name == "cpu":
        from pagoda.backends.cpu import CPUBackend

        return CPUBackend(num_threads=num_threads or machine.num_usable_cores())
    if name == "reference":
        from pagoda.backends.reference import ReferenceBackend

        if num_threads not in (None, 1):
            raise ConfigError(
                f"num_threads is {num_threads}; the reference backend runs on one thread", param="num_threads"
            )
        return ReferenceBackend()
    raise ConfigError(f"backend is {name!r}; it must be one of {', '.join(BACKENDS)}", param="backend")


def plan_capacity(
    checkpoint: Checkpoint,
    spec: KVCacheSpec,
    max_model_len: int | None,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
) -> tuple[SchedulerConfig, tuple[int, ...]]:
    """The scheduler's configuration with `max_model_len` settled, and the blocks of each layer group."""
    kv_bytes = cache.kv_cache_memory_bytes
    if kv_bytes is None:
        kv_bytes = default_kv_bytes(machine.memory_available_bytes(), checkpoint.num_bytes)
    if max_model_len is None:
        max_model_len = longest_sequence(spec, kv_bytes, checkpoint.config.max_position)
        # Nothing fits: let the plan for the shortest useful length say so, with its numbers.
        max_model_len = max(max_model_len, min(spec.block_size, checkpoint.config.max_position))
    _check_max_model_len(max_model_len, checkpoint.config)
    num_blocks = plan_num_blocks(
        spec,
        kv_bytes,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )
    return replace(scheduler, max_model_len=max_model_len), num_blocks


def _check_max_model_len(max_model_len: int, config: ModelConfig) -> None:
    if max_model_len > config.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model was trained for {config.max_position} positions",
            param="max_model_len",
            hint=f"use --max-model-len {config.max_position} or less",
        )
