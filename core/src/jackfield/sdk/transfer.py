"""Transfer sessions: the control messages between the ends of a weight transfer.

The sender serves :data:`TRANSFER` and each worker connects to it. Both then post named plain values to each other;
tensors are sent separately. The last value of each name is kept, and waits are conditions on the posted values.
The session interprets two names: ``broken``, a reason, and ``done``, after which a peer may leave. A peer that dies,
leaves or fails ends every wait at once, and a wait that reaches the deadline names the late peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import attrs
import msgspec

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RpcError, WeightsError
from jackfield.rpc import Address, Connection, Contract, Server, Service, caller, connect, stub

__all__ = ["LEFT", "TRANSFER", "Peer", "TransferSession", "reason_of"]

T = TypeVar("T")

_SENDER_FIRST = 1.0  #: seconds by which the deadline of the sender, which knows the late peers, precedes the workers'
LEFT = "left before everything was taken"  #: reason of an end that leaves before it has finished
_BROKE = "broke off: "


def reason_of(error: BaseException) -> str:
    """Return a description, for the peers, of the error that ends the transfer at this end."""
    return _BROKE + (error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}")


@attrs.define(eq=False)
class Peer:
    """The other end of a connection."""

    name: str  #: ``worker 2``, or ``the sender``
    number: int
    connection: Connection
    said: dict[str, Any] = attrs.field(factory=dict)  #: the last value of each name that it has posted
    broken: str | None = None  #: why it will not post again


@attrs.define(eq=False, slots=False)
class TransferSession:
    """One end of the control connection of a transfer.

    Raises (all waits): ``WeightsError`` with ``weights.transfer`` if a peer fails or leaves; ``DeadlineExceeded``,
    which names the late peers.
    """

    _seconds: float  #: deadline of the whole transfer, counted from :meth:`admit` or, on workers, :meth:`join`
    #: called with each message of a peer until the session is closed
    _heard: Callable[[Peer, Mapping[str, Any]], None] = lambda *_: None

    def __attrs_post_init__(self) -> None:
        self.peers: dict[int, Peer] = {}
        self._clock, self._loop = Clock(), asyncio.get_running_loop()  # tests may use a virtual loop time
        self._ends = 0.0  #: deadline in loop time
        self._expected = self._version = -1  #: unknown before :meth:`admit`
        self._server: Server | None = None
        self._why: str | None = None  #: why this end ended the transfer
        self._changed = asyncio.Event()
        self._services = {"transfer": Service(target=self, contract=TRANSFER)}

    async def open(self, host: str, port: int = 0) -> dict[str, Any]:
        """Listen as the sender and return the address for :meth:`join` as plain values.

        Raises:
            WeightsError: ``weights.transfer`` if the port is in use, or the host is not an address of this machine.
        """
        server = Server("the sender", self._services, self._clock, self._seconds + _SENDER_FIRST)
        try:
            address = await server.listen(host, port)
        except RpcError as error:
            raise WeightsError(error.message, where=error.where, fix=error.fix) from error
        self._server = server
        return attrs.asdict(address)

    async def admit(self, workers: int, version: int) -> None:
        """Wait as the sender until every worker has joined for this version."""
        self._ends = self._loop.time() + self._seconds
        self._expected, self._version = workers, version
        self.notify()

        names = {number: f"worker {number} to connect" for number in range(workers)}
        await self._wait(lambda: [name for number, name in names.items() if number not in self.peers])

    async def enter(self, worker: int, version: int) -> int:
        """Admit the calling worker and return the version that is sent (called by workers over RPC)."""
        return await self._enter(worker, version, caller())

    async def _enter(self, worker: int, version: int, connection: Connection) -> int:
        while self._version < 0:
            await self._changed.wait()  # until the caller's deadline, or the end of the session
        if not 0 <= worker < self._expected or worker in self.peers:
            raise WeightsError(f"worker {worker} has no place in this transfer", where="the sender")
        peer = self._new_peer(f"worker {worker}", worker, connection)
        if version != self._version:
            peer.broken = f"expects weights of version {version}, these are of version {self._version}"
        return self._version

    async def join(self, address: Mapping[str, Any], worker: int, version: int) -> None:
        """Connect to the sender as a worker. Raise ``weights.version`` if it sends another version."""
        self._ends = self._loop.time() + self._seconds
        try:
            found = await self._entered(address, worker, version)
        except RpcError as error:
            details = {name: getattr(error, name) for name in ("where", "expected", "found", "fix")}
            raise WeightsError(f"the sender cannot be reached: {error.message}", **details) from error
        except DeadlineExceeded:
            raise self._late("the sender to welcome this worker") from None
        if found != version:
            message = "weights of another version came"
            raise WeightsError(message, code="weights.version", expected=version, found=found)
        self._ends = self._loop.time() + self._seconds + _SENDER_FIRST

    async def _entered(self, address: Mapping[str, Any], worker: int, version: int) -> int:
        place, contracts = msgspec.convert(address, Address), {"transfer": TRANSFER}
        connection = await connect(place, f"worker {worker}", self._clock, contracts, self._services)
        self._new_peer("the sender", 0, connection)  # it may post before its reply is read
        remote = stub(connection, "transfer", TRANSFER, TransferSession, self.remaining())
        return await remote.enter(worker, version)

    def _new_peer(self, name: str, number: int, connection: Connection) -> Peer:
        peer = self.peers[number] = Peer(name, number, connection)
        connection.lost.add_done_callback(lambda done: self._gone(peer, done.result()))
        self.notify()
        return peer

    def _gone(self, peer: Peer, reason: str) -> None:
        """Record that a connection has ended: the peer finished, failed or died."""
        if peer.broken is None and "done" not in peer.said:
            said = reason.startswith((_BROKE, LEFT))
            peer.broken = reason if said else f"died or was cut off: it {reason}"
        self.notify()

    async def post(self, values: dict[str, Any]) -> None:
        """Record values of the calling peer. Both ends call it over RPC."""
        self._take(values, caller())

    def _take(self, values: Mapping[str, Any], connection: Connection) -> None:
        peer = next((each for each in self.peers.values() if each.connection is connection), None)
        if peer is None:
            raise WeightsError("a worker posted before it entered the transfer")
        peer.said.update(values)
        peer.broken = peer.broken or values.get("broken")
        self._heard(peer, values)
        self.notify()

    def tell(self, values: Mapping[str, Any]) -> None:
        """Post values to every connected peer."""
        for peer in self.peers.values():
            peer.connection.notify("transfer.post", TRANSFER, dict(values))

    async def finish(self) -> None:
        """Tell the sender that this worker has everything and wait for its confirmation."""
        calling = self.peers[0].connection.call("transfer.post", [{"done": True}], self.remaining(), None, "finish")
        with suppress(RpcError):  # the sender has ended
            await self.wait_for(calling, "the sender to end the transfer")

    def break_off(self, error: BaseException) -> None:
        """Tell every peer why this end ends the transfer."""
        self._why = reason_of(error)
        self.tell({"broken": self._why})

    async def until(self, ready: Callable[[Peer], bool], what: str) -> None:
        """Wait until ``ready`` holds for every peer; ``what`` describes the awaited action in errors."""
        await self._wait(lambda: [f"{peer.name} to {what}" for peer in self.peers.values() if not ready(peer)])

    async def wait_for(self, awaitable: Awaitable[T], who: str) -> T:
        """Await ``awaitable`` until the deadline or a peer's failure; errors name ``who`` as late."""
        future = asyncio.ensure_future(awaitable)
        future.add_done_callback(lambda _: self.notify())
        try:
            await self._wait(lambda: [who] * (not future.done()))
        except BaseException:
            future.cancel()
            if future.done() and not future.cancelled():
                future.exception()  # it is a consequence of the raised error
            raise
        return future.result()

    async def cause(self, seconds: float = 1.0) -> None:
        """Raise a peer's failure that is reported within ``seconds``, after a collective operation failed."""
        with suppress(DeadlineExceeded):
            await self._clock.wait_for(self._wait(lambda: ["a peer"]), seconds, "")

    async def _wait(self, late: Callable[[], list[str]]) -> None:
        """Wait until ``late`` returns no peers."""
        while True:
            broken = [f"{peer.name} {peer.broken}" for peer in self.peers.values() if peer.broken is not None]
            if broken:
                raise WeightsError("; ".join(broken))
            if not late():
                return
            try:
                await self._clock.wait_for(self._changed.wait(), self.remaining(), "a peer")
            except DeadlineExceeded:
                raise self._late(" and ".join(late())) from None

    def remaining(self) -> float:
        """Return the seconds until the deadline."""
        return max(self._ends - self._loop.time(), 0.0)

    def _late(self, who: str) -> DeadlineExceeded:
        fix = "look at why the peer did not answer, or raise the deadline of the sync"
        return DeadlineExceeded(f"waited {self._seconds:g} s for {who}, in a weight transfer", fix=fix)

    def notify(self) -> None:
        """Evaluate the conditions of all waits again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def close(self, broken: str | None = None) -> None:
        """Leave the session. Idempotent. ``broken`` is why this end fails; None: it has finished."""
        peers, self.peers = list(self.peers.values()), {}
        for peer in peers:
            await peer.connection.close(self._why or broken or "")
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        self._heard = lambda *_: None  # do not keep the engine's memory alive


TRANSFER = Contract(TransferSession, ["enter", "post"])
