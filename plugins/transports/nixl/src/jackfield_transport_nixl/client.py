"""A connection to a store, and the transfers of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, RpcError
from jackfield.sdk.rpc import Address, Connection, connect, stub
from jackfield_transport_nixl.agents import Agent, Place
from jackfield_transport_nixl.config import QueueConfig
from jackfield_transport_nixl.store import STORE, Found, Room, Store

T = TypeVar("T")


class Client:
    """A connection to a store, and this process's agent."""

    def __init__(self, settings: QueueConfig, agent: Agent) -> None:
        self._settings = settings
        self._clock = Clock()
        self._connection: Connection | None = None
        self._regions: dict[int, Place] = {}  #: of the store
        self._region_lock = asyncio.Lock()
        self.name = ""  #: of the store's agent
        self.agent = agent
        self.inline_bytes = 0
        self.store: Store
        self.long_store: Store  #: the same, with the deadline of checkpoints

    async def connect(self, file: Path) -> None:
        """Connect to the store whose address is in a file. Raises ``QueueError``: ``queue.unreachable``."""
        try:
            address = Address.read(file)
        except RpcError as error:
            raise QueueError(
                "no queue can be joined",
                code="queue.unreachable",
                where=str(file),
                found=error.found,
                fix=f"name the {file.name} in the queue folder of a run that is running",
            ) from error
        self._where = str(address.process)
        self._connection = await connect(address, "a client", self._clock, {"store": STORE}, lost_error=self._lost)
        self.store, self.long_store = (
            stub(self._connection, "store", STORE, Store, seconds)
            for seconds in (self._settings.seconds, self._settings.checkpoint_seconds)
        )
        self.inline_bytes = await self.within(self.store.inline_bytes())

    def _unreachable(self, message: str) -> QueueError:
        return QueueError(message, code="queue.unreachable", where=self._where)

    def _lost(self, reason: str) -> QueueError:
        return self._unreachable(f"the process that keeps the samples {reason}")

    async def within(self, call: Awaitable[T]) -> T:
        """Await a call of the store and raise its error; raise ``queue.unreachable`` without an answer in time."""
        try:
            return await call
        except DeadlineExceeded as error:
            raise self._unreachable(error.message) from error

    async def room(self, size: int) -> Room:
        """Ask for memory of the store. Raises ``QueueError``: ``queue.full``; ``queue.unreachable``."""
        try:
            return await self.store.room(size)
        except DeadlineExceeded:
            raise QueueError(
                f"the store's registered memory stayed full for {self._settings.seconds:g} s",
                code="queue.full",
                where=self._where,
                fix="delete rows, or raise max_bytes",
            ) from None

    def notify_after(self, method: str, argument: Room | Found) -> None:
        """Call a method of the store, without waiting, when the started transfers have ended."""
        loop, connection = asyncio.get_running_loop(), self._connection
        assert connection is not None, "connected"
        notify = lambda: connection.notify(f"store.{method}", STORE, argument)  # noqa: E731
        with suppress(RuntimeError):  # closed
            self.agent.run(lambda: loop.call_soon_threadsafe(notify))

    async def region(self, number: int) -> Place:
        """Return the place of a region of the store."""
        async with self._region_lock:
            if number not in self._regions:
                described = await self.within(self.store.describe())
                if self.name:  # its old regions may have lain where new ones lie
                    await self.done(self.agent.run(self.agent.forget, self.name))
                self.name = await self.done(self.agent.run(self.agent.meet, described.metadata))
                self._regions = described.regions
        try:
            return self._regions[number]
        except KeyError:
            raise self._unreachable("the store speaks of memory that it does not have") from None

    async def done(self, future: Future[T]) -> T:
        """Wait for the agent. Raises ``QueueError``: ``queue.unreachable``."""
        try:
            return await self._clock.wait_for(asyncio.wrap_future(future), self._settings.seconds, "NIXL")
        except OSError as error:
            raise self._unreachable(f"NIXL failed: {error}") from error
        except DeadlineExceeded:
            seconds = self._settings.seconds
            raise self._unreachable(f"waited {seconds:g} s for the store's memory to be moved") from None

    async def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            await self._connection.close()
