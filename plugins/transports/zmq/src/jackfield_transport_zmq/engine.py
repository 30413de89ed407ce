"""Weights from the trainer's rank 0 to every inference worker, in chunks by ZeroMQ."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import torch
import zmq

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.errors import WeightsError
from jackfield.sockets import Keys, is_loopback
from jackfield.weights.buckets import views
from jackfield.weights.meeting import Meeting, Peer, reason_of
from jackfield_transport_zmq.config import EngineConfig
from jackfield_transport_zmq.sending import Receiving, Sending

__all__ = ["ZMQCheckpointEngine"]


_RECONNECT_SECONDS = 5.0


class ZMQCheckpointEngine(CheckpointEngine):
    """One end. The trainer's rank 0 sends to each worker what it has room for; its other ranks only exhaust."""

    config: EngineConfig

    def __init__(self, config: EngineConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._meeting: Meeting | None = None
        self._connected = False
        self._sending: Sending | None = None
        self._receiving: Receiving | None = None
        self._buffers: list[torch.Tensor] = []  #: uint8; kept from one transfer to the next
        self._whole = False  #: everything was sent, or taken

    # -- before the transfer

    def prepare(self) -> PrepareResult:
        """Rank 0 listens, on loopback unless the context names another interface.

        Raises:
            WeightsError: a port is taken.
        """
        if self.context.rank != 0:
            return PrepareResult()
        self._abandon()
        near, patience = is_loopback(self.context.host), self.config.reconnect_seconds
        if patience is None:
            patience = 0.0 if near else _RECONNECT_SECONDS
        meeting = Meeting(self.context.deadline_seconds, self._heard, patience=patience)
        address = meeting.open(self.context.host, self.config.port)
        encrypted = not near if self.config.encrypted is None else self.config.encrypted
        tcp = encrypted or self.config.transport == "tcp" or (self.config.transport == "auto" and not near)
        keys = Keys.make() if encrypted else None
        try:
            self._sending = Sending(
                self.context.host, keys, tcp, self.config.data_port, address["secret"], self.config.bucket_bytes
            )
        except zmq.ZMQError as error:
            meeting.abandon()
            raise WeightsError(
                f"cannot listen for inference workers: {error}",
                where=f"{self.context.host}:{self.config.data_port}",
                fix="choose another data_port, or 0 for any that is free",
            ) from error
        self._meeting = meeting
        known = None if keys is None else keys.of_clients()
        return PrepareResult(metadata={**address, "data": self._sending.address, "keys": known, "patience": patience})

    def _abandon(self) -> None:
        """Begin anew; a sender that was prepared before, and met nobody, stops listening there."""
        if self._meeting is not None:
            self._meeting.abandon()
        if self._sending is not None:
            self._sending.close()
        self._meeting = self._sending = None
        self._whole = self._connected = False

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
        place = request.arguments
        if self.context.side == "rollout":
            self._whole = False
            meeting = self._meeting = Meeting(self.context.deadline_seconds, self._heard, patience=place["patience"])
            await meeting.enter(place["host"], place["port"], place["secret"], place["worker"], request.version)
            self._receiving = Receiving(place, meeting, self._buffers)
        elif self.context.rank == 0:
            if self._meeting is None or self._sending is None:
                raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
            await self._meeting.admit(place["workers"], request.version)
            self._sending.begin(self._meeting, self._buffers)
        self._connected = True

    def _heard(self, _: Peer, message: Mapping[str, Any]) -> None:
        if self._sending is not None and self._connected:
            self._sending.heard()
        if self._receiving is not None:
            self._receiving.changed()

    # -- the transfer

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Every tensor to every worker; then wait until all have taken all.

        Raises:
            WeightsError: ``weights.transfer`` when a worker breaks off.
            DeadlineExceeded: naming the workers that are late.
        """
        if self.context.rank != 0:
            for _ in weights:  # gathering a tensor needs every rank
                pass
            return
        meeting, sending = self._meeting, self._sending
        if meeting is None or sending is None or not self._connected:
            raise WeightsError("the sender is not connected", expected="prepare, connect, send_weights")
        try:
            for name, tensor in weights:
                await sending.add(name, tensor)
            await sending.end()
            self._whole = True
            meeting.tell({"done": True, "chunks": sending.made})
            await meeting.until(lambda peer: "done" in peer.said, "take everything")
        except BaseException as error:
            meeting.tell({"broken": reason_of(error)})
            raise

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors as they come, a bucket at a time.

        Raises:
            WeightsError: ``weights.transfer`` when the sender breaks off.
            DeadlineExceeded: naming the sender.
        """
        meeting, receiving = self._meeting, self._receiving
        if meeting is None or receiving is None:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        sender = meeting.peers[0]
        receiving.begin()
        while True:
            while not receiving.arrived and sender.said.get("chunks") != receiving.chunks:
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
        sending, self._sending = self._sending, None
        receiving, self._receiving = self._receiving, None
        for end in (sending, receiving):
            if end is not None:
                end.close()
        if meeting is not None:
            await meeting.close(None if self._whole else "left before everything was taken")
        self._connected = False
