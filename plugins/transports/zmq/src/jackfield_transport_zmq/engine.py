"""Send weights in chunks by ZeroMQ from the trainer's rank 0 to every inference worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import torch
import zmq

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import views
from jackfield.sdk.one_sender import OneSenderEngine
from jackfield.sdk.rpc import is_loopback
from jackfield.sdk.transfer import Peer, TransferSession
from jackfield_transport_zmq.config import EngineConfig
from jackfield_transport_zmq.sending import Receiving, Sending
from jackfield_transport_zmq.sockets import Keys


class ZMQCheckpointEngine(OneSenderEngine):
    """One end of the transfer. Rank 0 sends each worker what it has room for; other ranks only exhaust."""

    config: EngineConfig

    def __init__(self, config: EngineConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._sending: Sending | None = None
        self._receiving: Receiving | None = None
        self._buffers: list[torch.Tensor] = []  #: uint8; kept from one transfer to the next

    def begin(self) -> None:
        """Begin a transfer; a sender that was prepared before, and met no worker, stops listening there."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.close()

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Listen for connections that fetch chunks; ``WeightsError`` if the port is taken."""
        config, host = self.config, self.context.host
        near = is_loopback(host)
        encrypted = not near if config.encrypted is None else config.encrypted
        tcp = encrypted or config.transport == "tcp" or (config.transport == "auto" and not near)
        keys = Keys.make() if encrypted else None
        try:
            self._sending = Sending(host, keys, tcp, config.data_port, secret, config.bucket_bytes)
        except zmq.ZMQError as error:
            raise WeightsError(
                f"cannot listen for inference workers: {error}",
                where=f"{host}:{config.data_port}",
                fix="choose another data_port, or 0 for any that is free",
            ) from error
        known = None if keys is None else keys.of_clients()
        return {"data": self._sending.address, "keys": known}

    async def met_workers(self, session: TransferSession, workers: int) -> None:
        """Start to handle workers' requests."""
        assert self._sending is not None, "it was prepared"
        self._sending.begin(session, self._buffers)

    async def enter(self, session: TransferSession, place: Mapping[str, Any], version: int) -> None:
        """Connect to both addresses of the sender."""
        await super().enter(session, place, version)
        self._receiving = Receiving(place, session, self._buffers)

    def heard(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Continue to send when a worker reports its chunks and its room."""
        if self._sending is not None and self.connected:
            self._sending.heard()

    async def send(
        self, session: TransferSession, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """Send the tensors in chunks."""
        sending = self._sending
        assert sending is not None, "it is connected"
        for name, tensor in weights:
            await sending.add(name, tensor)
        await sending.end()
        return {"chunks": sending.made}

    async def receive(self, session: TransferSession) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors as they arrive, one bucket at a time."""
        receiving = self._receiving
        assert receiving is not None, "it is connected"

        def ready(sender: Peer) -> bool:
            return bool(receiving.arrived) or sender.said.get("chunks") == receiving.chunks

        receiving.begin()
        while True:
            await session.until(ready, f"send chunk {receiving.chunks}")
            if not receiving.arrived:
                return
            arrived = receiving.arrived.popleft()
            for item in views(arrived.content, arrived.entries):
                yield item
            receiving.read(arrived)

    async def close(self) -> None:
        """Close the connections."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.close()
        self.begin()
