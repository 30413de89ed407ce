"""The in-process checkpoint engine, which passes tensors by reference on one event loop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Entry, entry_of, raw
from jackfield.sdk.rpc import Connection
from jackfield.sdk.rpc.wire import Message
from jackfield.sdk.transfer import OneSenderEngine
from jackfield.settings import option

if TYPE_CHECKING:
    import torch

_NUMBERS = itertools.count()
_SESSIONS: dict[str, InProcessCheckpointEngine] = {}  #: senders by the names of their transfers


class _Link(Connection):
    """One end of a connection within a process, which passes values by reference."""

    owner: InProcessCheckpointEngine
    other: _Link

    def notify(self, method: str, contract: object, *values: Any) -> None:
        if not self.other.lost.done():
            self.other.owner._take(values[0], self.other)

    async def call(self, method: str, arguments: Any, *limits: Any, **options: Any) -> Any:
        if method == "transfer.enter":
            entering = self.other.owner._enter(arguments[0], arguments[1], self.other)
            return await self.clock.wait_for(entering, limits[0], f"{self.name} to {limits[2]}")
        self.notify(method, None, *arguments)

    def send(self, message: Message) -> None:
        self.other.handle(message)


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
    slots = 3
    _name = ""  #: of the transfer, as its sender

    async def _serve(self) -> dict[str, Any]:
        self._name = f"in-process-{next(_NUMBERS)}"
        _SESSIONS[self._name] = self
        return {"name": self._name, "secret": ""}

    async def _dial(self, address: Mapping[str, Any], worker: int) -> Connection:
        sender = _SESSIONS.get(address["name"])
        if sender is None:
            message = f"the weight transfer {address['name']} is over or was never begun in this process"
            raise WeightsError(message, where=address["name"])
        own, other = (_Link(name, {}, self._clock) for name in ("the sender", f"worker {worker}"))
        own.owner, other.owner, own.other, other.other = self, sender, other, own
        return own

    async def send_alone(self, name: str, tensor: torch.Tensor) -> bool:
        """Hand over a large tensor and wait until all workers have read it: its memory may then be reused."""
        if tensor.nbytes < self.config.bucket_bytes:
            return False
        await self.flush()
        await self.launch(raw(tensor), [entry_of(name, tensor)])
        await self.taken(self.made)
        return True

    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Hand over a bucket."""
        self.announce(entries, content)

    async def finalize(self) -> None:
        """Leave the transfer. Idempotent."""
        _SESSIONS.pop(self._name, None)
        await super().finalize()
