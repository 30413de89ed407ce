"""The control interface of a run's replicas: ``jackfield replicas`` and Prometheus.

The run listens on loopback only. Its address is in ``control.json`` in the run's folder, which only its owner can
read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import ConfigError, DeadlineExceeded, RpcError, RunError
from jackfield.routing import ReplicaState
from jackfield.sdk.rpc import Address, Contract, Server, Service, connect, stub

_FILE = "control.json"
_LIST_SECONDS = 60.0
_CONTRACT = Contract(ReplicaPool, ["states", "scale"])

_HOST = "127.0.0.1"
_SCRAPE_SECONDS = 30.0  #: for one request of Prometheus and its response
_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nConnection: close\r\n"
_METRICS = {
    "healthy": ("gauge", "1 where the replica serves"),
    "running": ("gauge", "requests that are decoded now"),
    "waiting": ("gauge", "requests that wait for a place"),
    "weight_version": ("gauge", "version of the weights that the replica serves"),
    "restarts_total": ("counter", "number of times that the replica was restarted"),
}


@asynccontextmanager
async def serve_control(
    folder: Path, pool: ReplicaPool, clock: Clock, heartbeat_seconds: float = 30.0, metrics_port: int | None = None
) -> AsyncIterator[None]:
    """Serve the replicas of a run to ``jackfield replicas``, and their metrics at ``metrics_port`` if it is given.

    The addresses of both are written into the run's folder.
    """
    server = Server("the run", {"replicas": Service(target=pool, contract=_CONTRACT)}, clock, heartbeat_seconds)
    async with AsyncExitStack() as stack:
        metrics = {}
        if metrics_port is not None:
            metrics["metrics"] = await stack.enter_async_context(serve_metrics(pool, metrics_port))
        stack.push_async_callback(server.close)
        stack.callback((folder / _FILE).unlink, missing_ok=True)
        (await server.listen()).write(folder / _FILE, **metrics)
        yield


def list_replicas(folder: Path) -> list[ReplicaState]:
    """List the replicas of the active run in ``folder``; it raises what :func:`scale_replicas` does."""
    return scale_replicas(folder, None)


def scale_replicas(folder: Path, count: int | None, *, seconds: float = 3600.0) -> list[ReplicaState]:
    """Add or remove replicas of the run that is active in ``folder`` until it has ``count``; None: only list them.

    It returns when new replicas serve with the engine's weights, or surplus ones have ended. It works in any process of
    this machine; if the run is in this process, call it in another thread. The run continues to scale after a timeout
    (``DeadlineExceeded`` after ``seconds``). Raise ``run.not-running`` if no run is active, it has not begun, or it has
    no replicas, ``cluster.unavailable`` if there is no room, and a ``ConfigError`` if ``count`` is less than 1.
    """

    async def ask() -> list[ReplicaState]:
        address = Address.read(Path(folder, _FILE))
        if not address.process.is_near:
            raise RpcError("it cannot be reached", code="rpc.lost", found=f"a run on {address.process.host}")
        connection = await connect(address, "jackfield replicas", Clock(), {"replicas": _CONTRACT})
        try:
            limit = min(seconds, _LIST_SECONDS) if count is None else seconds
            pool = stub(connection, "replicas", _CONTRACT, ReplicaPool, limit)
            return await (pool.states() if count is None else pool.scale(count))
        finally:
            await connection.close()

    try:
        return asyncio.run(ask())
    except RpcError as error:
        if error.code not in ("rpc.address", "rpc.lost"):
            raise
        what, found = "no run with replicas goes on in the folder", error.found if folder.is_dir() else "no such folder"
        expected = "the folder of a run whose first step has begun, on the machine and by the user of its controller"
        raise RunError(what, code="run.not-running", where=str(folder), expected=expected, found=found) from error
    except DeadlineExceeded as error:
        raise DeadlineExceeded(error.message, fix="ask again; what was asked for is still being done") from error


@asynccontextmanager
async def serve_metrics(pool: ReplicaPool, port: int) -> AsyncIterator[str]:
    """Serve Prometheus metrics, labelled with replica numbers, on loopback. Yield the address.

    Port 0 chooses a free one. A port in use is refused (``config.invalid-value``).
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # a request that is incomplete or too long gets no response
        with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            async with asyncio.timeout(_SCRAPE_SECONDS):
                await reader.readuntil(b"\r\n\r\n")
                states, lines = await pool.states(), list[str]()
                for name, (kind, about) in _METRICS.items():
                    full, field = f"jackfield_rollout_{name}", name.removesuffix("_total")
                    lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
                    for each in states:
                        value = each.state == "serving" if name == "healthy" else getattr(each, field)
                        if value is not None:
                            lines.append(f'{full}{{replica="{each.replica}"}} {float(value)}')
                body = "\n".join([*lines, ""]).encode()
                writer.write(f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(serve, _HOST, port)
    except OSError as error:
        message, fix = "the metrics cannot be shown", "choose another port, or 0"
        raise ConfigError(message, where="cluster.metrics_port", found=error, fix=fix) from error
    try:
        yield f"http://{_HOST}:{server.sockets[0].getsockname()[1]}/metrics"
    finally:
        server.close()
