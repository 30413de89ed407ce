"""The metadata that users of the TransferQueue hold: plain frozen values, never tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

import attrs

from jackfield.errors import QueueError

__all__ = ["BatchMeta", "GroupSlot", "GroupView", "Ticket"]


@attrs.frozen
class Ticket:
    """A batch to be made: the right, and the duty, of one explorer to publish ``groups`` groups."""

    partition: str
    number: int  #: per partition, from 0
    groups: int
    explorer: str


@attrs.frozen
class GroupSlot:
    """A place in a ticket that waits for a group.

    ``attempt`` counts the groups that were dropped from this place before. ``claim`` counts how often the place was
    handed out anew because its explorer died or the run was resumed: the same attempt is then made once more.
    """

    ticket: int
    index: int
    attempt: int
    partition: str
    explorer: str
    claim: int = 0


@attrs.frozen(kw_only=True)
class GroupView:
    """A group as it was when it was looked at."""

    id: str
    partition: str
    ticket: int
    index: int  #: of its slot
    attempt: int
    task_id: str
    state: Literal["open", "published", "dropped"]
    reason: str | None  #: why it was dropped
    runs: int
    failed_runs: Mapping[int, str]  #: runs that ended without rows because they failed, and why
    keys: tuple[str, ...]  #: surviving rows, by run and sequence
    key_runs: tuple[int, ...]  #: the run of each key
    columns: frozenset[str]  #: that every surviving row has
    tags: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class BatchMeta:
    """Rows that a consumer holds under one lease."""

    partition: str
    consumer: str
    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]  #: of each row
    group_ids: tuple[str, ...]  #: of each row
    epoch: int  #: of the lease

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, indexes: Iterable[int]) -> BatchMeta:
        """The rows at ``indexes``, in that order, under the same lease."""
        chosen = list(indexes)
        return attrs.evolve(
            self,
            keys=tuple(self.keys[index] for index in chosen),
            tags=tuple(self.tags[index] for index in chosen),
            group_ids=tuple(self.group_ids[index] for index in chosen),
        )

    def split(self, parts: int) -> tuple[BatchMeta, ...]:
        """``parts`` consecutive parts; their sizes differ by one row at most, the larger ones first.

        Raises:
            QueueError: ``queue.invalid`` with fewer rows than parts, or fewer than one part.
        """
        if not 1 <= parts <= max(len(self), 1):
            raise QueueError("a batch cannot be split so", expected=f"1 to {len(self)} parts", found=parts)
        size, larger = divmod(len(self), parts)
        bounds = [index * size + min(index, larger) for index in range(parts + 1)]
        return tuple(self.select(range(start, end)) for start, end in pairwise(bounds))
