"""A base checkpoint engine in which one rank sends to every worker, with a transfer session."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs.validators import and_, ge, le

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.errors import WeightsError
from jackfield.sdk.transfer import LEFT, Peer, TransferSession
from jackfield.settings import option

if TYPE_CHECKING:
    import torch

__all__ = ["OneSenderEngine", "SessionSettings"]


@attrs.frozen(kw_only=True)
class SessionSettings:
    """The settings of all checkpoint engines with a transfer session."""

    port: int = option(
        0, help="Port at which the sender listens for workers; 0: any free port.", validator=and_(ge(0), le(65535))
    )


class OneSenderEngine(CheckpointEngine):
    """One end of a transfer in which the trainer's rank 0 sends to all workers.

    Other trainer ranks only exhaust the generator. A subclass moves the tensors. The session detects peers that are
    late, die or fail: ``WeightsError`` with ``weights.transfer`` or ``weights.version``, or ``DeadlineExceeded``.
    """

    config: Any  #: a :class:`SessionSettings`
    session_class: ClassVar[type[TransferSession]] = TransferSession

    def __init__(self, config: Any, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self.session: TransferSession | None = None
        self.connected = False
        self.whole = False  #: whether everything was sent or received

    def begin(self) -> None:
        """Discard the state of the previous transfer."""
        return

    def heard(self, peer: Peer, values: Mapping[str, Any]) -> None:
        """Handle a message of a peer."""
        return

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Listen for workers and return the data with which they connect. Only they get the ``secret`` (in hex)."""
        return {}

    async def met_workers(self, session: TransferSession, workers: int) -> None:
        """Prepare to send, after every worker has joined."""
        return

    async def enter(self, session: TransferSession, place: Mapping[str, Any], version: int) -> None:
        """Connect to the sender as a worker, with :meth:`TransferSession.join`."""
        await session.join(place["session"], place["worker"], version)

    @abstractmethod
    async def send(
        self, session: TransferSession, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """Send every tensor and return the values that are posted to the workers at the end."""

    @abstractmethod
    def receive(self, session: TransferSession) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor."""

    async def close(self) -> None:
        """Release what this end holds in addition to the session, which it has left. Idempotent."""
        return

    async def prepare(self) -> PrepareResult:
        """Listen if this is rank 0, on loopback unless the context names another interface."""
        if self.context.rank != 0:
            return PrepareResult()
        await self.leave()  # an earlier prepare may not have been followed by a transfer
        session, host = self._begin(), self.context.host
        try:
            address = await session.open(host, getattr(self.config, "port", 0))
            return PrepareResult(metadata={"session": address, "host": host, **self.listen(address["secret"])})
        except BaseException:
            await self.leave()
            raise

    def _begin(self) -> TransferSession:
        self.connected = self.whole = False
        self.begin()
        self.session = self.session_class(self.context.deadline_seconds, self.heard)
        return self.session

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Let rank 0 send to every worker."""
        sender, workers = request.trainer_metadata[0], request.rollout_workers
        return Topology(
            trainer=tuple({"workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({**sender, "worker": number, "workers": workers} for number in range(workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Wait for every worker as rank 0, or connect to rank 0 as a worker."""
        place = request.arguments
        if self.context.end == "receiver":
            await self.enter(self._begin(), place, request.version)
        elif self.context.rank == 0:
            session = self._required("the sender was not prepared")
            await session.admit(place["workers"], request.version)
            await self.met_workers(session, place["workers"])
        self.connected = True

    def _required(self, message: str, there: bool = True) -> TransferSession:
        if self.session is None or not there:
            raise WeightsError(message, expected="prepare, connect, then send_weights or receive_weights")
        return self.session

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Send every tensor to all workers and wait until all workers have received them."""
        if self.context.rank != 0:
            for _ in weights:  # gathering a tensor needs every rank
                pass
            return
        session = self._required("the sender is not connected", self.connected)
        try:
            session.tell({**await self.send(session, weights), "done": True})
            await session.until(lambda peer: "done" in peer.said, "take everything")
        except BaseException as error:
            session.break_off(error)
            raise
        self.whole = True

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor, then tell the sender that this worker has received all."""
        session = self._required("the receiver is not connected", self.connected)
        async with aclosing(self.receive(session)) as stream:
            async for item in stream:
                yield item
        self.whole = True
        await session.finish()

    async def leave(self) -> None:
        """Leave the session. A peer that still needs this end is notified."""
        session, self.session = self.session, None
        self.connected = False
        if session is not None:
            await session.close(None if self.whole else LEFT)

    async def finalize(self) -> None:
        """Leave the session and release everything else."""
        try:
            await self.leave()
        finally:
            await self.close()
