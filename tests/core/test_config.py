from __future__ import annotations

import pytest

from pagoda.config import CacheConfig, SchedulerConfig, parse_length, parse_size
from pagoda.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("512M", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2g", 2_000_000_000),
        ("1kB", 1000),
        ("64b", 64),
        ("1048576", 1 << 20),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "num_tokens"), [("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("4096", 4096), (7, 7)]
)
def test_lengths(text: str | int, num_tokens: int) -> None:
    assert parse_length(text) == num_tokens


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 apples", "1e9", "4GiBB", "0x10", "1..5k", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size") as refusal:
        parse_size(text)
    assert refusal.value.hint == "write it like 4GiB"
    with pytest.raises(ConfigError, match="is not a length"):
        parse_length(text)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (SchedulerConfig, "max_num_seqs", 0),
        (SchedulerConfig, "max_num_batched_tokens", 0),
        (SchedulerConfig, "max_model_len", -1),
        (SchedulerConfig, "scheduling_policy", "random"),
        (SchedulerConfig, "watermark", 1.0),
        (SchedulerConfig, "priority_ageing_s", -1.0),
        (SchedulerConfig, "long_prefill_token_threshold", -1),
        (SchedulerConfig, "max_num_partial_prefills", 0),
        (SchedulerConfig, "max_long_partial_prefills", 2),
        (SchedulerConfig, "max_prefill_tokens_while_decoding", -1),
        (SchedulerConfig, "max_decode_slowdown", 0.5),
        (SchedulerConfig, "max_overtaken_s", -1.0),
        (CacheConfig, "max_pinned_share", 1.5),
        (CacheConfig, "block_size", 0),
        (CacheConfig, "kv_cache_dtype", "int3"),
        (CacheConfig, "kv_cache_memory_bytes", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(config: type, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as refusal:
        config(**{field: value})
    assert refusal.value.param == field
