"""The metrics of /metrics, for Prometheus. Names follow vLLM's, with the prefix `xlstm7b:`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from xlstm7b.serve.engine_thread import EngineThread

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine, self._registry = engine, CollectorRegistry()
        self._registry.register(self)
        self.first_token = self._histogram("time_to_first_token", "From request to first token")
        self.next_token = self._histogram("inter_token_latency", "From one token to the next")
        self.request = self._histogram("e2e_request_latency", "From request to last token")
        self.finished = self._counter(
            "request_success",
            "Finished generations, by reason. abort: the client disconnected, or it failed",
            "finished_reason",
        )
        self.responses = self._counter("http_requests", "HTTP responses, by status", "status")

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's own counters. The registry calls this for every scrape."""
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": ("Generations that hold a slot", stats.running),
            "num_requests_waiting": ("Generations that wait for a slot", stats.waiting),
            "num_slots": ("Generations that can run at the same time", stats.slots),
            "slot_usage_perc": ("Share of slots in use", stats.running / stats.slots),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"xlstm7b:{name}", text, value=value)
        counters = {
            "prompt_tokens": ("Prompt tokens read", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated", stats.generated_tokens),
            "prefix_cache_hit_tokens": ("Prompt tokens from the prefix cache", stats.cached_tokens),
            "engine_steps": ("Steps of the engine", stats.steps),
            "engine_step_seconds": ("Seconds in steps", stats.seconds),
            "engine_model_seconds": (
                "Seconds of the steps that were spent in the model",
                stats.model_seconds,
            ),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"xlstm7b:{name}", text, value=value)
        text, labels = "Prefixes found in the cache", ["level"]
        hits = CounterMetricFamily("xlstm7b:prefix_cache_hits", text, labels=labels)
        sizes = GaugeMetricFamily("xlstm7b:prefix_cache_bytes", "Cache size", labels=labels)
        for family, by_level in ((hits, stats.cache_hits), (sizes, stats.cache_bytes)):
            for level, value in by_level.items():
                family.add_metric([level], value)
            yield family

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"xlstm7b:{name}_seconds", text, buckets=_BUCKETS, registry=self._registry)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"xlstm7b:{name}", text, [label], registry=self._registry)
