"""The metadata that users of the TransferQueue hold: plain frozen values, never tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal, TypeVar

import attrs

from jackfield.errors import QueueError

__all__ = ["BatchMeta", "Claim", "GroupSlot", "GroupView", "Notice", "Ticket", "partition_of"]

T = TypeVar("T")


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
    failed_runs: tuple[tuple[int, str], ...]  #: runs that ended without rows because they failed, and why
    keys: tuple[str, ...]  #: surviving rows, by run and sequence
    key_runs: tuple[int, ...]  #: the run of each key
    columns: frozenset[str]  #: that every surviving row has
    tags: Mapping[str, Any]


@attrs.frozen
class Notice:
    """The newest that somebody posted of a topic."""

    number: int  #: from 1; a later notice of the topic has a higher one
    value: Mapping[str, Any]


@attrs.frozen
class Claim:
    """Under what a row is held."""

    partition: str
    consumer: str
    epoch: int  #: of the lease; 0: nobody leased it


@attrs.frozen(kw_only=True)
class BatchMeta:
    """Rows that are worked on together; each is held under a lease of its own or of many rows."""

    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]  #: of each row
    group_ids: tuple[str, ...]  #: of each row
    claims: tuple[Claim, ...]  #: of each row

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, indexes: Iterable[int]) -> BatchMeta:
        """The rows at ``indexes``, in that order, under the same leases."""
        chosen = list(indexes)
        return BatchMeta(
            keys=tuple(self.keys[index] for index in chosen),
            tags=tuple(self.tags[index] for index in chosen),
            group_ids=tuple(self.group_ids[index] for index in chosen),
            claims=tuple(self.claims[index] for index in chosen),
        )

    def joined(self, other: BatchMeta) -> BatchMeta:
        """These rows, then those of ``other``."""
        return BatchMeta(
            keys=self.keys + other.keys,
            tags=self.tags + other.tags,
            group_ids=self.group_ids + other.group_ids,
            claims=self.claims + other.claims,
        )

    def by_claim(self) -> dict[Claim, BatchMeta]:
        """The rows of each lease, in order."""
        return {claim: self.select(indexes) for claim, indexes in _places(self.claims).items()}

    def by_partition(self) -> dict[str, list[int]]:
        """The places of each partition's rows, in order."""
        return _places(claim.partition for claim in self.claims)

    def split(self, parts: int) -> tuple[BatchMeta, ...]:
        """``parts`` consecutive parts; their sizes differ by one row at most, the larger ones first.

        Raises:
            QueueError: ``queue.invalid`` with fewer rows than parts, or fewer than one part.
        """
        if not 1 <= parts <= max(len(self), 1):
            raise QueueError("a batch cannot be split so", expected=f"1 to {len(self)} parts", found=parts)
        return tuple(self.select(range(start, end)) for start, end in pairwise(_bounds(len(self), parts)))

    def split_groups(self, parts: int) -> tuple[BatchMeta, ...]:
        """The same with whole groups: ``parts`` consecutive parts whose numbers of groups differ by one at most.

        Raises:
            QueueError: ``queue.invalid`` with fewer groups than parts, or fewer than one part.
        """
        rows = _places(self.group_ids)
        if not 1 <= parts <= max(len(rows), 1):
            raise QueueError("groups cannot be split so", expected=f"1 to {len(rows)} parts", found=parts)
        groups = list(rows.values())
        return tuple(
            self.select(index for group in groups[start:end] for index in group)
            for start, end in pairwise(_bounds(len(groups), parts))
        )


def partition_of(key: str) -> str:
    """A row's keys are ``partition/batch/group/retry/rollout/sequence``."""
    return key.rsplit("/", 5)[0]


def _places(names: Iterable[T]) -> dict[T, list[int]]:
    places: dict[T, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    return places


def _bounds(size: int, parts: int) -> list[int]:
    least, larger = divmod(size, parts)
    return [index * least + min(index, larger) for index in range(parts + 1)]
