"""Names of the metrics, in the text format of Prometheus.

Each has our name (`pagoda_*`) and, where vLLM has one that means the same, vLLM's as an alias, which has
the label `model_name` as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda import __version__
from pagoda.server.metrics import Histogram, ServerMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Value = float | Mapping[str, float]  # by the value of the label


@dataclass(frozen=True, slots=True)
class NumberSpec:
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[ServerMetrics], Value]
    label: str | None = None
    alias: str | None = None
    alias_label: str | None = None


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    name: str
    help: str
    read: Callable[[ServerMetrics], Histogram]
    alias: str | None = None


def _blocks(metrics: ServerMetrics) -> dict[str, float]:
    state = metrics.read_engine()
    return {
        "free": sum(u.num_free for u in state.usage),
        "reusable": sum(u.num_reusable for u in state.usage),
        "used": sum(u.num_held for u in state.usage),
        "pinned": sum(u.num_pinned for u in state.usage),
    }


def _kv_usage(metrics: ServerMetrics) -> float:
    """Of the fullest layer group."""
    shares = [u.num_held / u.num_blocks for u in metrics.read_engine().usage]
    return max(shares, default=0.0)


NUMBERS = (
    NumberSpec(
        "pagoda_requests_running",
        "gauge",
        "Sequences that hold KV blocks and are computed.",
        lambda m: m.read_engine().num_running,
        alias="vllm:num_requests_running",
    ),
    NumberSpec(
        "pagoda_requests_waiting",
        "gauge",
        "Sequences that wait to be scheduled.",
        lambda m: m.read_engine().num_waiting,
        alias="vllm:num_requests_waiting",
    ),
    NumberSpec(
        "pagoda_kv_cache_usage_ratio",
        "gauge",
        "Share of the KV blocks that requests hold, 0 to 1, of the fullest layer group.",
        _kv_usage,
        alias="vllm:kv_cache_usage_perc",
    ),
    NumberSpec(
        "pagoda_kv_blocks",
        "gauge",
        "KV blocks by state: free, reusable (a cached prefix), used (held by requests), pinned (kept by a "
        "pin alone).",
        _blocks,
        label="state",
    ),
    NumberSpec(
        "pagoda_prefix_cache_queried_tokens",
        "counter",
        "Prompt tokens looked up in the prefix cache, each request once; requests that bypass it are not.",
        lambda m: m.num_queried_tokens,
        alias="vllm:prefix_cache_queries",
    ),
    NumberSpec(
        "pagoda_prefix_cache_hit_tokens",
        "counter",
        "Prompt tokens found in the prefix cache, copied parts of blocks included.",
        lambda m: m.num_hit_tokens,
        alias="vllm:prefix_cache_hits",
    ),
    NumberSpec(
        "pagoda_prefix_cache_misses",
        "counter",
        "Requests whose prompt was not wholly cached, by the reason for the first token that was not.",
        lambda m: {reason.value: count for reason, count in m.num_misses.items()},
        label="reason",
    ),
    NumberSpec(
        "pagoda_prompt_tokens",
        "counter",
        "Prompt tokens of finished requests; those of a request with several choices count once.",
        lambda m: m.num_prompt_tokens,
        alias="vllm:prompt_tokens",
    ),
    NumberSpec(
        "pagoda_cached_prompt_tokens",
        "counter",
        "Prompt tokens of finished requests that the prefix cache held, as usage reports them.",
        lambda m: m.num_cached_tokens,
    ),
    NumberSpec(
        "pagoda_generation_tokens",
        "counter",
        "Tokens generated, over all choices.",
        lambda m: m.num_output_tokens,
        alias="vllm:generation_tokens",
    ),
    NumberSpec(
        "pagoda_requests_finished",
        "counter",
        "Requests that were accepted and have ended, by finish reason.",
        lambda m: m.num_finished,
        label="finish_reason",
        alias="vllm:request_success",
        alias_label="finished_reason",
    ),
    NumberSpec(
        "pagoda_requests_refused",
        "counter",
        "Requests refused with 429 because the queue was full.",
        lambda m: m.num_refused,
    ),
    NumberSpec(
        "pagoda_preemptions",
        "counter",
        "Times that a sequence gave its KV blocks back to be computed again.",
        lambda m: m.num_preemptions,
        alias="vllm:num_preemptions",
    ),
    NumberSpec("pagoda_steps", "counter", "Steps of the engine.", lambda m: m.num_steps),
    NumberSpec(
        "pagoda_build_info",
        "gauge",
        "1, with the version as a label.",
        lambda m: {__version__: 1},
        label="version",
    ),
)

HISTOGRAMS = (
    HistogramSpec(
        "pagoda_time_to_first_token_seconds",
        "From the arrival of a request, queueing included, to its first token.",
        lambda m: m.ttft_s,
        alias="vllm:time_to_first_token_seconds",
    ),
    HistogramSpec(
        "pagoda_inter_token_latency_seconds",
        "Between two tokens of a choice.",
        lambda m: m.itl_s,
        alias="vllm:inter_token_latency_seconds",
    ),
    HistogramSpec(
        "pagoda_e2e_request_latency_seconds",
        "From the arrival of a request to its end.",
        lambda m: m.e2e_s,
        alias="vllm:e2e_request_latency_seconds",
    ),
    HistogramSpec(
        "pagoda_request_queue_time_seconds",
        "From the arrival of a request to its first step.",
        lambda m: m.queue_s,
        alias="vllm:request_queue_time_seconds",
    ),
    HistogramSpec(
        "pagoda_request_prompt_tokens",
        "Prompt tokens of a request.",
        lambda m: m.prompt_lengths,
        alias="vllm:request_prompt_tokens",
    ),
    HistogramSpec(
        "pagoda_request_generation_tokens",
        "Tokens generated for a request, over all its choices.",
        lambda m: m.output_lengths,
        alias="vllm:request_generation_tokens",
    ),
    HistogramSpec(
        "pagoda_step_scheduled_tokens",
        "Tokens computed in a step.",
        lambda m: m.step_tokens,
        alias="vllm:iteration_tokens_total",
    ),
    HistogramSpec(
        "pagoda_step_seconds",
        "A step in the engine thread: what was asked of it since the last one, scheduling, computing, making "
        "text, handing over.",
        lambda m: m.step_s,
    ),
    HistogramSpec(
        "pagoda_step_execute_seconds",
        "Of that, the executor: the model and sampling. The rest of a step is the server's overhead.",
        lambda m: m.execute_s,
    ),
)


def metrics_text(metrics: ServerMetrics) -> bytes:
    """The answer to a scrape."""
    registry = CollectorRegistry()
    registry.register(_Families(metrics))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        model = {"model_name": self._metrics.model_name}
        for spec in NUMBERS:
            value = spec.read(self._metrics)
            yield _number(spec.kind, spec.name, spec.help, value, spec.label, {})
            if spec.alias is not None:
                yield _number(spec.kind, spec.alias, spec.help, value, spec.alias_label, model)
        for histogram in HISTOGRAMS:
            observed = histogram.read(self._metrics)
            yield _histogram(histogram.name, histogram.help, observed, {})
            if histogram.alias is not None:
                yield _histogram(histogram.alias, histogram.help, observed, model)


def _number(
    kind: str, name: str, help_text: str, value: Value, label: str | None, common: Mapping[str, str]
) -> Metric:
    labels = [*common, *([label] if label is not None else [])]
    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family = make(name, help_text, labels=labels)
    if isinstance(value, Mapping):
        for label_value, number in value.items():
            family.add_metric([*common.values(), label_value], number)
    else:
        family.add_metric(list(common.values()), value)
    return family


def _histogram(name: str, help_text: str, observed: Histogram, common: Mapping[str, str]) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=list(common))
    family.add_metric(list(common.values()), buckets=observed.buckets(), sum_value=observed.sum)
    return family
