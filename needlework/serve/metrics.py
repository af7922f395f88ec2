"""What Prometheus reads at /metrics: the engine's numbers as they are, and how long clients waited."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = {
    "running": "Requests that hold a slot.",
    "waiting": "Requests that wait for a slot or for pages.",
    "slots_free": "Slots that nothing holds.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "prefix_tokens": "Tokens of prompts that a snapshot or another answer to the same prompt gave.",
    "tokens": "Tokens sampled.",
    "steps": "Steps launched.",
}
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """stats: gives an object with the fields of GAUGES and COUNTERS, and pages_free as pairs of window and pages."""

    def __init__(self, stats: Callable[[], object]):
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(stats))
        self._requests = Counter("needlework_requests", "Requests answered.", ("path", "status"), registry=self._registry)
        self._first = self._histogram("needlework_first_token_seconds", "From a request to the first token of an answer.")
        self._whole = self._histogram("needlework_request_seconds", "From a request to the end of its answer.")

    def _histogram(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, buckets=SECONDS, registry=self._registry)

    def answered(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def whole(self, seconds: float) -> None:
        self._whole.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's own numbers, read when they are asked for."""

    def __init__(self, stats: Callable[[], object]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, words in GAUGES.items():
            yield GaugeMetricFamily(f"needlework_{name}", words, value=getattr(stats, name))
        for name, words in COUNTERS.items():
            yield CounterMetricFamily(f"needlework_{name}", words, value=getattr(stats, name))
        pages = GaugeMetricFamily("needlework_pages_free", "Pages that nothing holds, by window.", labels=("window",))
        for window, free in getattr(stats, "pages_free"):  # noqa: B009  the checker knows no such field of an object
            pages.add_metric(("all" if window is None else str(window),), free)
        yield pages
