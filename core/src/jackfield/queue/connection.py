"""A client's connection to a queue's controller in another process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import zmq

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, RpcError, rebuilt_error
from jackfield.heartbeat import LOOKS, Process, Work, until_silent
from jackfield.queue.meta import BatchMeta
from jackfield.queue.protocol import REPLIES, REQUESTS, ControllerAddress, Method, method, plain
from jackfield.sockets import dealer, pieces, readable, whole
from jackfield.wire import Limits, Message, Wire

__all__ = ["Connection"]

_WHO = "the queue's controller"
_GOODBYE_MS = 200  #: for the last words to leave


class _Ended(Exception):
    """There is no next item."""


@attrs.define(eq=False)
class _Call:
    """Something that is to be answered."""

    answer: asyncio.Future[Any]
    method: Method | None  #: whose result, or item, it is; None: any
    abandoned: bool = False  #: nobody waits any more


class Connection:
    """Of one event loop; a thread of its own says that this process lives, however busy the loop is."""

    def __init__(self, address: ControllerAddress, clock: Clock, name: str) -> None:
        self._address = address
        self._clock = clock
        self._name = name
        self._wire = Wire(REPLIES, address.secret, Limits(buffers=0))
        self._requests = Wire(REQUESTS, address.secret, Limits(buffers=0))
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._context: zmq.Context[Any] | None = None
        self._socket: zmq.Socket[Any] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._heartbeat: threading.Thread | None = None
        self._over = threading.Event()
        self._heard = False  #: since the last look
        self._work = Work()  #: of the controller
        self._gone: str | None = "it was not started"

    # -- life

    async def open(self) -> None:
        """Say hello.

        Raises:
            QueueError: ``queue.session``: nobody answers in time.
        """
        self._context = zmq.Context[Any]()
        self._socket = dealer(self._context, self._address.keys, self._address.secret)
        identity: Any = self._socket.getsockopt(zmq.IDENTITY)
        self._socket.connect(self._address.address)
        self._gone = None
        asyncio.get_running_loop().add_reader(self._file(), self._read)
        number, ours = next(self._numbers), attrs.asdict(Process.of(os.getpid()))
        call = self._ask(number, None, "hello", {"id": number, "name": self._name, "process": ours})
        try:
            await self._clock.wait_for(call.answer, self._address.heartbeat_seconds, _WHO)
        except DeadlineExceeded as error:
            self._fail(f"it did not answer for {self._address.heartbeat_seconds:g} s")
            await self.close()
            raise self._lost() from error
        self._watching = asyncio.create_task(self._watch(), name="queue-controller-watch")
        self._heartbeat = threading.Thread(target=self._live, args=(identity,), name="queue-heartbeat", daemon=True)
        self._heartbeat.start()

    async def close(self, *, early: bool = False) -> None:
        """Say goodbye, and hang up. Idempotent.

        Args:
            early: work of this process is left to do: the other clients are told that it has ended.
        """
        self._over.set()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if self._heartbeat is not None:
            self._heartbeat.join()
            self._heartbeat = None
        self._tell("bye", {"early": early})
        self._fail("the connection was closed", closed=True)
        socket, self._socket = self._socket, None
        context, self._context = self._context, None
        if socket is not None:
            asyncio.get_running_loop().remove_reader(int(socket.getsockopt(zmq.FD)))
            socket.close(linger=_GOODBYE_MS)
        if context is not None:
            context.term()

    def _file(self) -> int:
        assert self._socket is not None
        return int(self._socket.getsockopt(zmq.FD))

    def _live(self, identity: bytes) -> None:
        """Tell the controller, now and then, that this process lives."""
        assert self._context is not None
        with dealer(self._context, self._address.keys, self._address.secret) as socket:
            socket.connect(self._address.address)
            while not self._over.wait(self._address.heartbeat_seconds / LOOKS):
                socket.send_multipart(self._requests.encode("alive", {"client": identity}))

    async def _watch(self) -> None:
        """Notice that the controller says nothing any more; one that is stopped does no harm later."""
        seconds, process = self._address.heartbeat_seconds, self._address.process
        await until_silent(self._lives, self._clock, seconds)
        if self._gone is None:
            end = ", and it was killed" if process.kill() else ""
            self._fail(f"nothing was heard of it for {seconds:g} s (deadlines.heartbeat){end}")

    def _lives(self) -> bool:
        """Whether there was anything of the controller since the last look."""
        self._read()
        heard, self._heard = self._heard, False
        works = self._work.goes_on(self._address.process)
        return self._gone is not None or heard or works

    def _fail(self, reason: str, *, closed: bool = False) -> None:
        """Nothing will be answered any more."""
        if self._gone is None:
            self._gone = reason
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.answer.done():
                call.answer.set_exception(self._closed() if closed else self._lost())
                if call.abandoned:
                    call.answer.exception()

    def _lost(self) -> QueueError:
        return QueueError(
            f"the connection to {_WHO} is lost: {self._gone}",
            code="queue.session",
            where=f"{self._address.address}, {self._address.process}",
            fix="start this process again, once `jackfield queue serve` runs",
        )

    @staticmethod
    def _closed() -> QueueError:
        return QueueError("the TransferQueue is closed", code="queue.closed", fix="start() it, and close it last")

    # -- messages

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._socket is None or self._gone is not None:
            return
        self._socket.send_multipart(pieces(self._requests.encode(kind, fields)))
        asyncio.get_running_loop().call_soon(self._read)  # sending may have swallowed the notice of what has come

    def _ask(self, number: int, called: Method | None, kind: str, fields: Mapping[str, Any]) -> _Call:
        if self._gone is not None:
            raise self._closed() if self._socket is None else self._lost()
        call = _Call(asyncio.get_running_loop().create_future(), called)
        try:
            self._tell(kind, fields)
        except (OverflowError, TypeError, ValueError) as error:
            raise QueueError(f"a call cannot go to {_WHO}: {error}", where=called.name if called else kind) from error
        self._calls[number] = call
        return call

    def _read(self) -> None:
        while self._socket is not None and readable(self._socket):
            frames = self._socket.recv_multipart(copy=False)
            with suppress(RpcError):  # counted by the wire
                self._take(self._wire.decode(whole(frames)))

    def _take(self, message: Message) -> None:
        self._heard = True
        if message.kind == "gone":
            self._fail(message["reason"])
        elif message.kind == "news":
            logging.getLogger("jackfield").warning("%s", message["text"])
        if "id" not in message.fields:
            return
        call = self._calls.pop(message["id"], None)
        if call is None or call.answer.done():
            return
        try:
            value = self._value(call, message)
        except Exception as error:
            call.answer.set_exception(error)
            if call.abandoned:
                call.answer.exception()
            return
        call.answer.set_result(value)
        if call.abandoned:
            self._undo(message["id"], call, value)

    @staticmethod
    def _value(call: _Call, message: Message) -> Any:
        if message.kind == "error":
            raise rebuilt_error(message["error"], _WHO)
        if message.kind == "ended":
            raise _Ended
        return message["value"] if call.method is None else call.method.read_result(message["value"])

    def _undo(self, number: int, call: _Call, value: Any) -> None:
        """Give back what came for somebody who had left."""
        if isinstance(value, BatchMeta) and len(value):
            arguments = plain({"batch": value})
            self._tell("call", {"id": next(self._numbers), "method": "release", "arguments": arguments})
        elif call.method is not None and call.method.sort == "context":
            self._leave(number)

    async def _answer(self, number: int, call: _Call) -> Any:
        """Wait for it; cancelling this cancels it there."""
        try:
            return await asyncio.shield(call.answer)
        except asyncio.CancelledError:
            if call.answer.done():
                if not call.answer.cancelled() and call.answer.exception() is None:
                    self._undo(number, call, call.answer.result())
            else:
                call.abandoned = True
                self._tell("cancel", {"id": number})
            raise

    # -- calls of the three sorts

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of the queue, by name.

        Raises:
            JackfieldError: what it raises there; ``queue.session``.
        """
        called, number = method(name), next(self._numbers)
        fields = {"id": number, "method": name, "arguments": plain(arguments)}
        return await self._answer(number, self._ask(number, called, "call", fields))

    async def iterate(self, name: str, arguments: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Iterate over what a method yields."""
        called, opened = method(name), next(self._numbers)
        fields = {"id": opened, "method": name, "arguments": plain(arguments)}
        try:
            await self._answer(opened, self._ask(opened, None, "call", fields))
            while True:
                number = next(self._numbers)
                try:
                    call = self._ask(number, called, "next", {"id": number, "opened": opened})
                    item = await self._answer(number, call)
                except _Ended:
                    return
                yield item
        finally:
            self._leave(opened)

    @asynccontextmanager
    async def entered(self, name: str, arguments: Mapping[str, Any]) -> AsyncIterator[tuple[Any, asyncio.Future[Any]]]:
        """Be inside of what a method opens: what it gives, and, once it was left, what that is then."""
        called, opened = method(name), next(self._numbers)
        fields = {"id": opened, "method": name, "arguments": plain(arguments)}
        value = await self._answer(opened, self._ask(opened, called, "call", fields))
        left: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            yield value, left
        except BaseException:
            self._leave(opened)
            raise
        number = next(self._numbers)
        call = self._ask(number, called, "leave", {"id": number, "opened": opened, "broken": False})
        left.set_result(await asyncio.shield(call.answer))

    def _leave(self, opened: int) -> None:
        """Have what was opened broken off; nobody waits for that."""
        self._tell("leave", {"id": next(self._numbers), "opened": opened, "broken": True})
