"""Where the sides of a transfer between processes meet: one connection per worker, for everything but the tensors.

The sender listens, each worker calls and shows the secret that came with its connect arguments. Both then say things to
each other: plain values, in frames of a length and JSON. Whoever dies, leaves or breaks off is noticed at once by the
other side, and each wait ends at the transfer's deadline with the names of those who are late.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError

__all__ = ["Meeting", "Peer", "reason_of"]

T = TypeVar("T")

_LENGTH = struct.Struct(">Q")
_LARGEST_GREETING = 1 << 12  #: bytes, of somebody who has not shown the secret yet
_LARGEST_MESSAGE = 1 << 30
_CLOSING_SECONDS = 1.0  #: for the last words to leave
_RETRY_SECONDS = 0.1  #: between two attempts to come back
_SENDER_FIRST = 1.0  #: seconds between the deadline of the sender and that of its workers

#: Told of each message as it comes.
Heard = Callable[["Peer", Mapping[str, Any]], None]


@attrs.define(eq=False)
class Peer:
    """The other end of a connection."""

    name: str  #: as errors call it: ``worker 2``, ``the sender``
    number: int
    writer: asyncio.StreamWriter
    said: dict[str, Any] = attrs.field(factory=dict)  #: the last value of each thing that it said
    broken: str | None = None  #: why it will say no more
    lost_at: float | None = None  #: on the clock, since when its connection is gone


class Meeting:
    """One end of the conversation. Two words mean something here: ``broken``, and ``done``: who said it may leave."""

    def __init__(self, seconds: float, heard: Heard | None = None, *, patience: float = 0.0) -> None:
        """
        Args:
            seconds: the deadline of the whole transfer, counted from :meth:`admit`; of workers from their welcome, and
                a little longer, since the sender is the one who knows which of them is late.
            heard: called with each message as it comes.
            patience: seconds for which a worker whose connection breaks may come back, the same at both ends. The last
                value of each thing that was said is then said again, so that nothing may depend on how often it comes.
                0: a connection that breaks is a death.
        """
        self.peers: dict[int, Peer] = {}
        self._seconds = seconds
        self._heard = heard
        self._patience = patience
        self._told: dict[str, Any] = {}  #: the last value of each thing that this end said
        self._place: tuple[str, int, dict[str, Any]] | None = None  #: of the sender, and this worker's greeting
        self._clock = Clock()
        self._ends = 0.0  #: on the clock
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._secret = ""
        self._expected = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Future[None]] = set()

    # -- before anybody speaks

    def open(self, host: str, port: int = 0) -> dict[str, Any]:
        """Listen (the sender's side); returns what a worker has to know to come.

        Raises:
            WeightsError: ``weights.transfer`` where the port is taken or the host is not one of this machine's.
        """
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise WeightsError(
                f"cannot listen for inference workers: {error.strerror or error}",
                where=f"{host}:{port}",
                fix="choose another port, or 0 for any that is free",
            ) from error
        self._secret = secrets.token_hex(16)
        host, port = self._listener.getsockname()[:2]
        return {"host": host, "port": port, "secret": self._secret}

    async def admit(self, workers: int, version: int) -> None:
        """Wait until every worker has come (the sender's side).

        Raises:
            DeadlineExceeded: naming those who have not.
            WeightsError: the meeting was not opened; a worker came for another version.
        """
        self._ends = self._clock.time() + self._seconds
        if self._listener is None:
            raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
        self._expected = workers

        def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._keep(asyncio.ensure_future(self._greet(reader, writer, version)))

        listener, self._listener = self._listener, None
        self._server = await asyncio.start_server(greet, sock=listener)

        def missing() -> str:
            late = [f"worker {number}" for number in range(workers) if number not in self.peers]
            return f"{' and '.join(late)} to connect"

        await self._wait(lambda: len(self.peers) == workers, missing)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: int) -> None:
        hello: dict[str, Any] = {}
        try:
            with suppress(EOFError, OSError, ValueError):
                hello = await self._within(_read(reader, _LARGEST_GREETING), "a greeting")
        except BaseException:
            writer.close()
            raise
        number = hello.get("worker")
        known = hmac.compare_digest(str(hello.get("secret")).encode(), self._secret.encode())
        if not known or not isinstance(number, int) or not 0 <= number < self._expected:
            writer.close()
            return
        if number in self.peers:
            await self._greet_again(self.peers[number], hello, reader, writer)
            return
        peer = Peer(f"worker {number}", number, writer, said={"version": hello.get("version")})
        self._write(peer, {"version": version})
        if hello.get("version") != version:
            peer.broken = f"expects weights of version {hello.get('version')}, these are of version {version}"
        self.peers[number] = peer
        self._notify()
        await self._listen(peer, reader)

    async def _greet_again(
        self, peer: Peer, hello: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Somebody comes back, perhaps before this end has noticed that it was gone; nobody else comes in its place."""
        if not (self._patience and hello.get("again")) or peer.broken is not None:
            writer.close()
            return
        peer.writer.transport.abort()
        peer.writer, peer.lost_at = writer, None
        self._write(peer, {"version": hello.get("version"), **self._told})
        await self._listen(peer, reader)

    async def enter(self, host: str, port: int, secret: str, worker: int, version: int) -> None:
        """Come to the sender and be welcomed (a worker's side).

        Raises:
            WeightsError: ``weights.version`` for weights of another version; ``weights.transfer`` when the sender
                cannot be reached or leaves.
            DeadlineExceeded: naming the sender.
        """
        self._ends = self._clock.time() + self._seconds
        where = f"{host}:{port}"
        try:
            reader, writer = await self._within(asyncio.open_connection(host, port), f"the sender at {where}")
        except OSError as error:
            raise WeightsError(f"the sender cannot be reached: {error}", where=where) from error
        peer = self.peers[0] = Peer("the sender", 0, writer)
        hello = {"secret": secret, "worker": worker, "version": version}
        self._place = host, port, hello
        self._write(peer, hello)
        self._keep(asyncio.ensure_future(self._listen(peer, reader)))
        await self.until(lambda peer: "version" in peer.said, "welcome this worker")
        if peer.said["version"] != version:
            found = peer.said["version"]
            message = "weights of another version came"
            raise WeightsError(message, code="weights.version", expected=version, found=found)
        self._ends = self._clock.time() + self._seconds + _SENDER_FIRST

    @property
    def local_host(self) -> str:
        """The address of this machine on the way to the peer (a worker's side)."""
        return str(self.peers[0].writer.get_extra_info("sockname")[0])

    # -- the conversation

    def tell(self, message: Mapping[str, Any]) -> None:
        """Say something to everybody who still listens."""
        self._told.update(message)
        frame = _frame(message)
        for peer in self.peers.values():
            if peer.broken is None and peer.lost_at is None:
                peer.writer.write(frame)

    async def until(self, ready: Callable[[Peer], bool], what: str) -> None:
        """Wait until everybody is ready, because of what they said.

        Args:
            ready: whether a peer is.
            what: what a peer is waited for to do, for the error.

        Raises:
            WeightsError: a peer broke off.
            DeadlineExceeded: naming the peers that are not ready.
        """

        def late() -> str:
            return " and ".join(f"{peer.name} to {what}" for peer in self.peers.values() if not ready(peer))

        await self._wait(lambda: all(map(ready, self.peers.values())), late)

    async def wait_for(self, awaitable: Awaitable[T], who: str) -> T:
        """Await something else until the transfer's deadline, or until a peer breaks off.

        Raises:
            WeightsError: a peer broke off.
            DeadlineExceeded: naming ``who``.
        """
        future = asyncio.ensure_future(awaitable)
        future.add_done_callback(lambda _: self._notify())
        try:
            await self._wait(future.done, lambda: who)
        except BaseException:
            future.cancel()
            if future.done() and not future.cancelled():
                future.exception()  # a consequence of what is raised
            raise
        return future.result()

    async def cause(self, seconds: float = 1.0) -> None:
        """After something failed that needs everybody: raise what a peer did, if that shows within a moment.

        Raises:
            WeightsError: a peer broke off.
        """
        with suppress(DeadlineExceeded):
            await self._clock.wait_for(self._wait(lambda: False, lambda: ""), seconds, "")

    async def _wait(self, ready: Callable[[], bool], who: Callable[[], str]) -> None:
        while True:
            broken = [f"{peer.name} {peer.broken}" for peer in self.peers.values() if peer.broken is not None]
            if broken:
                raise WeightsError("; ".join(broken))
            if ready():
                return
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await self._clock.wait_for(future, self.remaining(), "a peer")
            except DeadlineExceeded:
                raise self._late(who()) from None
            finally:
                self._waiting.discard(future)

    async def _within(self, awaitable: Awaitable[T], who: str) -> T:
        try:
            return await self._clock.wait_for(awaitable, self.remaining(), who)
        except DeadlineExceeded:
            raise self._late(who) from None

    def remaining(self) -> float:
        """Seconds to the deadline."""
        return max(self._ends - self._clock.time(), 0.0)

    def _late(self, who: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"waited {self._seconds:g} s for {who}, in a weight transfer",
            fix="look at why the peer did not answer, or raise the deadline of the sync",
        )

    def _write(self, peer: Peer, message: Mapping[str, Any]) -> None:
        peer.writer.write(_frame(message))

    async def _listen(self, peer: Peer, reader: asyncio.StreamReader) -> None:
        writer = peer.writer
        try:
            while peer.broken is None:
                message = await _read(reader, _LARGEST_MESSAGE)
                peer.lost_at = None
                peer.said.update(message)
                peer.broken = peer.broken or message.get("broken")
                if self._heard is not None:
                    self._heard(peer, message)
                self._notify()
        except (EOFError, OSError, ValueError) as error:
            if peer.writer is writer:  # else it has come back
                self._lost(peer, f"died or was cut off ({error})")
        self._notify()

    def _lost(self, peer: Peer, why: str) -> None:
        """A connection is gone: nobody needs it any more, or the peer is dead, or it may come back."""
        comes_back = self._patience > 0 and "version" in peer.said
        if peer.said.get("done") and (self._told.get("done") or not comes_back):
            return
        if not comes_back:
            peer.broken = why
            return
        if peer.lost_at is None:
            peer.lost_at = self._clock.time()
        self._keep(asyncio.ensure_future(self._come_back(peer, peer.lost_at, why)))

    async def _come_back(self, peer: Peer, lost_at: float, why: str) -> None:
        """Go back to the sender; or wait for a worker that is gone."""
        ends = lost_at + self._patience
        while (left := ends - self._clock.time()) > 0:
            await self._clock.sleep(left if self._place is None else min(left, _RETRY_SECONDS))
            if peer.lost_at != lost_at or peer.broken is not None:
                return
            if self._place is not None and await self._return(peer, *self._place):
                return
        peer.broken = f"{why}, and did not come back within {self._patience:g} s"
        self._notify()

    async def _return(self, peer: Peer, host: str, port: int, hello: Mapping[str, Any]) -> bool:
        try:
            opening = asyncio.open_connection(host, port)
            reader, writer = await self._clock.wait_for(opening, self._patience, peer.name)
        except (OSError, DeadlineExceeded):
            return False
        peer.writer.transport.abort()
        peer.writer = writer
        self._write(peer, {**hello, "again": True})
        self._write(peer, self._told)
        self._keep(asyncio.ensure_future(self._listen(peer, reader)))
        return True

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the end

    def abandon(self) -> None:
        """Stop listening, where nobody has been admitted."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    async def close(self, broken: str | None = None) -> None:
        """Leave; idempotent.

        Args:
            broken: why this end breaks off, for those who have not heard ``done`` from it.
        """
        if broken is not None:
            self.tell({"broken": broken})
        self.abandon()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        peers, self.peers = list(self.peers.values()), {}
        for peer in peers:
            peer.writer.close()
        for peer in peers:
            try:
                await self._clock.wait_for(peer.writer.wait_closed(), _CLOSING_SECONDS, peer.name)
            except (OSError, DeadlineExceeded):
                peer.writer.transport.abort()


def reason_of(error: BaseException) -> str:
    """What a peer is told of an error that broke a transfer off."""
    text = error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}"
    return f"broke off: {text}"


def _frame(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(dict(message)).encode()
    return _LENGTH.pack(len(text)) + text


async def _read(reader: asyncio.StreamReader, largest: int) -> dict[str, Any]:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > largest:
        raise ValueError(f"a message of {size} bytes")
    message = json.loads(await reader.readexactly(size))
    if not isinstance(message, dict):
        raise ValueError(f"a message that is {message!r}")
    return message
