"""Transfer weights from the trainer's rank 0 through a folder to all workers that share it."""

from __future__ import annotations

import asyncio
import fcntl
import secrets
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.sdk.transfer import reason_of
from jackfield_transport_file.config import Config
from jackfield_transport_file.storage import (
    INDEX,
    MARKER,
    SENDER,
    Other,
    Parties,
    clean,
    guarded,
    publish,
    read_json,
    read_shard,
    write_shard,
)


class FileCheckpointEngine(CheckpointEngine):
    """One end of the transfer. Complete weights are marked as the newest, and then read by the workers.

    They stay in the folder. A worker that missed the transfer connects with :meth:`newest` or :meth:`newer`.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._folder = Path(config.folder)
        self._transfer: Path | None = None
        self._parties: Parties | None = None
        self._connected = False
        self._version = 0
        self._index: IO[bytes] | None = None  #: kept open while a worker reads
        self._whole = False  #: whether everything was published, or read

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

    async def prepare(self) -> PrepareResult:
        """On rank 0, create a folder for the transfer, and remove expired ones."""
        if self.context.rank != 0:
            return PrepareResult()
        self._leave("started again")
        transfer = self._folder / secrets.token_hex(8)
        with guarded(self._folder):
            transfer.mkdir(parents=True)
            self._parties = self._party(transfer / SENDER)
            clean(self._folder, self.config.keep)
        self._transfer = transfer
        return PrepareResult(metadata={"transfer": transfer.name})

    def _party(self, own: Path) -> Parties:
        return Parties(own, self.context.deadline_seconds, self.config.poll_seconds)

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Return the topology: rank 0 writes, every worker reads."""
        sender, workers = request.trainer_metadata[0], request.rollout_workers
        return Topology(
            trainer=tuple({"workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({**sender, "worker": number} for number in range(workers)),
            retained=sender,
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Announce the version (sender), or wait for the announcement (worker)."""
        self._version = request.version
        if self.context.end == "receiver":
            await self._enter(request.arguments)
        elif self.context.rank == 0:
            self._begin(request.arguments["workers"])
        self._connected = True

    def _begin(self, workers: int) -> None:
        if self._parties is None or self._transfer is None:
            raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
        self._parties.restart()
        self._parties.others = [Other(f"worker {n}", self._transfer / f"worker-{n}") for n in range(workers)]
        self._parties.tell({"version": self._version})

    async def _enter(self, arguments: Mapping[str, Any]) -> None:
        self._leave("started again")
        self._transfer = self._folder / arguments["transfer"]
        if not self._transfer.is_dir():
            raise WeightsError("the weight transfer is over, or its folder is not here", where=str(self._transfer))
        if "worker" not in arguments:
            return
        self._parties = self._party(self._transfer / f"worker-{arguments['worker']}")
        self._parties.others = [Other("the sender", self._transfer / SENDER)]
        await self._parties.until(lambda other: "version" in other.said, "begin")
        self._check(self._parties.others[0].said["version"])

    def _check(self, version: int) -> None:
        if version != self._version:
            message = "weights of another version came"
            raise WeightsError(message, code="weights.version", expected=self._version, found=version)

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Write every tensor, mark the weights as the newest, then wait until all workers have read them."""
        if self.context.rank != 0:
            for _ in weights:  # gathering a tensor needs every rank
                pass
            return
        parties, transfer = self._parties, self._transfer
        if parties is None or transfer is None or not self._connected:
            raise WeightsError("the sender is not connected", expected="prepare, connect, send_weights")
        try:
            shards = await self._write(parties, transfer, weights)
            publish(transfer, self._version, shards)
            parties.tell({"done": True})
            self._whole = True
            await parties.until(lambda other: "done" in other.said, "take everything")
        except BaseException as error:
            self._leave(reason_of(error))
            raise

    async def _write(
        self, parties: Parties, transfer: Path, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> list[list[Any]]:
        """Collect one file's tensors while the previous one is written; return ``[file, entries]`` of each."""
        shards: list[list[Any]] = []
        writing: asyncio.Future[list[list[Any]]] | None = None
        tensors: dict[str, torch.Tensor] = {}

        async def flush() -> None:
            nonlocal writing, tensors
            if writing is not None:
                shards[-1].append(await writing)
            writing = None
            parties.look()
            if tensors:
                name = f"weights-{len(shards):05}.safetensors"
                shards.append([name])
                writing = asyncio.ensure_future(asyncio.to_thread(write_shard, transfer / name, tensors))
                tensors = {}

        size = 0
        try:
            for name, tensor in weights:
                if size and size + tensor.nbytes > self.config.bucket_bytes:
                    await flush()
                    size = 0
                tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                size += tensor.nbytes
            await flush()
            await flush()
        except BaseException:
            if writing is not None:  # a thread cannot be interrupted, and its file must be removed, too
                await asyncio.wait([writing])
            raise
        return shards

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the tensors of one file while the next one is read."""
        transfer = self._transfer
        if transfer is None or not self._connected:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        if self._parties is not None:
            await self._parties.until(lambda other: "done" in other.said, "write the weights")
        with guarded(self._folder):
            self._index = (transfer / INDEX).open("rb")
            fcntl.flock(self._index, fcntl.LOCK_SH)
            index = read_json(transfer / INDEX)
        assert index is not None
        self._check(index["version"])
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
        self._whole = True
        if self._parties is not None:
            self._parties.tell({"done": True})

    async def finalize(self) -> None:
        """Leave the transfer. Weights that were published stay; others are removed."""
        self._leave("left before everything was taken")

    def _leave(self, reason: str) -> None:
        parties, self._parties = self._parties, None
        transfer, self._transfer = self._transfer, None
        index, self._index = self._index, None
        whole, self._whole, self._connected = self._whole, False, False
        if index is not None:
            index.close()
        if parties is None or transfer is None:
            return
        with suppress(WeightsError):  # a full disk takes no last message; the lock suffices
            parties.close(None if whole else reason)
        if self.context.end == "sender":
            with suppress(OSError):
                if whole:
                    clean(self._folder, self.config.keep)
                else:
                    for path in transfer.glob("weights-*"):  # the rest is removed later: it says what happened
                        path.unlink()
