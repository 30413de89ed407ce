"""Weights from the trainer's rank 0 to every inference worker, over one TCP connection each."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.clock import Clock
from jackfield.errors import WeightsError
from jackfield_transport_tcp.config import Config
from jackfield_transport_tcp.frames import END, header_of, payload, read_header, read_tensor

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_DONE = b"\x01"


class TCPCheckpointEngine(CheckpointEngine):
    """One end of a transfer. A worker shows a secret that it got with its connect arguments."""

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._bucket = config.bucket_bytes
        self._clock = Clock()
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._secret = ""
        self._peers: asyncio.Queue[tuple[int, Streams]] = asyncio.Queue()
        self._streams: dict[int, Streams] = {}  #: by worker
        self._version = 0

    # ---- before the transfer

    async def prepare(self) -> PrepareResult:
        """Rank 0 listens, on loopback unless the context names another interface."""
        if self.context.rank != 0:
            return PrepareResult()
        if self._listener is not None:  # prepared before, and nobody connected
            self._listener.close()
        self._listener = socket.create_server((self.context.host, 0))
        self._secret = secrets.token_hex(16)
        host, port = self._listener.getsockname()[:2]
        return PrepareResult(metadata={"host": host, "port": port, "secret": self._secret})

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Rank 0 serves every worker."""
        address = request.trainer_metadata[0]
        return Topology(
            trainer=tuple({"workers": request.rollout_workers} for _ in request.trainer_metadata),
            rollout=tuple({**address, "worker": number} for number in range(request.rollout_workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Rank 0 waits for every worker; a worker calls rank 0."""
        self._version = request.version
        if self.context.end == "sender":
            await self._accept(request.arguments["workers"])
        else:
            await self._call(**request.arguments)

    async def _accept(self, workers: int) -> None:
        if self.context.rank != 0:
            return
        if self._listener is None:
            raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
        self._server = await asyncio.start_server(self._greet, sock=self._listener)
        while missing := [number for number in range(workers) if number not in self._streams]:
            number, streams = await self._wait(self._peers.get(), f"worker {', '.join(map(str, missing))} to connect")
            self._streams[number] = streams

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown: dict[str, Any] = {}
        with suppress(EOFError, OSError, ValueError):
            shown = await read_header(reader)
        if hmac.compare_digest(str(shown.get("secret")).encode(), self._secret.encode()):
            self._peers.put_nowait((int(shown["worker"]), (reader, writer)))
        else:
            writer.close()

    async def _call(self, host: str, port: int, secret: str, worker: int) -> None:
        try:
            streams = await self._wait(asyncio.open_connection(host, port), f"the sender at {host}:{port}")
        except OSError as error:
            raise WeightsError(f"the sender cannot be reached: {error}", where=f"{host}:{port}") from error
        self._streams = {0: streams}
        streams[1].write(header_of({"secret": secret, "worker": worker}))

    # ---- the transfer

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Every tensor to every worker, each piece before the next one is drawn; then wait until all have taken all."""
        if self.context.rank != 0:
            for _ in weights:  # gathering a tensor needs every rank
                pass
            return
        try:
            await self._write([header_of({"version": self._version})])
            for name, tensor in weights:
                dtype = str(tensor.dtype).removeprefix("torch.")
                content = payload(tensor)
                pieces = (content[start : start + self._bucket] for start in range(0, len(content), self._bucket))
                await self._write([header_of({"name": name, "dtype": dtype, "shape": list(tensor.shape)}), *pieces])
            await self._write([header_of(END)])
            for number, (reader, _) in self._streams.items():
                await self._wait(reader.readexactly(len(_DONE)), f"worker {number} to take everything")
        except (EOFError, OSError) as error:
            raise WeightsError(f"a worker left before it had taken everything: {error}") from error

    async def _write(self, pieces: Iterable[bytes | memoryview]) -> None:
        for piece in pieces:
            for number, (_, writer) in self._streams.items():
                writer.write(bytes(piece))  # a copy: the tensor may change while the network is slow
                await self._wait(writer.drain(), f"worker {number} to read")

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors until the sender says that there are no more."""
        if not self._streams:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        reader, writer = self._streams[0]
        try:
            first = await self._wait(read_header(reader), "the sender")
            if first.get("version") != self._version:
                raise WeightsError("other weights came", code="weights.version", expected=self._version, found=first)
            while (fields := await self._wait(read_header(reader), "the sender")) != END:
                yield fields["name"], await self._wait(read_tensor(reader, fields), "the sender")
            writer.write(_DONE)
            await self._wait(writer.drain(), "the sender")
        except (EOFError, OSError, ValueError) as error:
            raise WeightsError(f"the sender broke off: {error}") from error

    async def finalize(self) -> None:
        """Close everything; the other end notices."""
        streams, self._streams = list(self._streams.values()), {}
        while not self._peers.empty():
            streams.append(self._peers.get_nowait()[1])
        server, self._server = self._server, None
        listener, self._listener = self._listener, None
        if server is not None:
            server.close()
        elif listener is not None:
            listener.close()
        for _, writer in streams:
            writer.close()
            with suppress(OSError):
                await self._wait(writer.wait_closed(), "a connection to close")

    async def _wait(self, awaitable: Awaitable[T], name: str) -> T:
        return await self._clock.wait_for(awaitable, self.context.deadline_seconds, name)
