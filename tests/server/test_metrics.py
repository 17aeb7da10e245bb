"""/metrics: names, rules of counting, buckets."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pagoda.server.metric_families import HISTOGRAMS, NUMBERS, metrics_text
from pagoda.server.metrics import LATENCY_BUCKETS_S, Histogram, ServerMetrics
from tests.server.servers import HELLO, RunningServer, parrot, serving

VLLM_NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
)


def test_every_name_is_exported_once_and_documented() -> None:
    """F09: documented names are those exported, each with its help and type."""
    families = list(text_string_to_metric_families(metrics_text(ServerMetrics("m")).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)) and all(f.documentation and f.type != "unknown" for f in families)
    samples = {sample.name for family in families for sample in family.samples}
    assert samples >= set(VLLM_NAMES)
    own = {
        s.removesuffix("_count") for s in samples if not s.endswith(("_bucket", "_sum")) and "vllm" not in s
    }
    guide = Path(__file__).parents[2] / "docs/guides/serving.md"
    documented = set(re.findall(r"^\| `(pagoda_\w+)`", guide.read_text(), re.MULTILINE))
    assert documented == own
    aliases = {spec.alias for spec in (*NUMBERS, *HISTOGRAMS) if spec.alias}
    assert all(alias in guide.read_text() for alias in aliases)


def test_buckets_cover_a_millisecond_to_over_ten_minutes() -> None:
    """F10: a quantile is never capped by the last bucket."""
    assert LATENCY_BUCKETS_S[0] == 0.001 and LATENCY_BUCKETS_S[-1] > 600
    assert list(LATENCY_BUCKETS_S) == sorted(set(LATENCY_BUCKETS_S))
    histogram = Histogram(LATENCY_BUCKETS_S)
    for value in (0.002, 0.08, 5.0, 70.0, 700.0):
        histogram.observe(value)
    bounds = dict(histogram.buckets())
    assert [bounds[b] for b in ("0.001", "0.002", "0.1", "5.0", "120.0", "600.0", "1200.0", "+Inf")] == [
        0, 1, 2, 3, 4, 4, 5, 5,
    ]  # fmt: skip


def test_counters_agree_with_usage() -> None:
    """F05, F08, F11: a request with n choices counts once; reasons add up to what was accepted."""
    with serving(parrot) as server:
        usages = [server.client.chat.completions.create(model="test", messages=HELLO, n=4).usage]  # type: ignore[arg-type]
        body = {"prompt": ["abc<a>", "y"], "max_tokens": 5}
        usages.append(server.client.completions.create(model="test", **body).usage)  # type: ignore[arg-type]
        server.wait_until(server.is_idle)
        for name, field in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
            expected = sum(getattr(usage, field) for usage in usages)
            assert server.metric(f"pagoda_{name}_tokens_total") == expected
            assert server.metric(f"vllm:{name}_tokens_total", model_name="test") == expected
        cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
        assert server.metric("pagoda_cached_prompt_tokens_total") == cached
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert server.metric(f"pagoda_{name}_seconds_count") == 3
        reasons = {
            r: server.metric("pagoda_requests_finished_total", finish_reason=r) for r in ("stop", "length")
        }
        assert reasons == {"stop": 2, "length": 1}
        num_tokens = server.metric("pagoda_generation_tokens_total")
        assert server.metric("pagoda_inter_token_latency_seconds_count") == num_tokens - 6  # choices


def test_step_times_hold_those_of_the_executor_and_no_waiting_for_work() -> None:
    pause_s = 0.3
    with serving(parrot, before_step=lambda step: time.sleep(0.005)) as server:
        start_s = time.monotonic()
        for _ in range(2):
            server.client.chat.completions.create(model="test", messages=HELLO)  # type: ignore[arg-type]
            server.wait_until(server.is_idle)
            time.sleep(pause_s)
        wall_s = time.monotonic() - start_s
        num_steps = server.metric("pagoda_steps_total")
        server.wait_until(lambda: server.metric("pagoda_step_seconds_count") == num_steps)
        assert server.metric("pagoda_step_execute_seconds_count") == num_steps
        execute_s = server.metric("pagoda_step_execute_seconds_sum")
        assert (
            0.005 * num_steps <= execute_s < server.metric("pagoda_step_seconds_sum") < wall_s - 2 * pause_s
        )


def test_ttft_starts_at_arrival() -> None:
    """F11: what a client waits in the queue is in the histogram, and in one of its own."""
    with (
        serving(parrot, max_num_seqs=1, before_step=lambda step: time.sleep(0.005)) as server,
        ThreadPoolExecutor(10) as pool,
    ):

        def time_to_first_token(number: int) -> float:
            start_s = time.monotonic()
            body = {"prompt": f"{number} is said<a>", "stream": True}
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                ttft_s = time.monotonic() - start_s
                assert [line for line in lines if line][-1] == "data: [DONE]"
            return ttft_s

        clients_s = sum(pool.map(time_to_first_token, range(10)))
        server.wait_until(server.is_idle)
        server_s = server.metric("pagoda_time_to_first_token_seconds_sum")
        assert 0.6 * clients_s < server_s <= clients_s
        assert server.metric("pagoda_request_queue_time_seconds_sum") > 0.5 * server_s


def test_misses_have_reasons_and_blocks_have_states(server: RunningServer) -> None:
    before = server.metric("pagoda_prefix_cache_misses_total", reason="disabled")
    server.http.post("/v1/completions", json={"prompt": "abc", "cache": False})
    assert server.metric("pagoda_prefix_cache_misses_total", reason="disabled") == before + 1
    server.wait_until(server.is_idle)
    states = {s: server.metric("pagoda_kv_blocks", state=s) for s in ("free", "reusable", "used", "pinned")}
    assert states["free"] + states["reusable"] == 256 and states["used"] == states["pinned"] == 0
    assert server.metric("pagoda_requests_running") == server.metric("pagoda_kv_cache_usage_ratio") == 0
