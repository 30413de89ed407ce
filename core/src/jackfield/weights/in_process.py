"""The in-process checkpoint engine, which passes tensors by reference on one event loop."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.errors import WeightsError
from jackfield.rpc import Connection
from jackfield.rpc.wire import Message
from jackfield.sdk.one_sender import OneSenderEngine
from jackfield.sdk.transfer import Peer, TransferSession
from jackfield.settings import option

if TYPE_CHECKING:
    import torch

_AHEAD = 2  #: how many unread buckets a receiver may have before the sender waits

_NUMBERS = itertools.count()
_SESSIONS: dict[str, LocalSession] = {}  #: the senders' sessions, by the names of their transfers


class _Link(Connection):
    """One end of a connection within a process, which passes values by reference."""

    owner: TransferSession
    other: _Link

    def notify(self, method: str, contract: object, *values: Any) -> None:
        if not self.other.lost.done():
            self.other.owner._take(values[0], self.other)

    async def call(self, method: str, arguments: Any, *limits: Any, **options: Any) -> None:
        self.notify(method, None, *arguments)

    def send(self, message: Message) -> None:
        self.other.handle(message)


class LocalSession(TransferSession):
    """A transfer session whose ends share one process and event loop."""

    name: str | None = None

    async def open(self, host: str, port: int = 0) -> dict[str, Any]:
        """Register the session under a name; return the address that workers use."""
        self.name = f"in-process-{next(_NUMBERS)}"
        _SESSIONS[self.name] = self
        return {"name": self.name, "secret": ""}

    async def _entered(self, address: Mapping[str, Any], worker: int, version: int) -> int:
        sender = _SESSIONS.get(address["name"])
        if sender is None:
            message = f"the weight transfer {address['name']} is over or was never begun in this process"
            raise WeightsError(message, where=address["name"])
        own, other = (_Link(name, {}, self._clock) for name in ("the sender", f"worker {worker}"))
        own.owner, other.owner, own.other, other.other = self, sender, other, own
        self._new_peer("the sender", 0, own)
        return await self.wait_for(sender._enter(worker, version, other), "the sender")

    async def close(self, broken: str | None = None) -> None:
        """Leave the transfer; idempotent."""
        _SESSIONS.pop(self.name or "", None)
        await super().close(broken)


@attrs.frozen(kw_only=True)
class InProcessConfig:
    """Settings of the in-process checkpoint engine."""

    bucket_bytes: int = option(
        0,
        help="Tensors are copied into buckets of about this size, and the sender runs up to two buckets ahead of its "
        "receivers; larger tensors, and all tensors with 0, are handed over one by one without a copy.",
        validator=attrs.validators.ge(0),
    )


class InProcessCheckpointEngine(OneSenderEngine):
    """One end of a weight transfer within one process and event loop."""

    config: InProcessConfig
    session_class = LocalSession

    async def send(
        self, session: TransferSession, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """Pass every tensor to every worker."""
        bucket: list[tuple[str, torch.Tensor]] = []
        size, limit, numbers = 0, self.config.bucket_bytes, itertools.count()

        async def put(bucket: list[tuple[str, torch.Tensor]], ahead: int) -> None:
            """Pass on a bucket, and wait until no worker has more than ``ahead`` unread buckets."""
            number = next(numbers)
            session.tell({f"bucket {number}": bucket})
            await session.until(lambda peer: peer.said.get("read", 0) > number - ahead, "take a tensor")

        for name, tensor in weights:
            tensor = tensor.detach()
            alone = tensor.nbytes >= limit
            if bucket and (alone or size + tensor.nbytes > limit):
                await put(bucket, _AHEAD)
                bucket, size = [], 0
            if alone:
                await put([(name, tensor)], 0)
            else:
                bucket.append((name, tensor.clone()))
                size += tensor.nbytes
        if bucket:
            await put(bucket, _AHEAD)
        return {}

    async def receive(self, session: TransferSession) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor by reference."""
        sender, read = session.peers[0], 0

        def came(peer: Peer) -> bool:
            return f"bucket {read}" in peer.said or "done" in peer.said

        while True:
            await session.until(came, "send")
            bucket = sender.said.pop(f"bucket {read}", None)
            if bucket is None:
                return
            for item in bucket:
                yield item
            read += 1
            session.tell({"read": read})
