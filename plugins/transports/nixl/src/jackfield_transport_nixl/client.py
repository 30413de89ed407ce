"""Requests to a store, and the transfers that belong to them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, RpcError
from jackfield.wire import Buffer, Limits, Message, Wire
from jackfield_transport_nixl.agents import Agent, Place
from jackfield_transport_nixl.config import QueueConfig
from jackfield_transport_nixl.wiring import REPLIES, Stream

__all__ = ["Client"]


class Client:
    """A connection to a store, and this process's agent."""

    def __init__(self, settings: QueueConfig, agent: Agent, where: str) -> None:
        """
        Args:
            settings: of the backend.
            agent: of this process, started.
            where: the store is, for errors.
        """
        self._settings = settings
        self.where = where
        self._clock = Clock()
        self._stream: Stream | None = None
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._number = 0
        self._listening: asyncio.Task[None] | None = None
        self._regions: dict[int, Place] = {}  #: of the store
        self.name = ""  #: of the store's agent
        self._meeting = asyncio.Lock()
        self.agent = agent
        self.inline_bytes = 0

    async def connect(self, host: str, port: int, secret: bytes, inline_bytes: int) -> None:
        """Reach the store.

        Raises:
            QueueError: ``queue.unreachable``.
        """
        allowed = Limits(buffers=1)
        self.inline_bytes = inline_bytes
        try:
            reader, writer = await self._clock.wait_for(
                asyncio.open_connection(host, port), self._settings.seconds, "the store"
            )
        except (OSError, DeadlineExceeded) as error:
            raise self._unreachable(f"the store cannot be reached: {error}") from error
        self._stream = Stream(reader, writer, Wire(REPLIES, secret), allowed)
        self._listening = asyncio.ensure_future(self._listen(self._stream))
        await self.ask("stats", {})  # it knows the secret, and so do we

    def _unreachable(self, message: str) -> QueueError:
        return QueueError(message, code="queue.unreachable", where=self.where)

    async def _listen(self, stream: Stream) -> None:
        reason = "has ended"
        try:
            while True:
                message = await stream.receive()
                future = self._replies.pop(message["id"], None)
                if future is not None and not future.done():
                    future.set_result(message)
        except (EOFError, OSError):
            pass
        except RpcError as error:
            reason = f"speaks otherwise: {error.message}"
        finally:
            self._hang_up(reason)

    def _hang_up(self, reason: str) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.writer.close()
        replies, self._replies = self._replies, {}
        for future in replies.values():
            if not future.done():
                future.set_exception(self._unreachable(f"the process that keeps the samples {reason}"))

    async def ask(
        self, kind: str, fields: Mapping[str, Any], buffers: Sequence[Buffer] = (), seconds: float | None = None
    ) -> Message:
        """A request and its reply, which may take ``seconds``, by default those of the settings.

        Raises:
            QueueError: what the store answers; ``queue.unreachable`` where it does not.
        """
        stream = self._stream
        if stream is None:
            raise self._unreachable("the process that keeps the samples has ended")
        seconds = seconds or self._settings.seconds
        self._number += 1
        number = self._number
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            stream.send(kind, {"id": number, **fields}, buffers)
            reply = await self._clock.wait_for(future, seconds, "the store")
        except DeadlineExceeded:
            if kind == "room":
                raise QueueError(
                    f"the store's registered memory stayed full for {seconds:g} s",
                    code="queue.full",
                    where=self.where,
                    fix="delete rows, or raise max_bytes",
                ) from None
            raise self._unreachable(f"waited {seconds:g} s for the store to answer {kind!r}") from None
        finally:
            self._replies.pop(number, None)
        if reply.kind == "error":
            raise QueueError(reply["message"], code=reply["code"], where=reply["where"] or self.where)
        return reply

    def tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A request without a reply; for nothing where nobody listens any more."""
        if self._stream is not None:
            self._number += 1
            self._stream.send(kind, {"id": self._number, **fields})

    def tell_after(self, kind: str, fields: Mapping[str, Any]) -> None:
        """The same, once the transfers that were begun have ended."""
        loop = asyncio.get_running_loop()
        with suppress(RuntimeError):  # closed
            self.agent.run(lambda: loop.call_soon_threadsafe(self.tell, kind, fields))

    async def region(self, number: int) -> Place:
        """Memory of the store."""
        async with self._meeting:
            if number not in self._regions:
                reply = await self.ask("agent", {})
                if self.name:  # its old regions may have lain where new ones lie
                    await self.done(self.agent.forget(self.name))
                self.name = await self.done(self.agent.meet(reply["metadata"]))
                self._regions = {number: Place(*place) for number, place in reply["regions"]}
        try:
            return self._regions[number]
        except KeyError:
            raise self._unreachable("the store speaks of memory that it does not have") from None

    async def done(self, future: Any) -> Any:
        """Wait for the agent.

        Raises:
            QueueError: ``queue.unreachable``.
        """
        try:
            return await self._clock.wait_for(asyncio.wrap_future(future), self._settings.seconds, "NIXL")
        except OSError as error:
            raise self._unreachable(f"NIXL failed: {error}") from error
        except DeadlineExceeded:
            seconds = self._settings.seconds
            raise self._unreachable(f"waited {seconds:g} s for the store's memory to be moved") from None

    async def close(self) -> None:
        """Hang up."""
        listening, self._listening = self._listening, None
        self._hang_up("was left")
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
