"""The metrics of /metrics, for Prometheus. Names follow vLLM's, with the prefix `xlstm7b:`."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from xlstm7b.generate.prefix_cache import Level
from xlstm7b.serve.engine_thread import EngineThread

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)
_Value: TypeAlias = float | Mapping[Level, float]  # one number, or one for each level of the cache


class Metrics:
    """The metrics of one server, in a registry of its own. All have the label `model_name`."""

    def __init__(self, engine: EngineThread, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.queue_time = self._histogram("request_queue_time", "From request to slot")
        self.first_token = self._histogram("time_to_first_token", "From request to first token")
        self.next_token = self._histogram("inter_token_latency", "From one token to the next")
        self.request = self._histogram("e2e_request_latency", "From request to last token")
        # As vLLM counts them: of every generation, cached or not, when its prompt has been read.
        text = "Prompt tokens of generations, from the prefix cache or not"
        self.prompt_tokens = self._counter("prompt_tokens", text).labels(model_name)
        text = "Generations that did not finish: the client disconnected, or they failed"
        self.aborted = self._counter("request_aborts", text).labels(model_name)
        self._finished = self._counter(
            "request_success", "Finished generations, by reason", "finished_reason"
        )
        text = "HTTP responses, by route and status"
        self._responses = self._counter("http_requests", text, "route", "status")

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def count_response(self, route: str, status: int) -> None:
        self._responses.labels(self._model_name, route, status).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's own counters. The registry calls this for every scrape."""
        stats = self._engine.stats()
        gauges: dict[str, tuple[str, _Value]] = {
            "num_requests_running": ("Generations that hold a slot", stats.running),
            "num_requests_waiting": ("Generations that wait for a slot", stats.waiting),
            "num_slots": ("Generations that can run at the same time", stats.slots),
            "slot_usage_perc": ("Share of slots in use", stats.running / stats.slots),
            "prefix_cache_bytes": ("Size of the cache", stats.cache_bytes),
        }
        for name, (text, value) in gauges.items():
            yield self._family(GaugeMetricFamily, name, text, value)
        counters: dict[str, tuple[str, _Value]] = {
            "computed_prompt_tokens": (
                "Prompt tokens that the model read, without those from the prefix cache",
                stats.prompt_tokens,
            ),
            "generation_tokens": ("Tokens generated", stats.generated_tokens),
            "spec_decode_num_draft_tokens": (
                "Tokens drafted by speculation",
                stats.drafted_tokens,
            ),
            "spec_decode_num_accepted_tokens": (
                "Drafted tokens that became output",
                stats.accepted_tokens,
            ),
            "prefix_cache_hits": ("Prefixes found in the cache", stats.cache_hits),
            "prefix_cache_hit_tokens": ("Prompt tokens from the prefix cache", stats.cached_tokens),
            "engine_steps": ("Steps of the engine", stats.steps),
            "engine_step_seconds": ("Seconds in steps", stats.seconds),
            "engine_model_seconds": (
                "Seconds of the steps that were spent in the model",
                stats.model_seconds,
            ),
        }
        for name, (text, value) in counters.items():
            yield self._family(CounterMetricFamily, name, text, value)

    def _family(self, kind: type[_Family], name: str, text: str, value: _Value) -> _Family:
        if isinstance(value, Mapping):
            family = kind(f"xlstm7b:{name}", text, labels=["model_name", "level"])
            for level, number in value.items():
                family.add_metric([self._model_name, level], number)
        else:
            family = kind(f"xlstm7b:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, text: str) -> Histogram:
        made = Histogram(
            f"xlstm7b:{name}_seconds",
            text,
            ["model_name"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        return made.labels(self._model_name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"xlstm7b:{name}", text, ["model_name", *labels], registry=self._registry)
