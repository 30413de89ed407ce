"""Metrics of a replica for Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jackfield.abc.rollout import HealthReport
from jackfield_openai.collecting import Collector

_GAUGES = {
    "healthy": "1 where the replica can serve",
    "running": "requests that are decoded now",
    "waiting": "requests that wait for a place in the batch",
    "weight_version": "version of the weights that are served",
}
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters of the endpoint and gauges of the replica's health, labelled with its number."""

    def __init__(self, replica: int) -> None:
        self._replica = str(replica)
        self._registry = registry = CollectorRegistry()
        names = ("replica",)
        prefix = "jackfield_rollout_"
        self._gauges = {name: Gauge(prefix + name, text, names, registry=registry) for name, text in _GAUGES.items()}
        self._ended = Counter(
            prefix + "requests", "requests by how they ended", (*names, "finish_reason"), registry=registry
        )
        self._tokens = Counter(
            prefix + "tokens", "tokens of prompts, and generated ones", (*names, "kind"), registry=registry
        )
        self._collected = Gauge(
            prefix + "collected", "answers and rewards, by what became of them", (*names, "state"), registry=registry
        )
        self._seconds = Histogram(
            prefix + "request_seconds",
            "from a request's arrival to its end",
            names,
            registry=registry,
            buckets=_SECONDS,
        )

    @contextlib.contextmanager
    def request(self, prompt_tokens: int) -> Iterator[Callable[[str, int], None]]:
        """Count a request; yield a callback for its finish reason and tokens. An exception counts as ``error``."""
        ended: list[tuple[str, int]] = []
        try:
            with self._seconds.labels(self._replica).time():
                yield lambda reason, tokens: ended.append((reason, tokens))
        finally:
            reason, tokens = ended[-1] if ended else ("error", 0)
            self._ended.labels(self._replica, reason).inc()
            self._tokens.labels(self._replica, "prompt").inc(prompt_tokens)
            self._tokens.labels(self._replica, "generated").inc(tokens)

    def text(self, health: HealthReport, collector: Collector | None = None) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for state, count in () if collector is None else (("kept", collector.kept), ("dropped", collector.dropped)):
            self._collected.labels(self._replica, state).set(count)
        for name, gauge in self._gauges.items():
            gauge.labels(self._replica).set(float(getattr(health, name)))
        return generate_latest(self._registry)
