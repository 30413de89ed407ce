"""Contract of a TransferQueue backend: where the values of samples are kept.

Metadata (rows, readiness, leases, tags) is the core's; a backend only stores bytes by key and column.
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
    """What a backend gets at its construction, beside the plugin's own config."""

    folder: str | None = None  #: the run's folder, for durable backends
    host: str = "127.0.0.1"
    #: another process has opened the queue of this folder, and this backend is a further client of the same store
    #: (capability ``joins``)
    joins: bool = False
    heartbeat_seconds: float = 30.0  #: after which a process of the store's that sends no heartbeat is dead


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
    """Write columns of rows. Other columns of the same rows stay as they are; the backend copies what it keeps."""

    partition: str
    keys: tuple[str, ...]  #: distinct
    columns: Mapping[str, Column]


@attrs.frozen(kw_only=True)
class PutResult:
    """What was stored."""

    bytes: int  #: of values


@attrs.frozen(kw_only=True)
class GetRequest:
    """Read columns of rows, in the order of ``keys``."""

    partition: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]


@attrs.frozen(kw_only=True, eq=False)
class GetResult:
    """The columns asked for; the reader does not change them in place.

    Rows of one column that were put with different dtypes, encodings or trailing shapes cannot be read together
    (``queue.column``).
    """

    columns: Mapping[str, Column]


@attrs.frozen(kw_only=True)
class DeleteRequest:
    """Forget rows; unknown keys are ignored."""

    partition: str
    keys: tuple[str, ...]


@attrs.frozen(kw_only=True)
class DeleteResult:
    """What was freed; bytes are those of values, here and everywhere."""

    samples: int
    bytes: int


@attrs.frozen(kw_only=True)
class KeysRequest:
    """List samples and their columns."""

    partition: str | None = None  #: None: all


@attrs.frozen(kw_only=True, eq=False)
class KeysResult:
    """What is there; samples that went with a part of the store are not."""

    samples: Mapping[tuple[str, str], tuple[str, ...]]  #: by partition and key: the columns


@attrs.frozen(kw_only=True)
class StatsResult:
    """What the backend holds now."""

    samples: int
    bytes: int
    details: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SnapshotRequest:
    """Write the backend's state to, or read it from, ``folder``."""

    folder: str


@attrs.frozen(kw_only=True)
class SnapshotResult:
    """What was written or read."""

    samples: int
    bytes: int


@attrs.frozen(kw_only=True)
class TagsRequest:
    """Show tags beside the values, to people who read the store with its own tools."""

    partition: str
    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]


class TransferQueueBackend(ABC):
    """A store of values by (partition, key, column).

    Invariants, each checked by the conformance suite: bit-exact round trip for every dtype, empty rows and jagged
    shapes; putting one column keeps the others; a missing row or column is an error that names it; a restart keeps
    everything if ``durable`` and nothing is leaked.

    Raises (all methods): ``QueueError`` with ``queue.unknown-sample``, ``queue.column``, ``queue.closed``.
    """

    abi_version: ClassVar[str] = "1.0"

    #: whether values survive ``kill -9`` of the process that put them
    durable: ClassVar[bool] = False

    #: whether other processes may open the queue of the same folder, too, with ``context.joins``
    joins: ClassVar[bool] = False

    def __init__(self, config: Any, context: TransferQueueContext) -> None:
        self.config = config
        self.context = context

    async def start(self) -> None:
        """Open files, sockets and servers, before the first request."""
        return

    @abstractmethod
    async def put(self, request: PutRequest) -> PutResult:
        """Store; when it returns, every reader sees it."""

    @abstractmethod
    async def get(self, request: GetRequest) -> GetResult:
        """Read; when it returns, every byte is there."""

    @abstractmethod
    async def keys(self, request: KeysRequest) -> KeysResult:
        """List what may be read. :meth:`get` reports values that are not what was put (``queue.lost``, found: keys)."""

    @abstractmethod
    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Delete samples; unknown keys are ignored."""

    @abstractmethod
    async def stats(self) -> StatsResult:
        """Count samples and bytes."""

    @abstractmethod
    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write everything that was put before the call, without stopping producers."""

    @abstractmethod
    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace everything by what :meth:`checkpoint` wrote."""

    @abstractmethod
    async def close(self) -> None:
        """Release memory, ports and files; idempotent."""

    async def put_tags(self, request: TagsRequest) -> None:
        """Show tags to people; the core keeps its own copy."""
        return
