"""Send weights in chunks by ZeroMQ from the trainer's rank 0 to every inference worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import zmq

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Bucket, Entry, entry_of, raw
from jackfield.sdk.rpc import is_loopback
from jackfield.sdk.transfer import OneSenderEngine, Peer
from jackfield_transport_zmq.config import EngineConfig
from jackfield_transport_zmq.sending import Receiving, Sending
from jackfield_transport_zmq.sockets import Keys

_MORE = 1 << 20  #: bytes, for the description of a bucket's tensors, and for encryption


class ZMQCheckpointEngine(OneSenderEngine):
    """One end of the transfer. Rank 0 sends each worker the chunks for which it has room."""

    config: EngineConfig
    slots = 6

    def __init__(self, config: EngineConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._sending: Sending | None = None
        self._receiving: Receiving | None = None

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Listen for connections that fetch chunks; ``WeightsError`` if the port is taken."""
        config, host = self.config, self.context.host
        near = is_loopback(host)
        encrypted = not near if config.encrypted is None else config.encrypted
        tcp = encrypted or config.transport == "tcp" or (config.transport == "auto" and not near)
        keys = Keys.make() if encrypted else None
        try:
            self._sending = Sending(host, keys, tcp, config.data_port, secret)
        except zmq.ZMQError as error:
            raise WeightsError(
                f"cannot listen for inference workers: {error}",
                where=f"{host}:{config.data_port}",
                fix="choose another data_port, or 0 for any that is free",
            ) from error
        known = None if keys is None else keys.of_clients()
        return {"data": self._sending.address, "keys": known, "largest": config.bucket_bytes + _MORE}

    async def meet_workers(self, workers: int) -> None:
        """Start to handle workers' requests."""
        assert self._sending is not None, "it was prepared"
        self._sending.begin(self.peers)

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Connect to the address where tensors leave."""
        self._receiving = Receiving(self, place, self.buffers)

    def heard(self, peer: Peer, values: Mapping[str, Any]) -> None:
        """Continue to send when a worker reports its chunks and its room."""
        if self._sending is not None and self.connected:
            self._sending.heard()

    async def send_alone(self, name: str, tensor: torch.Tensor) -> bool:
        """Send a large tensor without a copy, in pieces.

        ZeroMQ receives into fresh memory, and touching that costs more than to put pieces together in a kept buffer.
        """
        size, piece = tensor.nbytes, self.config.bucket_bytes
        if size <= piece:
            return False
        await self.flush()
        content, entry = raw(tensor.detach().cpu()), entry_of(name, tensor)
        for start in range(0, size, piece):
            self._launch(content[start : start + piece], None if start else [entry], start, size)
        self.lent = self.made
        return True

    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Send a bucket."""
        self._launch(content, entries, 0, content.numel())

    def _launch(self, content: torch.Tensor, entries: Sequence[Entry] | None, start: int, size: int) -> None:
        assert self._sending is not None, "it is connected"
        tensors = None if entries is None else self.layout.announced(entries)
        fields = {"number": self.made, "start": start, "size": size, "tensors": tensors}
        self.made += 1
        self._sending.send(fields, content)

    async def content(self, bucket: Bucket) -> torch.Tensor:
        """Return the memory of a message, or of a tensor whose pieces were put together."""
        content: torch.Tensor = bucket.place[0]
        return content

    def was_read(self, bucket: Bucket) -> None:
        """Tell the sender that there is room for another chunk."""
        assert self._receiving is not None, "it is connected"
        self._receiving.was_read(bucket)

    async def close(self) -> None:
        """Close the connections."""
        sending, self._sending = self._sending, None
        receiving, self._receiving = self._receiving, None
        for end in (sending, receiving):
            if end is not None:
                end.close()
