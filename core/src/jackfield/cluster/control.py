"""What other processes ask of a run that goes on: which replicas it has, and for more or fewer of them.

The run listens on this machine alone. Its address is in ``control.json`` in the run's folder, which only its owner can
read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.cluster.replica import ReplicaState
from jackfield.errors import DeadlineExceeded, RpcError, RunError
from jackfield.rpc import Address, Contract, Server, Service, connect, stub

_FILE = "control.json"
_ANSWER_SECONDS = 60.0


class _Control:
    """The replicas of a run, as other processes see them."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._scalings: set[asyncio.Task[Any]] = set()

    async def states(self) -> tuple[ReplicaState, ...]:
        """Return the state of each replica."""
        return tuple(await self._pool.states())

    async def scale(self, count: int) -> tuple[ReplicaState, ...]:
        """Add or remove replicas; it goes on although the caller leaves."""
        scaling = asyncio.ensure_future(self._pool.scale(count))
        self._scalings.add(scaling)
        scaling.add_done_callback(self._scalings.discard)
        return tuple(await asyncio.shield(scaling))

    async def close(self) -> None:
        """Give up what is being done."""
        for scaling in self._scalings:
            scaling.cancel()
        await asyncio.gather(*self._scalings, return_exceptions=True)


_CONTRACT = Contract(_Control, ["states", "scale"])


@asynccontextmanager
async def serve_control(
    folder: Path, pool: ReplicaPool, clock: Clock, heartbeat_seconds: float = 30.0, **further: str
) -> AsyncIterator[None]:
    """Serve the replicas of a run to ``jackfield replicas``.

    Args:
        folder: Folder of the run, which gets the address.
        pool: The run's replicas.
        clock: Time source for all waits and deadlines.
        heartbeat_seconds: Silence after which a client is dead.
        further: What the file names beside the address.
    """
    served, file = _Control(pool), folder / _FILE
    server = Server("the run", {"replicas": Service(target=served, contract=_CONTRACT)}, clock, heartbeat_seconds)
    try:
        (await server.listen()).write(file, **further)
        yield
    finally:
        file.unlink(missing_ok=True)
        await server.close()
        await served.close()


def list_replicas(folder: Path) -> list[ReplicaState]:
    """List the replicas of the run that goes on in ``folder``, in whatever process of this machine.

    Raises:
        RunError: ``run.not-running``: there is none, it has not begun, or it has no replicas.
        DeadlineExceeded: it does not answer.
    """
    return _ask(Path(folder), _ANSWER_SECONDS, lambda remote: remote.states())


def scale_replicas(folder: Path, count: int, *, seconds: float = 3600.0) -> list[ReplicaState]:
    """Add or remove replicas of the run that goes on in ``folder``, until it has ``count``.

    It returns when all have the engine's weights and serve, or have been ended. Call it in a thread where the run is in
    this process.

    Args:
        folder: of the run.
        count: of replicas.
        seconds: to wait for it; the run goes on with it afterwards.

    Raises:
        RunError: ``run.not-running``; ``cluster.unavailable``: there is no room.
        ConfigError: ``count`` is less than 1.
        JackfieldError: why a replica could not be added.
        DeadlineExceeded: it is not done yet.
    """
    return _ask(Path(folder), seconds, lambda remote: remote.scale(count))


def _ask(
    folder: Path, seconds: float, question: Callable[[_Control], Awaitable[tuple[ReplicaState, ...]]]
) -> list[ReplicaState]:
    async def ask() -> list[ReplicaState]:
        address = Address.read(folder / _FILE)
        if not address.process.is_near:
            raise _not_running(folder, f"a run on {address.process.host}")
        connection = await connect(address, "jackfield replicas", Clock(), {"replicas": _CONTRACT})
        try:
            return list(await question(stub(connection, "replicas", _CONTRACT, _Control, seconds)))
        finally:
            await connection.close()

    try:
        return asyncio.run(ask())
    except RpcError as error:
        if error.code not in ("rpc.address", "rpc.lost"):
            raise
        raise _not_running(folder, error.found if folder.is_dir() else "no such folder") from error
    except DeadlineExceeded as error:
        raise DeadlineExceeded(error.message, fix="ask again; what was asked for is still being done") from error


def _not_running(folder: Path, found: object) -> RunError:
    return RunError(
        "no run with replicas goes on in the folder",
        code="run.not-running",
        where=str(folder),
        expected="the folder of a run whose first step is under way, on the machine and by the user of its controller",
        found=found,
    )
