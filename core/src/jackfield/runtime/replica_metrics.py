"""What Prometheus reads of all replicas of a run, at one address of the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

from jackfield.errors import ConfigError, PluginError
from jackfield.runtime.replicas import Replicas

__all__ = ["ReplicaMetrics"]

_HOST = "127.0.0.1"
_SCRAPE_SECONDS = 30.0


class ReplicaMetrics:
    """Gauges labelled with a replica's number. They are read of whoever there is: one that is removed is not there."""

    def __init__(self, replicas: Replicas, port: int) -> None:
        """
        Args:
            replicas: of the run.
            port: on loopback; 0: a free one.
        """
        self._replicas = replicas
        self._port = port
        self._loop: asyncio.AbstractEventLoop
        self._server: Any = None
        self._thread: Any = None

    async def open(self) -> str:
        """Listen; the address.

        Raises:
            PluginError: ``plugin.requirement``: prometheus-client is not installed.
            ConfigError: ``config.invalid-value``: the port is taken.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise PluginError(
                "metrics of replicas need prometheus-client",
                where="cluster.metrics_port",
                fix="pip install 'jackfield[serve]'",
                found=error,
            ) from error
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(self._port, _HOST, registry)
        except OSError as error:
            raise ConfigError(
                "the metrics cannot be shown",
                where="cluster.metrics_port",
                found=error,
                fix="choose another port, or 0",
            ) from error
        return f"http://{_HOST}:{self._server.server_port}/metrics"

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
            await asyncio.to_thread(self._thread.join)

    def describe(self) -> list[Any]:
        """Nothing is asked for before somebody reads."""
        return []

    def collect(self) -> Iterator[Any]:
        """How the replicas are, asked by a thread of the web server."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        asked = asyncio.run_coroutine_threadsafe(self._replicas.states(), self._loop)
        try:
            states = asked.result(_SCRAPE_SECONDS)
        except (CancelledError, TimeoutError):
            asked.cancel()
            return  # the run ends
        prefix, labels = "jackfield_rollout_", ["replica"]
        families: dict[str, Any] = {
            "healthy": GaugeMetricFamily(prefix + "healthy", "1 where the replica serves", labels=labels),
            "running": GaugeMetricFamily(prefix + "running", "requests that are decoded now", labels=labels),
            "waiting": GaugeMetricFamily(prefix + "waiting", "requests that wait for a place", labels=labels),
            "weight_version": GaugeMetricFamily(prefix + "weight_version", "that is served", labels=labels),
            "restarts": CounterMetricFamily(prefix + "restarts", "times that it was made anew", labels=labels),
        }
        for state in states:
            values: dict[str, float] = {name: getattr(state, name) for name in ("running", "waiting", "restarts")}
            values["healthy"] = state.state == "serving"
            if state.weight_version is not None:
                values["weight_version"] = state.weight_version
            for name, value in values.items():
                families[name].add_metric([str(state.replica)], float(value))
        yield from families.values()
