"""Contract of a checkpoint engine: how named tensors get from engine ranks to inference workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class CheckpointEngineContext:
    """What one end of the transfer gets at its construction, beside the plugin's own config."""

    end: Literal["sender", "receiver"]
    rank: int = 0  #: among the trainer's ranks, or among all inference workers
    world_size: int = 1
    device: str = "cpu"
    host: str = "127.0.0.1"  #: where the trainer's side listens
    deadline_seconds: float = 600.0


@attrs.frozen(kw_only=True)
class PrepareResult:
    """What the other side has to know of this rank: plain values that fit into JSON."""

    metadata: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class TopologyRequest:
    """All that is known before anybody connects."""

    trainer_metadata: tuple[Mapping[str, Any], ...]  #: by trainer rank
    rollout_workers: int  #: inference workers of all replicas together


@attrs.frozen(kw_only=True)
class Topology:
    """The connect arguments of every rank and worker: plain values that fit into JSON."""

    trainer: tuple[Mapping[str, Any], ...]
    rollout: tuple[Mapping[str, Any], ...]
    #: of any worker that connects after the transfer, while its weights are the newest; None: it cannot
    #: (capability ``retains_weights``)
    retained: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class ConnectRequest:
    """This end's share of the topology."""

    arguments: Mapping[str, Any]
    version: int  #: of the weights that will be moved


class CheckpointEngine(ABC):
    """One end of a weight transfer.

    Order of calls: trainer ranks ``prepare``; anybody calls ``build_topology``; all ends ``connect``; trainer ranks
    ``send_weights`` while workers iterate ``receive_weights``; all ends ``finalize``. It can be repeated from
    ``prepare``.

    Invariants, each checked by the conformance suite: every tensor arrives once, bit-exact, whatever the bucket size,
    tensors larger than a bucket included; a transfer that breaks off raises at both ends, within the deadline;
    peers may die. Names and digests are checked by the core, from what went in and what came out.

    Raises: ``WeightsError`` with ``weights.transfer``; ``DeadlineExceeded`` naming the peer.
    """

    abi_version: ClassVar[str] = "1.0"

    def __init__(self, config: Any, context: CheckpointEngineContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def prepare(self) -> PrepareResult:
        """Allocate buffers and listen (sender)."""

    @classmethod
    @abstractmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Decide who sends to whom."""

    @abstractmethod
    async def connect(self, request: ConnectRequest) -> None:
        """Meet the peers."""

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Send every tensor (sender). Every rank exhausts the generator; a rank that does not send drops them.

        A tensor may be on its way while the next one is drawn, and is reused as soon as the next but one is.
        """

    @abstractmethod
    def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor (receiver). A tensor is valid until the next one is drawn."""

    @abstractmethod
    async def finalize(self) -> None:
        """Release what :meth:`prepare` and :meth:`connect` took; also after a failure; idempotent."""
