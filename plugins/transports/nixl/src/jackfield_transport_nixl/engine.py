"""Weights from the trainer's rank 0 to every inference worker, each of which reads them out of its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import torch

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.errors import WeightsError
from jackfield.weights.buckets import views
from jackfield.weights.meeting import Meeting, Peer, reason_of
from jackfield_transport_nixl.agents import Agent, devices_of
from jackfield_transport_nixl.config import EngineConfig
from jackfield_transport_nixl.moving import Receiving, Sending, finished

__all__ = ["NIXLCheckpointEngine"]


class NIXLCheckpointEngine(CheckpointEngine):
    """One end. The trainer's rank 0 fills buckets in registered memory, and says so; its other ranks only exhaust.

    A worker reads a bucket when it has room for it, so who is slow or silent is noticed and named by the sender.
    """

    config: EngineConfig

    def __init__(self, config: EngineConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._meeting: Meeting | None = None
        self._agent: Agent | None = None
        self._sending: Sending | None = None
        self._receiving: Receiving | None = None
        self._buffers: list[torch.Tensor] = []  #: uint8; kept from one transfer to the next
        self._connected = False
        self._whole = False  #: everything was sent, or taken

    # -- before the transfer

    def prepare(self) -> PrepareResult:
        """Rank 0 listens, on loopback unless the context names another interface.

        Raises:
            WeightsError: the port is taken.
        """
        if self.context.rank != 0:
            return PrepareResult()
        if self._meeting is not None:  # prepared before, and met nobody
            self._meeting.abandon()
        self._whole = self._connected = False
        self._meeting = Meeting(self.context.deadline_seconds)
        return PrepareResult(metadata=self._meeting.open(self.context.host, self.config.port))

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Rank 0 sends to every worker."""
        sender, workers = request.trainer_metadata[0], request.rollout_workers
        return Topology(
            trainer=tuple({"workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({**sender, "worker": number} for number in range(workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Rank 0 waits for every worker; a worker comes to rank 0.

        Raises:
            WeightsError: ``weights.transfer`` where they cannot; ``weights.version`` for weights of another version.
            DeadlineExceeded: naming who has not come.
        """
        if self.context.side == "rollout":
            await self._enter(request)
        elif self.context.rank == 0:
            await self._admit(request)

    async def _admit(self, request: ConnectRequest) -> None:
        meeting, workers = self._meeting, request.arguments["workers"]
        if meeting is None:
            raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
        await meeting.admit(workers, request.version)
        if workers:
            agent = self._agent = Agent(devices_of(self.config.devices, self.context.host))
            await finished(meeting, agent.start(), "NIXL to start", f"UCX on {agent.devices or 'all devices'}")
            self._buffers = Sending.slots(self._buffers, self.config.bucket_bytes, self.context.device)
            self._sending = Sending(meeting, agent, self._buffers, self._in_place(agent))
            await self._sending.begin()
        self._connected = True

    async def _enter(self, request: ConnectRequest) -> None:
        place = request.arguments
        self._whole = False
        meeting = self._meeting = Meeting(self.context.deadline_seconds, self._heard)
        agent = self._agent = Agent(devices_of(self.config.devices, place["host"]))
        self._receiving = Receiving(meeting, agent, self._buffers, self.context.device)
        await meeting.enter(place["host"], place["port"], place["secret"], place["worker"], request.version)
        await finished(meeting, agent.start(), "NIXL to start", f"UCX on {agent.devices or 'all devices'}")
        await self._receiving.begin()

    def _in_place(self, agent: Agent) -> bool:
        """Within a host: a network card would have to pin the memory of each tensor."""
        return agent.devices == "lo" if self.config.in_place is None else self.config.in_place

    def _heard(self, _: Peer, message: Mapping[str, Any]) -> None:
        if self._receiving is not None:
            self._receiving.heard(message)

    # -- the transfer

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
        meeting, sending = self._meeting, self._sending
        if meeting is None or not self._connected:
            raise WeightsError("the sender is not connected", expected="prepare, connect, send_weights")
        try:
            for name, tensor in weights:
                if sending is not None:
                    await sending.add(name, tensor)
            if sending is not None:
                await sending.end()
            self._whole = True
            meeting.tell({"done": True, "pieces": 0 if sending is None else sending.made})
            await meeting.until(lambda peer: "done" in peer.said, "take everything")
        except BaseException as error:
            meeting.tell({"broken": reason_of(error)})
            raise

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors out of one buffer while the next one is filled.

        Raises:
            WeightsError: ``weights.transfer`` when the sender breaks off.
            DeadlineExceeded: naming the sender.
        """
        meeting, receiving = self._meeting, self._receiving
        if meeting is None or receiving is None:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        sender = meeting.peers[0]
        while True:
            while not receiving.arrived and sender.said.get("pieces") != receiving.pieces:
                await receiving.more()
            await meeting.until(lambda _: True, "")  # a sender that broke off is believed no more
            if not receiving.arrived:
                break
            arrived = receiving.arrived.popleft()
            for item in views(arrived.content, arrived.entries):
                yield item
            receiving.read(arrived)
        self._whole = True
        meeting.tell({"done": True})

    async def finalize(self) -> None:
        """Leave; whoever still needs this end is told so."""
        meeting, self._meeting = self._meeting, None
        agent, self._agent = self._agent, None
        self._sending = self._receiving = None
        self._connected = False
        if meeting is not None:
            await meeting.close(None if self._whole else "left before everything was taken")
        if agent is not None:
            await asyncio.to_thread(agent.close)
