"""Transfer weights: every inference worker reads them from the memory of the trainer's rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.sdk.buckets import views
from jackfield.sdk.one_sender import OneSenderEngine
from jackfield.sdk.transfer import Peer, TransferSession
from jackfield_transport_nixl.agents import Agent, devices_of
from jackfield_transport_nixl.config import EngineConfig
from jackfield_transport_nixl.moving import Receiving, Sending, finished


class NIXLCheckpointEngine(OneSenderEngine):
    """One end of the transfer. Rank 0 fills buckets in registered memory; other ranks only exhaust.

    A worker reads a bucket when it has room for it, so the sender notices and names a slow or silent worker.
    """

    config: EngineConfig

    def __init__(self, config: EngineConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._agent: Agent | None = None
        self._sending: Sending | None = None
        self._receiving: Receiving | None = None
        self._buffers: list[torch.Tensor] = []  #: uint8; kept from one transfer to the next

    async def met_workers(self, session: TransferSession, workers: int) -> None:
        """Register buffers for the workers to read."""
        if not workers:
            return
        agent = self._agent = Agent(devices_of(self.config.devices, self.context.host))
        await finished(session, agent.start(), "NIXL to start", f"UCX on {agent.devices or 'all devices'}")
        self._buffers = Sending.slots(self._buffers, self.config.bucket_bytes, self.context.device)
        near = agent.devices == "lo"  # else a network card would have to pin the memory of each tensor
        in_place = near if self.config.in_place is None else self.config.in_place
        self._sending = Sending(session, agent, self._buffers, in_place)
        await self._sending.begin()

    async def enter(self, session: TransferSession, place: Mapping[str, Any], version: int) -> None:
        """Connect to the sender, and prepare to read."""
        agent = self._agent = Agent(devices_of(self.config.devices, place["host"]))
        self._receiving = Receiving(session, agent, self._buffers, self.context.device)
        await super().enter(session, place, version)
        await finished(session, agent.start(), "NIXL to start", f"UCX on {agent.devices or 'all devices'}")
        await self._receiving.begin()

    def heard(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Handle the announcement of a bucket."""
        if self._receiving is not None:
            self._receiving.heard(message)

    async def send(
        self, session: TransferSession, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """Fill buckets as workers have read them."""
        sending = self._sending
        for name, tensor in weights:
            if sending is not None:
                await sending.add(name, tensor)
        if sending is None:
            return {"pieces": 0}
        await sending.end()
        return {"pieces": sending.made}

    async def receive(self, session: TransferSession) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors out of one buffer while the next one is filled."""
        receiving = self._receiving
        assert receiving is not None, "it is connected"
        while True:
            await receiving.ready()
            if not receiving.arrived:
                return
            arrived = receiving.arrived.popleft()
            for item in views(arrived.content, arrived.entries):
                yield item
            receiving.read(arrived)

    async def close(self) -> None:
        """Close the agent."""
        agent, self._agent = self._agent, None
        self._sending = self._receiving = None
        if agent is not None:
            await asyncio.to_thread(agent.close)
