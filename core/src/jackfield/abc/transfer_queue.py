"""Contract of a TransferQueue backend, which stores the values of samples.

The core keeps the metadata (rows, readiness, leases, tags); a backend only stores bytes by key and column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class TransferQueueContext:
    """The context that a backend gets at its construction, with the plugin's config."""

    folder: str | None = None  #: the run's folder, for durable backends
    host: str = "127.0.0.1"
    #: another process has opened the queue of this folder, and this backend is a further client of the same store
    #: (capability ``joins``)
    joins: bool = False
    heartbeat_seconds: float = 30.0  #: a process of the store without a heartbeat for so long is dead


@attrs.frozen(kw_only=True, eq=False)
class Column:
    """One column of some rows, in the order of their keys.

    Jagged: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``. Dense (``offsets`` is None): row ``i`` is ``values[i]``.
    ``encoding="json"`` marks UTF-8 JSON texts in a jagged uint8 tensor.
    """

    values: torch.Tensor  #: any dtype, contiguous, on the CPU; ``[sum of lengths, ...]`` or ``[rows, ...]``
    offsets: torch.Tensor | None = None  #: int64 ``[rows + 1]``, from 0, never falling
    encoding: Literal["tensor", "json"] = "tensor"

    def __len__(self) -> int:
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


@attrs.frozen(kw_only=True, eq=False)
class PutRequest:
    """A request to write columns of rows. Other columns of these rows are kept; the backend copies the values."""

    partition: str
    keys: tuple[str, ...]  #: distinct
    columns: Mapping[str, Column]


@attrs.frozen(kw_only=True)
class PutResult:
    """The size of what was stored."""

    bytes: int  #: bytes of values


@attrs.frozen(kw_only=True)
class GetRequest:
    """A request to read columns of rows, in the order of ``keys``."""

    partition: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]


@attrs.frozen(kw_only=True, eq=False)
class GetResult:
    """The requested columns, which the reader does not modify in place.

    Rows of one column that were put with different dtypes, encodings or trailing shapes cannot be read together
    (``queue.column``).
    """

    columns: Mapping[str, Column]


@attrs.frozen(kw_only=True)
class DeleteRequest:
    """A request to delete rows; unknown keys are ignored."""

    partition: str
    keys: tuple[str, ...]


@attrs.frozen(kw_only=True)
class DeleteResult:
    """The samples and bytes of values that were freed."""

    samples: int
    bytes: int


@attrs.frozen(kw_only=True)
class KeysRequest:
    """A request to list samples and their columns."""

    partition: str | None = None  #: None: all


@attrs.frozen(kw_only=True, eq=False)
class KeysResult:
    """The stored samples, without those that were lost with a part of the store."""

    samples: Mapping[tuple[str, str], tuple[str, ...]]  #: columns by partition and key


@attrs.frozen(kw_only=True)
class StatsResult:
    """The number of samples and bytes that the backend holds now."""

    samples: int
    bytes: int
    details: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SnapshotRequest:
    """A request to write the backend's state to ``folder``, or to read it from there."""

    folder: str


@attrs.frozen(kw_only=True)
class SnapshotResult:
    """The samples and bytes that were written or read."""

    samples: int
    bytes: int


@attrs.frozen(kw_only=True)
class TagsRequest:
    """A request to store tags beside the values, for users who read the store with its own tools."""

    partition: str
    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]


class TransferQueueBackend(ABC):
    """A store of values by (partition, key, column).

    Invariants, each checked by the conformance suite: bit-exact round trip for every dtype, empty rows and jagged
    shapes; putting one column keeps the others; a missing row or column is an error that names it; a restart keeps
    everything if ``durable``; nothing is leaked.

    Raises (all methods): ``QueueError`` with ``queue.unknown-sample``, ``queue.column`` or ``queue.closed``.
    """

    abi_version: ClassVar[str] = "1.0"

    #: whether values survive ``kill -9`` of the process that put them
    durable: ClassVar[bool] = False

    #: whether other processes may also open the queue of the same folder, with ``context.joins``
    joins: ClassVar[bool] = False

    def __init__(self, config: Any, context: TransferQueueContext) -> None:
        self.config = config
        self.context = context

    async def start(self) -> None:
        """Open files, sockets and servers, before the first request."""
        return

    @abstractmethod
    async def put(self, request: PutRequest) -> PutResult:
        """Store values, which every reader sees once it returns."""

    @abstractmethod
    async def get(self, request: GetRequest) -> GetResult:
        """Read values, of which every byte is there once it returns."""

    @abstractmethod
    async def keys(self, request: KeysRequest) -> KeysResult:
        """List the readable samples. :meth:`get` reports values that differ from what was put (``queue.lost``)."""

    @abstractmethod
    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Delete samples; unknown keys are ignored."""

    @abstractmethod
    async def stats(self) -> StatsResult:
        """Count samples and bytes."""

    @abstractmethod
    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write everything that was put before the call. Producers are not stopped."""

    @abstractmethod
    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace all content with what :meth:`checkpoint` wrote."""

    @abstractmethod
    async def close(self) -> None:
        """Release memory, ports and files. Idempotent."""

    async def put_tags(self, request: TagsRequest) -> None:
        """Store tags for users of the store's own tools; the core keeps its own copy."""
        return
