"""Transfer weights from the trainer's rank 0 through a folder to all workers that share it."""

from __future__ import annotations

import asyncio
import fcntl
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import attrs
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest, Topology, TopologyRequest
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.sdk.buckets import Entry, entry_of, raw
from jackfield.sdk.transfer import OneSenderEngine
from jackfield_transport_file.config import Config
from jackfield_transport_file.storage import (
    INDEX,
    MARKER,
    SENDER,
    clean,
    guarded,
    locked,
    publish,
    read_json,
    read_shard,
    write_shard,
)


class FileCheckpointEngine(OneSenderEngine):
    """One end of the transfer. Complete weights are marked as the newest, and then read by the workers.

    They stay in the folder. A worker that missed the transfer connects with :meth:`newest` or :meth:`newer`.
    """

    config: Config
    retains = True

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._folder = Path(config.folder)
        self._transfer: Path | None = None
        self._lock: IO[bytes] | None = None  #: of the sender's file, or of the index while a worker reads
        self._writing: list[asyncio.Future[list[Any]]] = []  #: entries of the index, by bucket

    @classmethod
    def newest(cls, config: Config) -> ConnectRequest | None:
        """Return the request with which a late worker reads the newest weights; None if there are none."""
        folder = Path(config.folder)
        with guarded(folder):
            marker = read_json(folder / MARKER)
        if marker is None:
            return None
        return ConnectRequest(arguments={"transfer": marker["transfer"]}, version=marker["version"])

    @classmethod
    async def newer(cls, config: Config, than: ConnectRequest | None, seconds: float) -> ConnectRequest:
        """Wait for newest weights that are not ``than``, an earlier result; ``DeadlineExceeded`` after ``seconds``."""
        clock = Clock()
        ends = clock.time() + seconds
        while (found := cls.newest(config)) is None or found == than:
            if clock.time() >= ends:
                raise DeadlineExceeded(f"waited {seconds:g} s for the sender to put new weights into {config.folder}")
            await clock.sleep(min(config.poll_seconds, max(ends - clock.time(), 0.0)))
        return found

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Create a folder for the transfer, and remove expired ones."""
        self._transfer = self._folder / uuid.uuid4().hex[:16]
        with guarded(self._folder):
            self._transfer.mkdir(parents=True)
            self._lock = locked(self._transfer / SENDER)
            clean(self._folder, self.config.keep)
        return {"transfer": self._transfer.name}

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Return the topology: rank 0 writes, every worker reads, and others may read later."""
        retained = {"transfer": request.trainer_metadata[0]["transfer"]}
        return attrs.evolve(super().build_topology(request), retained=retained)

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Find the folder of the transfer."""
        self._transfer = self._folder / place["transfer"]
        if not self._transfer.is_dir():
            raise WeightsError("the weight transfer is over, or its folder is not here", where=str(self._transfer))

    async def send_alone(self, name: str, tensor: torch.Tensor) -> bool:
        """Write a large tensor to a file of its own."""
        if tensor.nbytes <= self.config.bucket_bytes:
            return False
        await self.flush()
        await self.launch(raw(tensor.detach().cpu()), [entry_of(name, tensor)])
        self.lent = self.made
        return True

    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Write a file while the next bucket is filled."""
        assert self._transfer is not None, "it was prepared"
        await self.taken(self.made)
        path = self._transfer / f"weights-{self.made:05}.safetensors"
        self.made += 1
        self._writing.append(asyncio.ensure_future(asyncio.to_thread(write_shard, path, content, entries)))

    async def taken(self, count: int) -> None:
        """Wait until ``count`` buckets are in files; raise the error of a worker that broke off."""
        if count:
            await asyncio.shield(self._writing[count - 1])
        await self.until(lambda _: True, "read")

    async def complete(self) -> None:
        """Mark the weights as the newest, and let the workers read them."""
        assert self._transfer is not None, "it was prepared"
        publish(self._transfer, self.version, [file.result() for file in self._writing])
        self.whole = True
        await super().complete()

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the tensors of one file while the next one is read."""
        transfer = self._transfer
        if transfer is None or not self.connected:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        await self.until(lambda peer: "done" in peer.said, "write the weights")
        with guarded(self._folder):
            self._lock = (transfer / INDEX).open("rb")
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            index = read_json(transfer / INDEX)
        assert index is not None
        if index["version"] != self.version:
            expected, found = self.version, index["version"]
            message = "weights of another version came"
            raise WeightsError(message, code="weights.version", expected=expected, found=found)
        reading: asyncio.Future[list[tuple[str, torch.Tensor]]] | None = None
        try:
            for name, entries in [*index["shards"], ("", ())]:
                ready = [] if reading is None else await reading
                reading = None
                if name:
                    reading = asyncio.ensure_future(asyncio.to_thread(read_shard, transfer / name, entries))
                for item in ready:
                    yield item
        finally:
            if reading is not None:
                await asyncio.wait([reading])
        await self.acknowledge()

    async def close(self) -> None:
        """Release the files. Weights that were published stay; others are removed."""
        transfer, self._transfer = self._transfer, None
        writing, self._writing = self._writing, []
        lock, self._lock = self._lock, None
        if writing:  # a thread cannot be interrupted, and its file must be removed, too
            await asyncio.wait(writing)
        if lock is not None:
            lock.close()
        if transfer is None or self.context.end != "sender":
            return
        with suppress(OSError):
            if self.whole:
                clean(self._folder, self.config.keep)
            else:
                for path in transfer.glob("weights-*"):  # the rest is removed later: it shows what happened
                    path.unlink()
