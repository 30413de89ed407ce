"""The life of a checkpoint engine in which one rank sends to every worker, and all meet: what is equal in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

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
from jackfield.settings import option
from jackfield.weights.meeting import Meeting, Peer, reason_of

if TYPE_CHECKING:
    import torch

__all__ = ["LEFT", "MeetingConfig", "OneSenderEngine"]

LEFT = "left before everything was taken"


@attrs.frozen(kw_only=True)
class MeetingConfig:
    """Settings of every such engine."""

    port: int = option(
        0, help="Where the sender listens for workers; 0: any port that is free.", validator=and_(ge(0), le(65535))
    )


class OneSenderEngine(CheckpointEngine):
    """One end. The trainer's rank 0 sends to all workers; its other ranks only exhaust.

    A subclass says how tensors go. Who is late, died or broke off is noticed by the meeting.
    """

    config: Any  #: a :class:`MeetingConfig`

    def __init__(self, config: Any, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self.meeting: Meeting | None = None
        self.connected = False
        self.whole = False  #: everything was sent, or taken

    # -- what a subclass says --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the transfer before."""
        return

    def heard(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Something that a peer says, as it comes."""
        return

    def make_meeting(self, place: Mapping[str, Any] | None) -> Meeting:
        """A meeting, of the sender (None) or for a worker's place."""
        return Meeting(self.context.deadline_seconds, self.heard)

    def listen(self, address: Mapping[str, Any]) -> Mapping[str, Any]:
        """Listen beside the meeting (the sender's side); what workers have to know beside its ``address``."""
        return {}

    async def met_workers(self, meeting: Meeting, workers: int) -> None:
        """All workers have come."""
        return

    async def enter(self, meeting: Meeting, place: Mapping[str, Any], version: int) -> None:
        """Come to the sender, as a worker; by :meth:`Meeting.enter`."""
        await meeting.enter(place["host"], place["port"], place["secret"], place["worker"], version)

    @abstractmethod
    async def send(
        self, meeting: Meeting, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """Send every tensor; what is said to workers with the end."""

    @abstractmethod
    def receive(self, meeting: Meeting) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor."""

    async def close(self) -> None:
        """Release what this end took beside the meeting, which it has left; idempotent."""
        return

    # -- the life --------------------------------------------------------------------------------------------------

    def prepare(self) -> PrepareResult:
        """Rank 0 listens, on loopback unless the context names another interface.

        Raises:
            WeightsError: a port is taken.
        """
        if self.context.rank != 0:
            return PrepareResult()
        if self.meeting is not None:  # prepared before, and met nobody
            self.meeting.abandon()
            self.meeting = None
        self._begin()
        meeting = self.make_meeting(None)
        address = meeting.open(self.context.host, self.config.port)
        try:
            more = self.listen(address)
        except BaseException:
            meeting.abandon()
            raise
        self.meeting = meeting
        return PrepareResult(metadata={**address, **more})

    def _begin(self) -> None:
        self.connected = self.whole = False
        self.begin()

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Rank 0 sends to every worker."""
        sender, workers = request.trainer_metadata[0], request.rollout_workers
        return Topology(
            trainer=tuple({"workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({**sender, "worker": number, "workers": workers} for number in range(workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Rank 0 waits for every worker; a worker comes to rank 0.

        Raises:
            WeightsError: ``weights.transfer`` where they cannot; ``weights.version`` for weights of another version.
            DeadlineExceeded: naming who has not come.
        """
        place = request.arguments
        if self.context.end == "receiver":
            self._begin()
            self.meeting = meeting = self.make_meeting(place)
            await self.enter(meeting, place, request.version)
        elif self.context.rank == 0:
            if self.meeting is None:
                raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
            await self.meeting.admit(place["workers"], request.version)
            await self.met_workers(self.meeting, place["workers"])
        self.connected = True

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Every tensor to all workers; then wait until all have taken all.

        Raises:
            WeightsError: ``weights.transfer`` when a worker breaks off.
            DeadlineExceeded: naming the workers that are late.
        """
        if self.context.rank != 0:
            for _ in weights:  # gathering a tensor needs every rank
                pass
            return
        meeting = self.meeting
        if meeting is None or not self.connected:
            raise WeightsError("the sender is not connected", expected="prepare, connect, send_weights")
        try:
            words = await self.send(meeting, weights)
            meeting.tell({**words, "done": True})
            await meeting.until(lambda peer: "done" in peer.said, "take everything")
        except BaseException as error:
            meeting.tell({"broken": reason_of(error)})
            raise
        self.whole = True

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor.

        Raises:
            WeightsError: ``weights.transfer`` when the sender, or with it a worker, breaks off.
            DeadlineExceeded: naming the sender.
        """
        meeting = self.meeting
        if meeting is None or not self.connected:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        async with aclosing(self.receive(meeting)) as stream:
            async for item in stream:
                yield item
        self.whole = True
        meeting.tell({"done": True})

    async def finalize(self) -> None:
        """Leave; whoever still needs this end is told so."""
        meeting, self.meeting = self.meeting, None
        self.connected = False
        if meeting is not None:
            await meeting.close(None if self.whole else LEFT)
        await self.close()
