"""A queue's controller for clients in other processes.

It answers calls of the queue's methods, waits in its own process included, and knows which of its clients live: what a
client has begun and left open when it dies is broken off, its explorers' tickets are handed out again, and its leases
end: at once where they last as long as their holder (``lease_seconds=math.inf``), else after their time. The other
clients are told of the death. Values never come here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, cast

import attrs
import zmq

from jackfield.clock import Clock
from jackfield.errors import JackfieldError, QueueError, RpcError, error_fields
from jackfield.heartbeat import LOOKS, Process, Work, silence
from jackfield.queue.local import LocalQueue
from jackfield.queue.meta import BatchMeta
from jackfield.queue.protocol import REPLIES, REQUESTS, ControllerAddress, Method, method, plain
from jackfield.settings import structure
from jackfield.sockets import Gate, Keys, is_loopback, listening, pieces, readable, whole
from jackfield.wire import Limits, Message, Wire

__all__ = ["QueueServer"]

_LIMITS = Limits(buffers=0)  #: metadata has none
_ANEW = ("clear", "restore", "recover")  #: may make the queue another one


class _LeftAlone(Exception):
    """Whoever had opened something is gone."""


@attrs.define(eq=False)
class _Client:
    """A process that has said hello."""

    identity: bytes
    name: str
    process: Process
    work: Work = attrs.field(factory=Work)
    heard: bool = True  #: since the last look
    silent: int = 0  #: looks since then
    leases: set[tuple[str, int]] = attrs.field(factory=set)  #: consumer and epoch
    calls: dict[int, asyncio.Task[None]] = attrs.field(factory=dict)
    iterators: dict[int, AsyncGenerator[Any, None]] = attrs.field(factory=dict)
    contexts: dict[int, AbstractAsyncContextManager[Any]] = attrs.field(factory=dict)
    entered: dict[int, Any] = attrs.field(factory=dict)  #: what contexts gave
    methods: dict[int, Method] = attrs.field(factory=dict)  #: of what is open
    explorers: set[str] = attrs.field(factory=set)

    @property
    def works(self) -> bool:
        """Whether it has something of the queue as it is now."""
        return bool(self.explorers or self.methods)


class QueueServer:
    """Serves one queue. Of one event loop."""

    def __init__(
        self,
        queue: LocalQueue,
        clock: Clock,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        encrypted: bool | None = None,
        heartbeat_seconds: float = 30.0,
    ) -> None:
        """
        Args:
            queue: started, and closed, by who made it.
            clock: of the queue.
            host: an address of this host.
            port: for TCP; 0: any that is free.
            encrypted: TCP with CURVE, for those who have the address file; None: beyond loopback.
            heartbeat_seconds: a client that says nothing for so long is dead.
        """
        self.queue = queue
        self._clock = clock
        self._host, self._port = host, port
        self._encrypted = not is_loopback(host) if encrypted is None else encrypted
        self._silence = heartbeat_seconds
        self._secret = secrets.token_bytes(32)
        self._wire = Wire(REQUESTS, self._secret, _LIMITS)
        self._replies = Wire(REPLIES, self._secret, _LIMITS)
        self._context = zmq.Context[Any]()
        self._socket: zmq.Socket[Any] | None = None
        self._gate: Gate | None = None
        self._clients: dict[bytes, _Client] = {}
        self._refused: Counter[str] = Counter()  #: calls that are none
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def refused(self) -> Counter[str]:
        """What was not taken: messages and calls by code of error, and connections without the key."""
        connections = Counter({"key": self._gate.refused}) if self._gate is not None and self._gate.refused else {}
        return self._wire.refused + self._refused + Counter(connections)

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of those who live."""
        return tuple(client.name for client in self._clients.values())

    # -- life

    async def start(self) -> ControllerAddress:
        """Listen; with what a client gets in.

        Raises:
            QueueError: ``queue.store`` where nobody can listen.
        """
        keys = Keys.make() if self._encrypted else None
        self._gate = Gate(self._context, keys, self._secret)
        try:
            self._socket, address = listening(
                self._context, self._host, keys, tcp=bool(self._port) or keys is not None, port=self._port
            )
        except zmq.ZMQError as error:
            await self.close()
            raise QueueError(
                f"the queue's controller cannot listen: {error}",
                code="queue.store",
                where=self._host,
                fix="name an address of this host, and a port that is free",
            ) from error
        loop = asyncio.get_running_loop()
        loop.add_reader(_file(self._socket), self._read)
        if self._gate is not None:
            loop.add_reader(_file(self._gate.socket), self._ask_gate)
        self._begin(self._look())
        return ControllerAddress(
            address=address,
            secret=self._secret,
            keys=keys,
            heartbeat_seconds=self._silence,
            process=Process.of(os.getpid()),
        )

    async def close(self) -> None:
        """Tell the clients, and hang up. Idempotent."""
        for client in list(self._clients.values()):
            await self._end(client, "the queue's controller has ended")
        tasks, loop = list(self._tasks), asyncio.get_running_loop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        socket, self._socket = self._socket, None
        for each in filter(None, (socket, self._gate.socket if self._gate else None)):
            if not each.closed:
                loop.remove_reader(_file(each))
                each.close(linger=200 if each is socket else 0)
        if not self._context.closed:
            self._context.term()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look(self) -> None:
        """Who has ended, or has been silent for too long, is gone, and the others are told."""
        while True:
            await self._clock.sleep(self._silence / LOOKS)
            self._read()  # what has come while this process was busy counts
            for client in list(self._clients.values()):
                if (reason := self._death(client)) is not None:
                    await self._end(client, reason)
                    self._spread(client, reason)

    def _spread(self, ended: _Client, reason: str) -> None:
        """Tell this process's log and all other clients that one has ended."""
        logging.getLogger("jackfield").warning("%s", reason)
        for other in self._clients.values():
            if other is not ended:
                self._tell(other.identity, "news", {"text": reason})

    def _death(self, client: _Client) -> str | None:
        """Why a client is dead; one that is stopped is killed, so that it does no harm later."""
        works = client.work.goes_on(client.process)
        client.silent = 0 if client.heard or works else client.silent + 1
        client.heard = False
        if client.process.lives() is False:
            return f"{client.name} ({client.process}) has ended without a word"
        if client.silent <= LOOKS:
            return None
        return silence(client.name, client.process, self._silence, killed=client.process.kill())

    # -- messages

    def _ask_gate(self) -> None:
        while self._gate is not None and readable(self._gate.socket):
            self._gate.answer()

    def _read(self) -> None:
        """All that has come. What is no message of ours is counted by the wire, and dropped."""
        while self._socket is not None and readable(self._socket):
            identity, *frames = self._socket.recv_multipart(copy=False)
            with suppress(RpcError):
                message = self._wire.decode(whole(frames))
                self._take(bytes(identity.buffer), message)

    def _tell(self, identity: bytes, kind: str, fields: Mapping[str, Any]) -> None:
        if self._socket is not None:
            self._socket.send_multipart([identity, *pieces(self._replies.encode(kind, fields))])
            asyncio.get_running_loop().call_soon(self._read)  # sending may have swallowed the notice of what has come

    def _take(self, identity: bytes, message: Message) -> None:
        if message.kind == "alive":
            self._hear_of(message["client"])
            return
        if message.kind == "hello":
            process = structure(Process, message["process"], "process", QueueError)
            self._clients.setdefault(identity, _Client(identity, message["name"], process))
        client = self._clients.get(identity)
        if client is None:
            reason = "the queue's controller does not know this client: it was silent, or the controller is another one"
            self._tell(identity, "gone", {"reason": reason})
            return
        client.heard = True
        if message.kind == "hello":
            self._tell(identity, "value", {"id": message["id"], "value": None})
        elif message.kind == "bye":
            self._begin(self._end(client, None))
            if message["early"]:
                self._spread(client, f"{client.name} ({client.process}) has ended before its work was done")
        elif message.kind == "cancel":
            task = client.calls.get(message["id"])
            if task is not None:
                task.cancel()
        else:
            number = message["id"]
            task = self._begin(self._answer(client, message))
            client.calls[number] = task
            task.add_done_callback(lambda _: client.calls.pop(number, None))

    def _hear_of(self, identity: bytes) -> None:
        client = self._clients.get(identity)
        if client is None:
            self._tell(identity, "gone", {"reason": "the queue's controller does not know this client any more"})
        else:
            client.heard = True
            self._tell(identity, "alive", {})

    # -- calls

    async def _answer(self, client: _Client, message: Message) -> None:
        """Do what a client asks for, and say what came of it."""
        handlers: dict[str, Callable[[_Client, Message], Coroutine[Any, Any, Any]]] = {
            "call": self._call,
            "next": self._next,
            "leave": self._leave,
        }
        try:
            value = plain(await handlers[message.kind](client, message))
            self._tell(client.identity, "value", {"id": message["id"], "value": value})
        except StopAsyncIteration:
            self._tell(client.identity, "ended", {"id": message["id"]})
        except Exception as error:  # whatever it is, the client hears of it, and the others go on
            self._tell(client.identity, "error", {"id": message["id"], "error": error_fields(error)})

    async def _call(self, client: _Client, message: Message) -> Any:
        number = message["id"]
        try:
            called = method(message["method"])
            arguments = called.read_arguments(message["arguments"])
        except JackfieldError as error:
            self._refused[error.code] += 1
            raise
        work = getattr(self.queue, called.name)(**arguments)
        if called.sort == "call":
            result = await work
            self._note(client, called.name, arguments, result)
            if called.name == "stats":
                result |= {"clients": len(self._clients), "refused": self.refused.total()}
            return result
        client.methods[number] = called
        if called.sort == "iterator":
            client.iterators[number] = cast("AsyncGenerator[Any, None]", work)
            return None
        context = cast("AbstractAsyncContextManager[Any]", work)
        try:
            client.entered[number] = await context.__aenter__()
        except BaseException:
            del client.methods[number]
            raise
        client.contexts[number] = context
        return client.entered[number]

    def _note(self, client: _Client, name: str, arguments: Mapping[str, Any], result: Any) -> None:
        """What has to be known of a client when it is gone, and of the others when the queue is another one."""
        if isinstance(result, BatchMeta):
            client.leases.update((claim.consumer, claim.epoch) for claim in result.claims)
        if name == "claim_ticket" or (name == "wait_ticket" and result is not None):
            client.explorers.add(arguments["explorer"])
        elif name == "release_tickets":
            client.explorers.discard(arguments["explorer"])
        elif name in _ANEW and not (name == "recover" and (result is False or self.queue.went_on)):
            reason = f"the queue was made another one ({name}) by {client.name}; what was begun before is in vain"
            for other in list(self._clients.values()):
                if other is not client and other.works:
                    self._begin(self._end(other, reason))

    async def _next(self, client: _Client, message: Message) -> Any:
        iterator = client.iterators.get(message["opened"])
        if iterator is None:
            raise QueueError("nothing is iterated over under this number", where=message["opened"])
        return await anext(iterator)

    async def _leave(self, client: _Client, message: Message) -> Any:
        """The end of what was opened; what a context gave, as it is then."""
        number = message["opened"]
        client.methods.pop(number, None)
        iterator, context = client.iterators.pop(number, None), client.contexts.pop(number, None)
        if iterator is not None:
            await iterator.aclose()
        if context is None:
            return None
        if message["broken"]:
            await _break_off(context)
        else:
            await context.__aexit__(None, None, None)
        return client.entered.pop(number)

    async def _end(self, client: _Client, reason: str | None) -> None:
        """Break off what a client has left, and let others have its explorers' tickets; its leases have their time."""
        if self._clients.pop(client.identity, None) is None:
            return
        if reason is not None:
            self._tell(client.identity, "gone", {"reason": reason})
        calls = list(client.calls.values())
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for iterator in client.iterators.values():
            await iterator.aclose()
        for context in client.contexts.values():
            await _break_off(context)
        with suppress(QueueError):  # a closed queue has no tickets
            self.queue.end_leases(client.leases)
            for explorer in sorted(client.explorers):
                await self.queue.release_tickets(explorer)


async def _break_off(context: AbstractAsyncContextManager[Any]) -> None:
    """Leave as if what was inside had failed."""
    with suppress(_LeftAlone, JackfieldError):
        await context.__aexit__(_LeftAlone, _LeftAlone(), None)


def _file(socket: zmq.Socket[Any]) -> int:
    return int(socket.getsockopt(zmq.FD))
