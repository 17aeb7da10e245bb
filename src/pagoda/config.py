"""Configuration of the engine. Names, units and defaults follow vLLM where it has the same knob."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from pagoda.errors import ConfigError

SchedulingPolicy = Literal["fcfs", "priority"]
KVCacheDtype = Literal["auto", "i16", "f16", "bf16", "f32"]

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold and who goes first.

    Raises:
        ConfigError: a value is out of range; `param` names the field.
    """

    max_model_len: int = 4096  # prompt and output of one request
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512  # the token budget of a step
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_ageing_s: float = 30.0  # waiting this long is worth one level of priority; 0: no ageing
    watermark: float = 0.01  # share of each pool kept free for running requests when another is admitted
    max_num_partial_prefills: int = 1  # prompts that may be computed in part at a time
    max_long_partial_prefills: int = 1  # of them, those with more left than the threshold
    long_prefill_token_threshold: int = 0  # most tokens a step gives to one prefill; 0: the whole budget
    max_prefill_tokens_while_decoding: int = 0  # of all prefills, in a step that decodes too; 0: no limit
    # A limit like that by measured time: of such a step over one that only decodes. While more wait for their
    # first token than decode, what it adds is as many times more. 0: no limit; `pagoda serve` has 2.5.
    max_decode_slowdown: float = 0.0
    longest_prefix_first: bool = True  # among waiting requests of equal priority, the best cached goes first
    max_overtaken_s: float = 5.0  # one that has waited this long is not overtaken for its prefix any more

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_partial_prefills"):
            value = getattr(self, name)
            _require(value >= 1, name, value, "1 or more")
        _require(
            1 <= self.max_long_partial_prefills <= self.max_num_partial_prefills,
            "max_long_partial_prefills",
            self.max_long_partial_prefills,
            f"between 1 and max_num_partial_prefills, which is {self.max_num_partial_prefills}",
        )
        _require(
            self.scheduling_policy in get_args(SchedulingPolicy),
            "scheduling_policy",
            self.scheduling_policy,
            "fcfs or priority",
        )
        slowdown = self.max_decode_slowdown
        _require(
            slowdown == 0.0 or slowdown > 1.0, "max_decode_slowdown", slowdown, "above 1, or 0: no limit"
        )
        for name in (
            "priority_ageing_s",
            "max_overtaken_s",
            "long_prefill_token_threshold",
            "max_prefill_tokens_while_decoding",
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(0.0 <= self.watermark < 1.0, "watermark", self.watermark, "at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How keys and values are kept and shared.

    Raises:
        ConfigError: a value is out of range; `param` names the field.
    """

    block_size: int = 16  # tokens
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_cache_memory_bytes: int | None = None  # None: from the memory that is left
    enable_prefix_caching: bool = True
    enable_partial_block_reuse: bool = True  # reuse a partly matching last block by copying it
    cache_namespace: str = ""  # part of every block hash, beside what `load_engine` adds: model and KV type
    max_pinned_share: float = 0.5  # of each pool; pins also leave room for one sequence of max_model_len

    def __post_init__(self) -> None:
        size = self.block_size
        _require(1 <= size <= 1024, "block_size", size, "between 1 and 1024")
        _require(
            self.kv_cache_dtype in get_args(KVCacheDtype),
            "kv_cache_dtype",
            self.kv_cache_dtype,
            "one of " + ", ".join(get_args(KVCacheDtype)),
        )
        share = self.max_pinned_share
        _require(0.0 <= share <= 1.0, "max_pinned_share", share, "between 0 and 1")
        memory = self.kv_cache_memory_bytes
        _require(memory is None or memory > 0, "kv_cache_memory_bytes", memory, "a positive number of bytes")


def parse_size(text: str | int) -> int:
    """Bytes of "4GiB", "512M", "1.5GB" or "1048576".

    KiB, MiB, GiB, TiB and bare K, M, G, T are powers of 1024; KB, MB, GB, TB and bare k, m, g, t of 1000.

    Raises:
        ConfigError: the text is not a size.
    """

    def scale(unit: str) -> int | None:
        if unit.lower().endswith("ib"):
            return _BINARY.get(unit[:-2].upper())
        if unit.lower().endswith("b"):
            return _DECIMAL.get(unit[:-1].lower()) if unit[:-1] else 1
        return _BINARY.get(unit) or _DECIMAL.get(unit)

    return _parse(text, scale, "size", "4GiB")


def parse_length(text: str | int) -> int:
    """Tokens of "32k" (32 000), "32K" (32 768) or "4096", as vLLM reads them.

    Raises:
        ConfigError: the text is not a length.
    """
    return _parse(text, lambda unit: _BINARY.get(unit) or _DECIMAL.get(unit), "length", "32k or 4096")


def _parse(text: str | int, scale: Callable[[str], int | None], what: str, example: str) -> int:
    match = _NUMBER.fullmatch(str(text).strip())
    factor = (scale(match["unit"]) if match["unit"] else 1) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a {what}", hint=f"write it like {example}")
    return int(Fraction(match["number"]) * factor)


def _require(ok: bool, param: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{param} is {value!r}; it must be {allowed}", param=param)
