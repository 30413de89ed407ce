"""RPC connections, over which each end can call the services of the other end."""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import itertools
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs
import msgspec

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RpcError, error_fields, rebuilt_error
from jackfield.sdk.rpc import wire
from jackfield.sdk.rpc.wire import Codec, Contract, Message, Method, Process

T = TypeVar("T")
Failure: TypeAlias = Literal["closed", "invalid", "silent"]

_LEAVE_SECONDS = 5.0  #: time for a cancelled call to end at the other end
MSGPACK = Codec()
_CALLER: contextvars.ContextVar[Connection] = contextvars.ContextVar("caller")


def caller() -> Connection:
    """Return the connection of the call that is being served."""
    return _CALLER.get()


@attrs.frozen(kw_only=True, eq=False)
class Service:
    """An object and the contract of its callable methods."""

    target: Any
    contract: Contract


@attrs.define(eq=False, slots=False)
class Connection(asyncio.Protocol):
    """One end of a connection. It belongs to one event loop."""

    name: str  #: name of the other end, for errors
    services: Mapping[str, Service]  #: services for the other end by name; read at each call
    clock: Clock  #: time source for all waits
    _codec: Codec = attrs.field(default=MSGPACK, kw_only=True)  #: codec of both ends
    _limit: int = attrs.field(default=wire.LIMIT, kw_only=True)  #: maximum bytes of a received message
    #: secret, in hex, that both ends prove to know before anything else is read; empty: there is no stranger
    _secret: str = attrs.field(default="", kw_only=True)
    _own_name: str = attrs.field(default="", kw_only=True)  #: name of this process, for the other end
    _owner: str = attrs.field(default="", kw_only=True)  #: session for which this connection sends heartbeats
    #: creates the error of calls after the end from its reason; None: ``rpc.lost``
    _lost_error: Callable[[str], JackfieldError] | None = attrs.field(default=None, kw_only=True)
    #: called instead of :meth:`end` when the connection fails
    _on_failure: Callable[[Failure, str], None] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.session = secrets.token_hex(8)
        self.process: Process | None = None  #: process of the other end
        self.heard = True  #: whether data was received since the last check
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()  #: reason of the end
        self.admitted: asyncio.Future[None] = loop.create_future()  #: done when the other end has proved the secret
        self.welcome: wire.Welcome  #: its proof
        self.lost.add_done_callback(lambda _: self.admitted.cancel())
        if not self._secret:
            self.admitted.set_result(None)
        self._nonce, self._expected = secrets.token_bytes(32), b""  #: own challenge and expected proof
        self._bytes = bytearray()  #: received bytes of an incomplete message
        self._asked: dict[int, tuple[str, asyncio.Future[wire.Reply]]] = {}  #: open calls with a description, by id
        self._served: dict[object, asyncio.Task[None]] = {}
        self.iterations: dict[int, AsyncGenerator[Any, None]] = {}  #: open ones, by the call that began them
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the connection, and send the challenge to a stranger."""
        self._transport = cast(asyncio.Transport, transport)
        if self._secret:
            self.send(wire.Hello(self._nonce))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection because its transport was closed."""
        self.failed("closed", f"was cut off: {exc}" if exc else "has ended without a word")

    def pause_writing(self) -> None:
        """Make further calls wait until the other end reads."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Resume waiting calls."""
        self._room.set()

    def data_received(self, data: bytes) -> None:
        """Split received bytes into messages."""
        self._bytes += data
        try:
            while len(self._bytes) >= wire.HEAD.size and not self.lost.done():
                magic, size = wire.HEAD.unpack_from(self._bytes)
                limit = self._limit if self.admitted.done() else wire.STRANGER_LIMIT
                if magic != wire.MAGIC or size > limit:
                    message = "a message is too long, or is not one of this protocol"
                    raise RpcError(message, expected=f"{limit} bytes", found=bytes(self._bytes[: wire.HEAD.size]))
                if len(self._bytes) < (end := wire.HEAD.size + size):
                    return
                content = bytes(self._bytes[wire.HEAD.size : end])
                del self._bytes[:end]
                self.heard = True
                self.handle(self._codec.decode(content, Message, self.name))
        except JackfieldError as error:
            self._bytes.clear()
            self.failed("invalid", f"broke the protocol: {error.message} ({error.found})")

    def failed(self, why: Failure, reason: str) -> None:
        """End a connection that was closed by the other end, received invalid data or heard no heartbeat."""
        if self._on_failure is None:
            self.end(reason)
        else:
            self._on_failure(why, reason)

    def send(self, message: Message) -> None:
        """Send a message, unless the connection has ended."""
        if self._transport is not None and not self.lost.done():
            content = self._codec.encode(message)
            self._transport.write(wire.HEAD.pack(wire.MAGIC, len(content)) + content)

    def end(self, reason: str) -> None:
        """End the connection: fail open calls and cancel the other end's calls here. Idempotent."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.close()
        asked, self._asked = self._asked, {}
        for _, answer in asked.values():
            answer.set_exception(self.error())
            answer.exception()  # mark it as retrieved: the caller may be gone
        for task in self._served.values():
            task.cancel()
        self._room.set()

    async def close(self, reason: str = "") -> None:
        """Send a goodbye and wait until the other end's calls have ended here. Idempotent.

        ``reason`` completes "the process …" in errors of the other end; empty: it has ended.
        """
        self.send(wire.Goodbye(reason))
        self.end(reason or "was closed")
        await asyncio.gather(*self._served.values(), return_exceptions=True)
        for number in list(self.iterations):
            await self._close(number)

    def error(self) -> JackfieldError:
        """Return the error of calls after the end."""
        if self._lost_error is not None:
            return self._lost_error(self.lost.result())
        where = f"{self.name}, {self.process}" if self.process else self.name
        return RpcError(f"{self.name} is lost", code="rpc.lost", where=where, found=f"it {self.lost.result()}")

    @property
    def local_host(self) -> str:
        """The local address of the connection; loopback if both ends are on this host."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    @property
    def doing(self) -> str:
        """Describe the other end's unfinished calls, for error messages."""
        return ", ".join(what for what, _ in itertools.islice(self._asked.values(), 4))

    def handle(self, message: Message) -> None:
        """Handle a message. Before the proof only messages of the handshake are accepted."""
        if not self.admitted.done():
            self._greet(message)
            return
        match message:
            case wire.Call():
                key = message.id or object()
                task = self._served[key] = asyncio.get_running_loop().create_task(self._serve(message))
                task.add_done_callback(lambda _: self._served.pop(key, None))
            case wire.Reply() if message.id in self._asked:
                self._asked.pop(message.id)[1].set_result(message)
            case wire.Reply():
                self.failed("invalid", "broke the protocol: it sent a reply without a call")
            case wire.Cancel() if message.id in self._served:
                # a call that was cancelled before it began also gets a reply
                asyncio.get_running_loop().call_soon(self._served[message.id].cancel)
            case wire.Heartbeat() if message.news:
                logging.getLogger("jackfield").warning("%s", message.news)
            case wire.Goodbye():
                self.end(message.reason or "has ended")

    def _greet(self, message: Message) -> None:
        key = bytes.fromhex(self._secret)  # each end proves it over both challenges, its own first
        if isinstance(message, wire.Hello) and not self._expected and message.nonce != self._nonce:
            self._expected = hmac.digest(key, message.nonce + self._nonce, "sha256")
            proof, process = hmac.digest(key, self._nonce + message.nonce, "sha256"), Process.of(os.getpid())
            contracts = {name: service.contract.fingerprint for name, service in self.services.items()}
            self.send(wire.Welcome(proof, self._own_name, process, contracts, self._owner or self.session))
        elif isinstance(message, wire.Welcome) and hmac.compare_digest(message.proof, self._expected):
            self.welcome, self.name, self.process = message, message.name, message.process
            self.admitted.set_result(None)
        else:
            self.failed("invalid", "broke the protocol: it has not proved that it knows the secret")

    async def _serve(self, call: wire.Call) -> None:
        _CALLER.set(self)
        error: BaseException | None = None
        try:
            work, what = self._work(call)
            value = await (work if call.seconds is None else self.clock.wait_for(work, call.seconds, what))
            encoded = self._codec.encode(value)
        except asyncio.CancelledError:
            error = RpcError(f"{call.method} was cancelled", code="rpc.cancelled")
        except BaseException as raised:  # the caller gets any exception, and other calls continue
            error = raised
            if not isinstance(raised, JackfieldError):
                logging.getLogger("jackfield").error("%s raised", call.method, exc_info=raised)
        if call.id:
            content = encoded if error is None else self._codec.encode(None)
            self.send(wire.Reply(call.id, msgspec.Raw(content), None if error is None else error_fields(error)))

    def _work(self, call: wire.Call) -> tuple[Coroutine[Any, Any, Any], str]:
        """Start a called method; return its coroutine and its description."""
        name, _, member = call.method.rpartition(".")
        if not name:
            (number,) = self._codec.decode(call.arguments, tuple[int], call.method)
            return (self._next(number) if member == "next" else self._close(number)), member
        service = self.services.get(name)
        method = None if service is None else service.contract.methods.get(member)
        if service is None or method is None:
            there = ", ".join(self.services if service is None else service.contract.methods)
            raise RpcError("there is no such method", code="rpc.method", where=call.method, expected=there)
        try:
            arguments = self._codec.decode(call.arguments, method.arguments, call.method)
        except JackfieldError as error:  # of a validator: name the call
            about = wire.subject(self._codec.decode(call.arguments, list[Any], call.method))
            error.where = f"{about}, {error.where}" if about else error.where
            raise
        work = getattr(service.target, member)(**msgspec.structs.asdict(arguments))
        if method.streams:
            self.iterations[call.id] = work
            work = self._next(call.id)
        return work, f"{call.method} {wire.subject(msgspec.structs.astuple(arguments))}".rstrip()

    async def _next(self, number: int) -> list[Any]:
        """Return a list with the next item of an iteration; it is empty at the end."""
        try:
            return [await anext(self.iterations[number])]
        except (KeyError, StopAsyncIteration):
            self.iterations.pop(number, None)
            return []

    async def _close(self, number: int) -> None:
        iteration = self.iterations.pop(number, None)
        if iteration is not None:
            await iteration.aclose()

    def notify(self, method: str, contract: Contract, *arguments: Any) -> None:
        """Call ``service.method`` without waiting for a reply."""
        made = contract.methods[method.rpartition(".")[2]].arguments(*arguments)
        self.send(wire.Call(0, method, msgspec.Raw(self._codec.encode(made))))

    async def call(
        self,
        method: str,
        arguments: Any,
        seconds: float,
        kind: Any,
        what: str,
        *,
        undo: Callable[[Any], None] | None = None,
        number: int = 0,
    ) -> Any:
        """Call ``service.method`` and wait for its result. Cancellation cancels it there and waits for its end.

        Raise the method's error; ``rpc.lost``; ``deadline``, which names the other end and the call.
        """
        await self._room.wait()
        if self.lost.done():
            raise self.error()
        number = number or secrets.randbits(62) + 1  # it is unpredictable, so that a reply cannot be forged
        try:
            content = self._codec.encode(arguments)
        except RpcError as error:
            error.where = f"{self.name}, {what}"
            raise
        self.send(wire.Call(number, method, msgspec.Raw(content), seconds))
        answer: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = what, answer

        def value(reply: wire.Reply) -> Any:
            if reply.error is not None:
                raise rebuilt_error(reply.error, self.name)
            return self._codec.decode(reply.value, kind, f"{self.name}, {what}")

        def give_back(done: asyncio.Future[wire.Reply]) -> None:
            with suppress(JackfieldError):
                if undo is not None and (late := value(done.result())) is not None:
                    undo(late)

        try:
            reply = await self.clock.wait_for(asyncio.shield(answer), seconds, f"{self.name} to {what}")
        except (asyncio.CancelledError, DeadlineExceeded):
            answer.add_done_callback(give_back)
            if not answer.done():
                self.send(wire.Cancel(number))
                with suppress(JackfieldError):
                    await self.clock.wait_for(asyncio.shield(answer), _LEAVE_SECONDS, "a cancelled call to end")
            raise
        return value(reply)

    async def iterate(
        self, method: str, arguments: Any, seconds: float, kind: Any, what: str
    ) -> AsyncGenerator[Any, None]:
        """Iterate over the items that ``service.method`` yields, each fetched when it is requested."""
        number = secrets.randbits(62) + 1
        items: list[Any] | None = None
        try:
            items = await self.call(method, arguments, seconds, list[kind], what, number=number)
            while items:
                yield items[0]
                items = None
                items = await self.call("next", [number], seconds, list[kind], what)
        finally:
            if items != []:  # it has not ended
                with suppress(JackfieldError):
                    await self.call("leave", [number], _LEAVE_SECONDS, None, what)


def stub(connection: Connection, service: str, contract: Contract, cls: type[T], seconds: float) -> T:
    """Return an object whose methods call a service of the other end, with a deadline of ``seconds``.

    A method's own ``deadline_seconds`` is added. ``cls`` is the object's class for type checkers.
    """

    def calling(method: Method) -> Callable[..., Any]:
        name, undone = f"{service}.{method.name}", contract.undo.get(method.name)
        undo = undone and (lambda value: connection.notify(f"{service}.{undone}", contract, value))

        def call(*arguments: Any, **keywords: Any) -> Any:
            made = method.arguments(*arguments, **keywords)
            limit = seconds + float(getattr(made, "deadline_seconds", 0.0))
            what = f"{method.name} {wire.subject(msgspec.structs.astuple(made))}".rstrip()
            if method.streams:
                return connection.iterate(name, made, limit, method.result, what)
            return connection.call(name, made, limit, method.result, what, undo=undo or None)

        return call

    made = type(f"Remote{cls.__name__}", (), {})()
    vars(made).update({method.name: calling(method) for method in contract})
    return cast(T, made)
