"""Contract of a checkpoint engine, which moves named tensors from engine ranks to workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class CheckpointEngineContext:
    """The context that one end of a transfer gets at its construction, with the plugin's config."""

    end: Literal["sender", "receiver"]
    rank: int = 0  #: index among the trainer's ranks, or among all inference workers
    world_size: int = 1
    device: str = "cpu"
    host: str = "127.0.0.1"  #: address at which the trainer's side listens
    deadline_seconds: float = 600.0


@attrs.frozen(kw_only=True)
class PrepareResult:
    """The connection data of one rank, as JSON-serialisable values."""

    metadata: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class TopologyRequest:
    """The input of :meth:`CheckpointEngine.build_topology`, known before any end connects."""

    trainer_metadata: tuple[Mapping[str, Any], ...]  #: by trainer rank
    rollout_workers: int  #: inference workers of all replicas together


@attrs.frozen(kw_only=True)
class Topology:
    """The connect arguments of every rank and worker, as JSON-serialisable values."""

    trainer: tuple[Mapping[str, Any], ...]
    rollout: tuple[Mapping[str, Any], ...]
    #: arguments of any worker that connects after the transfer, while its weights are the newest; None: late
    #: connections are not supported (capability ``retains_weights``)
    retained: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class ConnectRequest:
    """This end's share of the topology."""

    arguments: Mapping[str, Any]
    version: int  #: weight version that will be moved


class CheckpointEngine(ABC):
    """One end of a weight transfer.

    Order of calls: trainer ranks call ``prepare``; any process calls ``build_topology``; all ends call ``connect``;
    trainer ranks call ``send_weights`` while workers iterate over ``receive_weights``; all ends call ``finalize``. The
    sequence can be repeated from ``prepare``.

    Invariants, each checked by the conformance suite: every tensor arrives once and bit-exact, for every bucket size
    and for tensors larger than a bucket; a transfer that fails, also because a peer died, raises at both ends within
    the deadline. The core compares names and digests of the tensors at both ends.

    Raises: ``WeightsError`` with ``weights.transfer``; ``DeadlineExceeded``, which names the peer.
    """

    abi_version: ClassVar[str] = "1.0"

    def __init__(self, config: Any, context: CheckpointEngineContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def prepare(self) -> PrepareResult:
        """Allocate buffers and listen. Trainer ranks call it."""

    @classmethod
    @abstractmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Decide which trainer rank sends to which workers."""

    @abstractmethod
    async def connect(self, request: ConnectRequest) -> None:
        """Connect to the peers."""

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Send every tensor. Every trainer rank exhausts the generator; a rank that does not send drops the tensors.

        A tensor may be in flight while the next one is drawn; its memory is reused when the one after that is drawn.
        """

    @abstractmethod
    def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every received tensor. A tensor is valid until the next one is drawn."""

    @abstractmethod
    async def finalize(self) -> None:
        """Release what :meth:`prepare` and :meth:`connect` acquired, also after a failure. Idempotent.

        After a complete transfer, what the next one can use may stay until the object is released.
        """
