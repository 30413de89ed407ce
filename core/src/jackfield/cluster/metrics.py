"""The replicas of a run as Prometheus reads them, at one address of the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from jackfield.cluster.pool import ReplicaPool
from jackfield.cluster.replica import ReplicaState
from jackfield.errors import ConfigError

_HOST = "127.0.0.1"
_SECONDS = 30.0  #: for one request, and its answer

_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nConnection: close\r\n"
_METRICS = {
    "healthy": ("gauge", "1 where the replica serves"),
    "running": ("gauge", "requests that are decoded now"),
    "waiting": ("gauge", "requests that wait for a place"),
    "weight_version": ("gauge", "version of the weights that the replica serves"),
    "restarts_total": ("counter", "number of times that the replica was restarted"),
}


class ReplicaMetrics:
    """Serves metrics labelled with a replica's number; one that was removed is not among them."""

    def __init__(self, pool: ReplicaPool, port: int) -> None:
        """
        Args:
            pool: The run's replicas.
            port: On loopback; 0: a free one.
        """
        self._pool, self._port = pool, port
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """Listen; return the address.

        Raises:
            ConfigError: ``config.invalid-value``: The port is taken.
        """
        try:
            self._server = await asyncio.start_server(self._serve, _HOST, self._port)
        except OSError as error:
            fix = "choose another port, or 0"
            raise ConfigError(
                "the metrics cannot be shown", where="cluster.metrics_port", found=error, fix=fix
            ) from error
        return f"http://{_HOST}:{self._server.sockets[0].getsockname()[1]}/metrics"

    async def close(self) -> None:
        """Stop listening; idempotent."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer whatever is asked with the metrics; a client that says too little or too much gets no answer."""
        with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            async with asyncio.timeout(_SECONDS):
                await reader.readuntil(b"\r\n\r\n")
                body = _text(await self._pool.states()).encode()
                head = f"{_HEAD}Content-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        writer.close()


def _text(states: Sequence[ReplicaState]) -> str:
    """Return the metrics in Prometheus' text format."""
    lines = []
    for name, (kind, about) in _METRICS.items():
        full = f"jackfield_rollout_{name}"
        lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
        for state in states:
            value = state.state == "serving" if name == "healthy" else getattr(state, name.removesuffix("_total"))
            if value is not None:
                lines.append(f'{full}{{replica="{state.replica}"}} {float(value)}')
    return "\n".join([*lines, ""])
