"""What /metrics tells Prometheus, under names in the manner of vLLM."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from xlstm7b.generate.engine import Engine

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300,
)  # fmt: skip


class Metrics:
    """Figures of one server, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._registry = engine, CollectorRegistry()
        self._registry.register(self)
        self._first = self._histogram("time_to_first_token", "From a request to its first token")
        self._between = self._histogram("inter_token_latency", "Between one token and the next")
        self._whole = self._histogram("e2e_request_latency", "From a request to its last token")
        self._finished = Counter(
            "xlstm7b:request_success",
            "Texts that ended, by reason; abort: nobody waited for it any more, or it failed",
            ["finished_reason"],
            registry=self._registry,
        )
        self._answers = Counter(
            "xlstm7b:http_requests", "Answers by status", ["status"], registry=self._registry
        )

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._finished.labels(reason).inc()
        self._whole.observe(seconds)

    def aborted(self, texts: int) -> None:
        self._finished.labels("abort").inc(texts)

    def answered(self, status: int) -> None:
        self._answers.labels(status).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's own figures, asked for when they are wanted."""
        stats = self._engine.stats()
        for name, explained, now in (
            ("num_requests_running", "Texts that have a slot", stats.running),
            ("num_requests_waiting", "Texts that wait for one", stats.waiting),
            ("num_slots", "Texts that can run at a time", stats.slots),
            ("slot_usage_perc", "Share of slots in use", stats.running / stats.slots),
        ):
            yield GaugeMetricFamily(f"xlstm7b:{name}", explained, value=now)
        for name, explained, so_far in (
            ("prompt_tokens", "Tokens read", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generated_tokens),
            (
                "prefix_cache_hit_tokens",
                "Prompt tokens that kept states spared",
                stats.cached_tokens,
            ),
            ("engine_steps", "Rounds of the engine", stats.steps),
            ("engine_step_seconds", "What they took", stats.seconds),
            ("engine_model_seconds", "Of that, in the model", stats.model_seconds),
        ):
            yield CounterMetricFamily(f"xlstm7b:{name}", explained, value=so_far)
        hits = CounterMetricFamily("xlstm7b:prefix_cache_hits", "States found", labels=["level"])
        sizes = GaugeMetricFamily("xlstm7b:prefix_cache_bytes", "States kept", labels=["level"])
        for level, count in stats.cache_hits.items():
            hits.add_metric([level], count)
        for level, nbytes in stats.cache_bytes.items():
            sizes.add_metric([level], nbytes)
        yield hits
        yield sizes

    def _histogram(self, name: str, explained: str) -> Histogram:
        return Histogram(
            f"xlstm7b:{name}_seconds", explained, buckets=_SECONDS, registry=self._registry
        )
