"""The in-process checkpoint engine, which passes tensors by reference on one event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Bucket, Entry, entry_of, raw
from jackfield.sdk.transfer import LEFT, OneSenderEngine, Peer
from jackfield.settings import option

if TYPE_CHECKING:
    import torch

_SESSIONS: dict[str, InProcessCheckpointEngine] = {}  #: senders by the secrets of their sessions


@attrs.frozen(kw_only=True)
class InProcessConfig:
    """Settings of the in-process checkpoint engine."""

    port: ClassVar[int] = 0
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

    def __init__(self, config: InProcessConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, attrs.evolve(context, host="127.0.0.1"))
        self._secret = ""  #: of the session
        self._sent: dict[int, torch.Tensor] = {}  #: contents of the sender's buckets that a worker has not read

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Offer this sender's memory to the workers."""
        self._secret = secret
        _SESSIONS[secret] = self
        return {}

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Find the sender's memory."""
        self._secret = place["session"]["secret"]
        if self._secret not in _SESSIONS:
            raise WeightsError("the sender of the weight transfer is not in this process", expected="the same process")

    async def send_alone(self, name: str, tensor: torch.Tensor) -> bool:
        """Hand over a large tensor and wait until all workers have read it: its memory may then be reused."""
        if tensor.nbytes < self.config.bucket_bytes:
            return False
        await self.flush()
        await self.launch(raw(tensor), [entry_of(name, tensor)])
        await self.taken(self.made)
        return True

    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Announce a bucket, whose memory stays until it is read."""
        self.made += 1
        self._sent[self.made] = content
        self.tell({"bucket": self.made, "tensors": entries})

    def heard(self, peer: Peer, values: Mapping[str, Any]) -> None:
        """Take a bucket, or release one that all workers have read."""
        if "bucket" in values:
            self.arrived.append(Bucket(values["bucket"], values["tensors"], None))
        taken = min(each.got for each in self.peers.values())
        self._sent = {number: content for number, content in self._sent.items() if number > taken}

    async def content(self, bucket: Bucket) -> torch.Tensor:
        """Return the sender's memory."""
        sender = _SESSIONS.get(self._secret)
        if sender is None or bucket.number not in sender._sent:
            raise WeightsError(f"the sender {LEFT}")
        return sender._sent[bucket.number]

    def was_read(self, bucket: Bucket) -> None:
        """Tell the sender that a bucket was read."""
        self.tell({"got": bucket.number})

    async def leave(self) -> None:
        """Leave the transfer. Idempotent."""
        if _SESSIONS.get(self._secret) is self:
            del _SESSIONS[self._secret]
        self._sent = {}
        await super().leave()
