"""A connection of the RPC. Each of its ends calls what the other end serves, and serves what the other end calls."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import attrs
import msgspec

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RpcError, error_fields, rebuilt_error
from jackfield.rpc.contract import Codec, Contract, Method, subject
from jackfield.rpc.heartbeat import Process
from jackfield.rpc.wire import LIMIT, Call, Cancel, Frames, Goodbye, Message, News, Reply, frame

T = TypeVar("T")

_LEAVE_SECONDS = 5.0  #: for a cancelled call to end at the other end
_CALLER: contextvars.ContextVar[Connection] = contextvars.ContextVar("caller")


def caller() -> Connection:
    """Return the connection whose call is being answered."""
    return _CALLER.get()


@attrs.frozen(kw_only=True, eq=False)
class Service:
    """An object, and the contract of what may be called of it."""

    target: Any
    contract: Contract


@attrs.define(eq=False)
class _Asked:
    """A call to the other end that has not been replied to."""

    what: str
    kind: Any  #: of the value that is to come
    answer: asyncio.Future[Any]


class Connection(Frames):
    """One end of a connection. It belongs to one event loop."""

    def __init__(
        self,
        name: str,
        services: Mapping[str, Service],
        clock: Clock,
        *,
        codec: Codec | None = None,
        limit: int = LIMIT,
        lost_error: Callable[[str], JackfieldError] | None = None,
    ) -> None:
        """
        Args:
            name: of the other end, as errors call it.
            services: what the other end may call, by name. The mapping is read at each call.
            clock: through which every wait goes.
            codec: of both ends.
            limit: bytes of a message that comes.
            lost_error: makes the error of calls after the end from its reason; None: ``rpc.lost``.
        """
        super().__init__()
        self.name, self.services, self.clock, self.limit = name, services, clock, limit
        self.session = secrets.token_hex(8)
        self.process: Process | None = None  #: of the other end
        self.heard = True  #: whether something came since the last look
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  #: how it ended
        self._codec, self._lost_error = codec or Codec(), lost_error
        self._asked: dict[int, _Asked] = {}
        self._served: dict[object, asyncio.Task[None]] = {}
        self._iterations: dict[int, AsyncGenerator[Any, None]] = {}  #: by the id of the call that opened them
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()

    # -- the stream ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection because its transport was closed."""
        self.end(f"was cut off: {exc}" if exc else "has ended without a word")

    def pause_writing(self) -> None:
        """Make further calls wait until the other end reads."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Let calls go on."""
        self._room.set()

    def refused(self, error: JackfieldError) -> None:
        """End a connection that cannot be read on."""
        self.end(f"broke the protocol: {error.message}")

    def silent(self, reason: str) -> None:
        """End a connection whose other end has sent no heartbeat."""
        self.end(reason)

    def send(self, message: Message) -> None:
        """Send a message, unless the connection has ended."""
        if self._transport is not None and not self.lost.done():
            self._transport.write(frame(self._codec.encode(message)))

    def end(self, reason: str) -> None:
        """End the connection: fail open calls, and cancel what the other end had begun here. Idempotent."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.close()
        asked, self._asked = list(self._asked.values()), {}
        for each in asked:
            _settle(each.answer, self.error())
        for task in self._served.values():
            task.cancel()
        self._room.set()

    async def close(self, reason: str = "", *, early: bool = False) -> None:
        """Say goodbye, and wait until the calls of the other end have ended here. Idempotent."""
        self.send(Goodbye(reason, early))
        await self.leave(reason or "the connection was closed")

    async def leave(self, reason: str) -> None:
        """Close this end without a goodbye, and wait until the calls of the other end have ended here."""
        self.end(reason)
        await asyncio.gather(*self._served.values(), return_exceptions=True)
        for iteration in self._iterations.values():
            await iteration.aclose()
        self._iterations.clear()

    def error(self) -> JackfieldError:
        """Make the error of calls after the end."""
        if self._lost_error is not None:
            return self._lost_error(self.lost.result())
        where = f"{self.name}, {self.process}" if self.process else self.name
        return RpcError(f"{self.name} is lost", code="rpc.lost", where=where, found=f"it {self.lost.result()}")

    @property
    def iterates(self) -> bool:
        """Return whether the other end iterates over something here."""
        return bool(self._iterations)

    @property
    def local_host(self) -> str:
        """The address of this machine on the way to the other end; loopback where both share the host."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    @property
    def doing(self) -> str:
        """Describe what the other end was asked to do and has not done, for messages."""
        return ", ".join(each.what for each in itertools.islice(self._asked.values(), 4))

    # -- what comes ----------------------------------------------------------------------------------------------------

    def took(self, content: bytes) -> None:
        """Decode and handle a message."""
        self.heard = True
        self.handle(self._codec.decode(content, Message, self.name))

    def handle(self, message: Message) -> None:
        """Handle a message."""
        match message:
            case Call():
                key = message.id or object()
                task = self._served[key] = asyncio.get_running_loop().create_task(self._serve(message))
                task.add_done_callback(lambda _: self._served.pop(key, None))
            case Reply():
                self._replied(message)
            case Cancel() if message.id in self._served:
                self._served[message.id].cancel()
            case News():
                logging.getLogger("jackfield").warning("%s", message.text)
            case Goodbye():
                self.end(message.reason or f"has ended{' before its work was done' if message.early else ''}")

    def _replied(self, reply: Reply) -> None:
        asked = self._asked.pop(reply.id, None)
        if asked is None:
            self.refused(RpcError("it sent a reply without a call"))
            return
        try:
            if reply.error is not None:
                raise rebuilt_error(reply.error, self.name)
            value = self._codec.decode(reply.value, asked.kind, f"{self.name}, {asked.what}")
        except JackfieldError as error:
            _settle(asked.answer, error)
        else:
            _settle(asked.answer, None, value)

    # -- serving -------------------------------------------------------------------------------------------------------

    async def _serve(self, call: Call) -> None:
        _CALLER.set(self)
        error: dict[str, Any] | None = None
        try:
            work, what = self._work(call)
            value = await (work if call.seconds is None else self.clock.wait_for(work, call.seconds, what))
            encoded = self._codec.encode(value)
        except asyncio.CancelledError:
            error = error_fields(RpcError(f"{call.method} was cancelled", code="rpc.cancelled"))
        except JackfieldError as raised:
            error = error_fields(raised)
        except BaseException as raised:  # whatever it is goes to the caller, and other calls go on
            logging.getLogger("jackfield").error("%s raised", call.method, exc_info=raised)
            error = error_fields(raised)
        if call.id:
            content = encoded if error is None else self._codec.encode(None)
            self.send(Reply(call.id, msgspec.Raw(content), error))

    def _work(self, call: Call) -> tuple[Coroutine[Any, Any, Any], str]:
        """Start the method that is called. Returns its coroutine and its description."""
        name, _, member = call.method.rpartition(".")
        if not name:
            (number,) = self._codec.decode(call.arguments, tuple[int], call.method)
            return (self._next(number) if member == "next" else self._close(number)), member
        if name not in self.services:
            known = ", ".join(self.services)
            raise RpcError("there is no such service", code="rpc.method", where=call.method, expected=known)
        service = self.services[name]
        method = service.contract.method(member)
        values = self._codec.decode(call.arguments, method.arguments, call.method)
        work = method.call(service.target, values)
        if method.streams:
            self._iterations[call.id] = work
            work = _nothing()
        return work, f"{call.method} {subject(values)}".rstrip()

    async def _next(self, number: int) -> list[Any]:
        """Return the next item of an iteration in a list, which is empty at the end."""
        try:
            return [await anext(self._iterations[number])]
        except (KeyError, StopAsyncIteration):
            return []

    async def _close(self, number: int) -> None:
        iteration = self._iterations.pop(number, None)
        if iteration is not None:
            await iteration.aclose()

    # -- calling -------------------------------------------------------------------------------------------------------

    def notify(self, method: str, contract: Contract, *arguments: Any) -> None:
        """Call ``service.method`` without waiting for a reply."""
        self._call(0, method, contract.method(method.rpartition(".")[2]).bind(arguments, {}), None)

    def _call(self, number: int, method: str, values: list[Any], seconds: float | None) -> None:
        self.send(Call(number, method, msgspec.Raw(self._codec.encode(values)), seconds))

    async def call(
        self,
        method: str,
        values: list[Any],
        seconds: float,
        kind: Any,
        what: str,
        *,
        undo: Callable[[Any], None] | None = None,
        number: int = 0,
    ) -> Any:
        """Call ``service.method`` and wait for its result. Leaving early cancels it there, and waits for its end.

        Raises:
            JackfieldError: what it raises there; ``rpc.lost``; ``deadline``, naming the other end and the call.
        """
        await self._room.wait()
        if self.lost.done():
            raise self.error()
        number = number or _new_number()
        self._call(number, method, values, seconds)
        asked = _Asked(what, kind, asyncio.get_running_loop().create_future())
        self._asked[number] = asked
        try:
            return await self.clock.wait_for(asyncio.shield(asked.answer), seconds, f"{self.name} to {asked.what}")
        except (asyncio.CancelledError, DeadlineExceeded):
            if undo is not None:
                asked.answer.add_done_callback(lambda done: _undo(done, undo))
            if not asked.answer.done():
                self.send(Cancel(number))
                with suppress(JackfieldError):
                    await self.clock.wait_for(asyncio.shield(asked.answer), _LEAVE_SECONDS, "a cancelled call to end")
            raise

    async def iterate(
        self, method: str, values: list[Any], seconds: float, kind: Any, what: str
    ) -> AsyncGenerator[Any, None]:
        """Iterate over what ``service.method`` yields, item by item as they are asked for."""
        number = _new_number()
        try:
            await self.call(method, values, seconds, None, what, number=number)
            while items := await self.call("next", [number], seconds, list[kind], what):
                yield items[0]
        finally:
            with suppress(JackfieldError):
                await self.call("leave", [number], _LEAVE_SECONDS, None, what)


def _new_number() -> int:
    """Make the id of a call, which a forged reply does not know."""
    return secrets.randbits(62) + 1


async def _nothing() -> None:
    return


def _settle(answer: asyncio.Future[Any], error: Exception | None, value: Any = None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
        answer.exception()  # its caller may have left


def _undo(answer: asyncio.Future[Any], undo: Callable[[Any], None]) -> None:
    if not answer.cancelled() and answer.exception() is None and answer.result() is not None:
        undo(answer.result())


def stub(connection: Connection, service: str, contract: Contract, cls: type[T], seconds: float) -> T:
    """Make an object whose methods call a service of the other end.

    Args:
        connection: to the other end.
        service: its name there.
        contract: of the service.
        cls: what the object is to type checkers and readers.
        seconds: the longest that a call may take. A method's own ``deadline_seconds`` is added.
    """
    made = type(f"Remote{cls.__name__}", (), {})()
    made.connection = connection
    for method in contract:
        setattr(made, method.name, _calling(connection, service, contract, method, seconds))
    return cast(T, made)


def _calling(connection: Connection, service: str, contract: Contract, method: Method, seconds: float) -> Any:
    name, undone, undo = f"{service}.{method.name}", contract.undo.get(method.name), None
    if undone is not None:
        undo = lambda value: connection.notify(f"{service}.{undone}", contract, value)  # noqa: E731

    def call(*arguments: Any, **keywords: Any) -> Any:
        values = method.bind(arguments, keywords)
        limit = seconds + (0.0 if method.deadline is None else float(values[method.deadline]))
        what = f"{method.name} {subject(values)}".rstrip()
        if method.streams:
            return connection.iterate(name, values, limit, method.result, what)
        return connection.call(name, values, limit, method.result, what, undo=undo)

    return call
