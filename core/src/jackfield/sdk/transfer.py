"""A base checkpoint engine in which one rank sends buckets of tensors to every worker.

Each worker connects to the sender: this is the transfer session. Both ends then post named plain values, and waits are
conditions on the last values. Three names have a meaning for every engine: ``broken``, a reason; ``got``, the number of
buckets that a worker has received; ``done``, after which a peer may leave. A peer that dies, leaves or fails ends every
wait at once; a wait that reaches the deadline names the late peers.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs
import msgspec
from attrs.validators import and_, ge, le

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.clock import Clock, too_late
from jackfield.errors import DeadlineExceeded, JackfieldError, RpcError, WeightsError
from jackfield.sdk.buckets import Bucket, Entry, Layout, Packer, kept_buffer
from jackfield.sdk.rpc import Address, Connection, Contract, Server, Service, caller, connect
from jackfield.settings import option

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_SENDER_FIRST = 1.0  #: seconds by which the deadline of the sender, which knows the late peers, precedes the workers'
_LEFT = "left before everything was taken"  #: reason of an end that leaves before it has finished
_BROKE = "broke off: "


@attrs.frozen(kw_only=True)
class SessionSettings:
    """The settings of all checkpoint engines with a transfer session."""

    port: int = option(0, "Port at which the sender listens for workers; 0: any free port.", and_(ge(0), le(65535)))


@attrs.define(eq=False)
class Peer:
    """The other end of a connection."""

    name: str  #: ``worker 2``, or ``the sender``
    connection: Connection
    said: dict[str, Any] = attrs.field(factory=dict)  #: the last value of each name that it has posted
    got: int = 0  #: buckets that it has received
    broken: str | None = None  #: why it will not post again


class OneSenderEngine(CheckpointEngine):
    """One end of a transfer in which the trainer's rank 0 sends to all workers; other ranks exhaust the generator.

    Small tensors are packed into buckets; a subclass moves buckets and large tensors. All waits raise ``WeightsError``
    (``weights.transfer``) if a peer dies or fails, and ``DeadlineExceeded``, which names the late peers.
    """

    config: Any  #: a :class:`SessionSettings`
    slots: ClassVar[int] = 2  #: buckets of the sender: one is filled while others are on their way
    retains: ClassVar[bool] = False  #: whether weights are kept for workers that join later, without a session
    device = "cpu"  #: of the buffers

    def __init__(self, config: Any, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self.buffers: list[torch.Tensor] = []  #: uint8 ``[bytes]``; kept from one transfer to the next
        self.layout = Layout()  #: likewise
        self._clock, self._changed, self._ends = Clock(), asyncio.Event(), 0.0  #: the deadline is in loop time
        self._services: dict[str, Service] = {}
        self._server: Server | None = None
        self.peers: dict[int, Peer] = {}
        self._reset()

    def _reset(self) -> None:
        self.connected = self.whole = False  #: whole: everything was sent or received
        self.made = self._filled = 0  #: buckets that were sent; buffers that were given out
        self.arrived: deque[Bucket] = deque()  #: buckets that this worker has not read
        self._expected = self.version = -1  #: unknown before this end is connected
        self._why: str | None = None  #: why this end ended the transfer
        self._packer = Packer()  #: of the bucket that is filled
        self._free_at = [0] * self.slots  #: by slot: the number of received buckets with which it is free
        self.lent = 0  #: buckets up to the last one in the memory of the last tensor; 0: that tensor was copied

    def heard(self, peer: Peer, values: Mapping[str, Any]) -> None:
        """Handle values that a peer has posted."""

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Listen for workers and return the data with which they connect. Only they get the ``secret`` (in hex)."""
        return {}

    async def meet_workers(self, workers: int) -> None:
        """Prepare to send, after every worker has joined."""

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Prepare to receive, after this worker has joined. ``place`` is its part of the topology."""

    @abstractmethod
    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Send a bucket, uint8 ``[bytes]``, and count it in :attr:`made`. Its memory stays until it is taken."""

    async def send_alone(self, name: str, tensor: torch.Tensor) -> bool:
        """Send a large tensor after :meth:`flush`; set :attr:`lent` if it was not copied. False: it is not large."""
        return False

    async def room(self, size: int) -> torch.Tensor:
        """Return the buffer for the next bucket, uint8, with room for ``size`` bytes, once it is free."""
        await asyncio.sleep(0)  # to hear of workers
        slot = self._filled % self.slots
        self._free_at[slot - 1] = self.made
        self._filled += 1
        await self.taken(self._free_at[slot])
        return kept_buffer(self.buffers, slot, self.config.bucket_bytes, self.device)

    def announce(self, entries: Sequence[Entry], place: Any) -> None:
        """Count a bucket, and tell the workers of it, to whom it arrives with its ``place``."""
        self.made += 1
        self.tell({"bucket": [self.made, self.layout.announced(entries), place]})

    async def content(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of an arrived bucket, uint8 ``[bytes]``, once they are complete."""
        content: torch.Tensor = bucket.place
        return content

    def was_read(self, bucket: Bucket) -> None:
        """Tell the sender that this worker has read a bucket, whose memory may be reused."""
        self.tell({"got": bucket.number})

    async def complete(self) -> None:
        """Tell the workers that everything was sent and taken."""
        self.tell({"done": True, "layout": self.layout.end()})

    async def close(self) -> None:
        """Release what this end holds; what the next transfer can use may stay if this one was :attr:`whole`."""

    async def prepare(self) -> PrepareResult:
        """Listen if this is rank 0, on loopback unless the context names another interface."""
        if self.context.rank != 0:
            return PrepareResult()
        await self._begin()
        try:
            address = await self._serve()
            further = self.listen(address["secret"])
        except BaseException:
            await self.finalize()
            raise
        return PrepareResult(metadata={"session": address, "host": self.context.host, **further})

    async def _begin(self) -> None:
        await self.finalize()  # an earlier prepare may not have been followed by a transfer
        self._services = {"transfer": Service(target=self, contract=TRANSFER)}
        self.notify()  # the last transfer may have been on another loop

    async def _serve(self) -> dict[str, Any]:
        server = Server("the sender", self._services, self._clock, self.context.deadline_seconds + _SENDER_FIRST)
        try:
            address = await server.listen(self.context.host, self.config.port)
        except RpcError as error:
            raise WeightsError(error.message, where=error.where, fix=error.fix) from error
        self._server = server
        return attrs.asdict(address)

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Let rank 0 send to every worker."""
        sender, workers = request.trainer_metadata[0], request.rollout_workers
        return Topology(
            trainer=tuple({"workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({**sender, "worker": number, "workers": workers} for number in range(workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Wait for every worker as rank 0, or connect to rank 0 as a worker; ``weights.version`` if versions differ."""
        place, version = request.arguments, request.version
        if self.context.end == "receiver":
            await self._begin()
            self.version = version
            if "worker" in place:  # otherwise it joins later
                await self._join(place, version)
            await self.meet_sender(place)
        elif self.context.rank == 0:
            self._require(bool(self._services), "the sender was not prepared")
            self._expected, self.version = place["workers"], version
            self._start_clock()
            self.notify()
            numbers = range(place["workers"])
            await self._wait(lambda: [f"worker {number} to connect" for number in numbers if number not in self.peers])
            await self.until(lambda peer: "layout" in peer.said, "say which tensors it knows")
            self.layout.begin(all(peer.said["layout"] == self.layout.name for peer in self.peers.values()))
            await self.meet_workers(place["workers"])
        self.connected = True

    async def enter(self, worker: int, version: int) -> int:
        """Admit the calling worker and return the version that is sent (called by workers over RPC)."""
        return await self._enter(worker, version, caller())

    async def _enter(self, worker: int, version: int, connection: Connection) -> int:
        while self.version < 0:
            await self._changed.wait()  # until the caller's deadline, or the end of the session
        if not 0 <= worker < self._expected or worker in self.peers:
            raise WeightsError(f"worker {worker} has no place in this transfer", where="the sender")
        peer = self._add_peer(f"worker {worker}", connection, worker)
        if version != self.version:
            peer.broken = f"expects weights of version {version}, these are of version {self.version}"
        return self.version

    async def _join(self, place: Mapping[str, Any], version: int) -> None:
        self._start_clock()
        self.layout.begin(shared=True)
        try:
            connection = await self._dial(place["session"], place["worker"])
            self._add_peer("the sender", connection)  # it may post before its reply is read
            asked, seconds = [place["worker"], version], self.remaining()
            found = await connection.call("transfer.enter", asked, seconds, int, "welcome this worker")
        except RpcError as error:
            details = {name: getattr(error, name) for name in ("where", "expected", "found", "fix")}
            raise WeightsError(f"the sender cannot be reached: {error.message}", **details) from error
        if found != version:
            raise WeightsError("weights of another version came", code="weights.version", expected=version, found=found)
        self.tell({"layout": self.layout.name})
        self._start_clock(_SENDER_FIRST)

    async def _dial(self, address: Mapping[str, Any], worker: int) -> Connection:
        place, contracts = msgspec.convert(address, Address), {"transfer": TRANSFER}
        return await connect(place, f"worker {worker}", self._clock, contracts, self._services)

    def _add_peer(self, name: str, connection: Connection, number: int = 0) -> Peer:
        peer = self.peers[number] = Peer(name, connection)

        def gone(lost: asyncio.Future[str]) -> None:
            if peer.broken is None and "done" not in peer.said:
                reason = lost.result()
                peer.broken = reason if reason.startswith((_BROKE, _LEFT)) else f"died or was cut off: it {reason}"
            self.notify()

        connection.lost.add_done_callback(gone)
        self.notify()
        return peer

    async def post(self, values: dict[str, Any]) -> None:
        """Record values of the calling peer. Both ends call it over RPC."""
        self._take(values, caller())

    def _take(self, values: Mapping[str, Any], connection: Connection) -> None:
        peer = next((each for each in self.peers.values() if each.connection is connection), None)
        if peer is None:
            raise WeightsError("a worker posted before it entered the transfer")
        peer.said.update(values)
        peer.got, peer.broken = values.get("got", peer.got), peer.broken or values.get("broken")
        if "bucket" in values:
            number, told, place = values["bucket"]
            self.arrived.append(Bucket(number, self.layout.learned(told), place))
        self.heard(peer, values)
        self.notify()

    def tell(self, values: Mapping[str, Any]) -> None:
        """Post values to every connected peer."""
        for peer in self.peers.values():
            peer.connection.notify("transfer.post", TRANSFER, dict(values))

    async def until(self, ready: Callable[[Peer], bool], what: str) -> None:
        """Wait until ``ready`` holds for every peer; ``what`` describes the awaited action in errors."""
        await self._wait(lambda: [f"{peer.name} to {what}" for peer in self.peers.values() if not ready(peer)])

    async def taken(self, count: int) -> None:
        """Wait until every worker has received ``count`` buckets."""
        await self.until(lambda peer: peer.got >= count, f"take bucket {count - 1}")

    async def finished(self, work: Future[_T], who: str) -> _T:
        """Wait for a library's work in a thread; its ``OSError`` or ``RuntimeError`` is a broken transfer."""
        done = asyncio.wrap_future(work)
        done.add_done_callback(lambda _: self.notify())
        await self._wait(lambda: [who] * (not done.done()))
        try:
            return done.result()
        except (OSError, RuntimeError) as error:
            with suppress(DeadlineExceeded):
                await self._clock.wait_for(self._wait(lambda: ["a peer"]), 1.0, "the cause")  # that a peer reports
            raise WeightsError(f"the transfer broke off: {error}") from error

    async def _wait(self, late: Callable[[], list[str]]) -> None:
        while True:
            if broken := [f"{peer.name} {peer.broken}" for peer in self.peers.values() if peer.broken is not None]:
                raise WeightsError("; ".join(broken))
            if not late():
                return
            try:
                await self._clock.wait_for(self._changed.wait(), self.remaining(), "a peer")
            except DeadlineExceeded:
                if who := late():  # otherwise the last one answered at the deadline
                    what = f"{' and '.join(who)}, in a weight transfer"
                    raise too_late(self.context.deadline_seconds, what) from None

    def remaining(self) -> float:
        """Return the seconds until the deadline."""
        return max(self._ends - asyncio.get_running_loop().time(), 0.0)

    def _start_clock(self, later: float = 0.0) -> None:
        self._ends = asyncio.get_running_loop().time() + self.context.deadline_seconds + later

    def notify(self) -> None:
        """Evaluate the conditions of all waits again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _require(self, ready: bool, what: str) -> None:
        if not ready:
            raise WeightsError(what, expected="prepare, connect, then send_weights or receive_weights")

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Send every tensor to all workers and wait until all workers have received them."""
        if self.context.rank != 0:
            deque(weights, maxlen=0)  # gathering a tensor needs every rank
            return
        self._require(self.connected, "the sender is not connected")
        try:
            for name, tensor in weights:
                wanted = self.peers or self.retains
                if wanted and (self.lent or not self._packer.add_small(name, tensor, self.config.bucket_bytes)):
                    before, self.lent = self.lent, 0
                    await self._add(name, tensor)
                    await self.taken(before)
            await self.flush()
            await self.taken(self.made)
            await self.complete()
            await self.until(lambda peer: "done" in peer.said, "take everything")
        except BaseException as error:
            if not self.whole:
                what = error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}"
                self._why = _BROKE + what
                self.tell({"broken": self._why})
            raise
        self.whole = True

    async def _add(self, name: str, tensor: torch.Tensor) -> None:
        if await self.send_alone(name, tensor):
            return
        if self._packer.size + tensor.nbytes > self.config.bucket_bytes:
            await self.flush()
        if not self._packer.entries:
            self._packer.buffer = await self.room(tensor.nbytes)
        self._packer.add(name, tensor)

    async def flush(self) -> None:
        """Send the bucket that is filled."""
        packer, self._packer = self._packer, Packer()
        if packer.buffer is not None:
            await self.launch(packer.buffer[: packer.size], packer.entries)

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor, then tell the sender that this worker has received all."""
        self._require(self.connected, "the receiver is not connected")
        while True:
            await self.until(lambda peer: bool(self.arrived) or "done" in peer.said, "send")
            if not self.arrived:
                break
            bucket = self.arrived.popleft()
            for item in bucket.tensors(await self.content(bucket), self.buffers):
                yield item
            self.was_read(bucket)
        await self.acknowledge()

    async def acknowledge(self) -> None:
        """Tell the sender that this worker has received everything."""
        self.whole = True
        for peer in list(self.peers.values()):
            self.layout.end(peer.said.get("layout", ""))
            with suppress(RpcError):  # the sender has ended
                await peer.connection.call("transfer.post", [{"done": True}], self.remaining(), None, "finish")
        await self.until(lambda _: True, "finish")

    async def finalize(self) -> None:
        """Leave the session, where a peer that still needs this end is notified, and release it. Idempotent."""
        if not self._services:
            return
        peers, self.peers = list(self.peers.values()), {}
        server, self._server, self.connected = self._server, None, False
        try:
            for peer in peers:
                await peer.connection.close(self._why or ("" if self.whole else _LEFT))
            if server is not None:
                await server.close()
        finally:
            await self.close()
            self._services.clear()  # connections that are not collected yet do not keep this end's memory
            self._reset()


TRANSFER = Contract(OneSenderEngine, ["enter", "post"])
