"""The metadata that users of the queue hold: frozen, plain values, never tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, pairwise
from typing import Any

import attrs
from attrs.validators import ge, gt, optional

from jackfield.errors import QueueError
from jackfield.settings import option


@attrs.frozen
class GroupKey:
    """One attempt at one group of a batch; the keys of its samples follow from it.

    ``retry`` counts the groups that were dropped at this index before. ``reissue`` counts how often the same attempt
    was handed out again because its explorer died or the run was resumed.
    """

    partition: str
    batch: int
    index: int
    retry: int = 0
    reissue: int = 0

    def __str__(self) -> str:
        return f"{self.partition}/{self.batch}/{self.index}/{_numbered(self.retry, self.reissue)}"

    @classmethod
    def of(cls, name: str) -> GroupKey:
        """Read the key of a group from its text.

        Raises:
            QueueError: ``queue.unknown-sample`` for a text that names no group.
        """
        partition, *numbers = name.rsplit("/", 3)
        try:
            batch, index, retry = numbers
            number, _, reissue = retry.partition("r")
            return cls(partition, int(batch), int(index), int(number), int(reissue or 0))
        except ValueError:
            raise QueueError(f"{name!r} names no group", code="queue.unknown-sample", where=name) from None

    def rollout(self, number: int, attempt: int = 0) -> str:
        """Return what the keys of a rollout's samples begin with; ``attempt`` counts the workers that died over it."""
        return f"{self}/{_numbered(number, attempt)}"

    def sample(self, rollout: int, sequence: int, attempt: int = 0) -> str:
        """Return the key of a sample."""
        return f"{self.rollout(rollout, attempt)}/{sequence}"


def _numbered(number: int, again: int) -> str:
    return f"{number}r{again}" if again else str(number)


def group_of(key: str) -> str:
    """Return the text of the group of a sample's key."""
    return key.rsplit("/", 2)[0]


def partition_of(key: str) -> str:
    """Return the partition of a sample's key."""
    return key.rsplit("/", 5)[0]


@attrs.frozen
class Batch:
    """A batch to make: the right, and the duty, of one explorer to publish ``groups`` groups."""

    partition: str
    number: int  #: per partition, from 0
    groups: int
    explorer: str
    vacant: int = 0  #: groups that no explorer makes at the moment


@attrs.frozen
class Lineage:
    """How a sample came to be, where it was made of others."""

    operation: str
    parents: tuple[str, ...]  #: keys, of this queue or of another one


@attrs.frozen(kw_only=True)
class NewGroup:
    """Sibling rollouts of one task, which begin now."""

    key: GroupKey
    task_id: str
    rollouts: int
    minimum_samples: int | None = None  #: that have to survive for the group to be published; None: one per rollout
    tags: Mapping[str, Any] = attrs.field(factory=dict)  #: of all its samples


@attrs.frozen(kw_only=True)
class RolloutReport:
    """How a rollout ended. The values of its samples are in the backend already."""

    group: str
    rollout: int
    keys: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  #: bytes of each sample's values
    tags: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None  #: why it failed; then it has no samples
    lineage: Mapping[str, Lineage] = attrs.field(factory=dict)  #: of samples here, and of their parents elsewhere


@attrs.frozen(kw_only=True)
class Written:
    """What a worker has written to the backend, without the values."""

    columns: tuple[str, ...]
    sizes: tuple[int, ...]  #: bytes of each sample's new values
    tags: tuple[Mapping[str, Any], ...] | None = None  #: to be added to the tags of each sample


@attrs.frozen
class Lease:
    """Under what a sample is held."""

    partition: str
    consumer: str
    epoch: int


@attrs.frozen
class Notice:
    """The newest value that was posted of a topic."""

    number: int  #: from 1; a later notice of the topic has a higher one
    value: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Reuse:
    """How often a consumer may use the same groups, and for how long."""

    max_uses: int | None = option(
        None, help="uses of a group, the first one included; null: no limit", validator=optional(gt(0))
    )
    cooldown: int = option(0, help="steps that a group rests after each use", validator=ge(0))
    max_staleness: int | None = option(
        None,
        help="steps by which the weights that made a group may lag behind the step that uses it, older ones are let "
        "go; null: no limit",
        validator=optional(ge(0)),
    )
    capacity: int | None = option(
        None, help="used groups that are kept, the sampler's first choices; null: all", validator=optional(gt(0))
    )


@attrs.frozen(kw_only=True)
class BatchMeta:
    """Samples that are worked on together, in whole groups where they were leased."""

    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]  #: of each sample
    groups: tuple[str, ...]  #: of each sample
    leases: tuple[Lease, ...]  #: of each sample

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, indexes: Iterable[int]) -> BatchMeta:
        """Return the samples at ``indexes``, in that order, under the same leases."""
        chosen = list(indexes)
        return self._with(lambda values: tuple(values[index] for index in chosen))

    def joined(self, other: BatchMeta) -> BatchMeta:
        """Return these samples, then those of ``other``."""
        return self._with(lambda values, more: values + more, other)

    def _with(self, make: Callable[..., tuple[Any, ...]], *others: BatchMeta) -> BatchMeta:
        names = ("keys", "tags", "groups", "leases")
        return BatchMeta(**{name: make(*(getattr(each, name) for each in (self, *others))) for name in names})

    def by_group(self) -> dict[str, list[int]]:
        """Return the places of each group's samples, in order."""
        return _places(self.groups)

    def by_partition(self) -> dict[str, list[int]]:
        """Return the places of each partition's samples, in order."""
        return _places(lease.partition for lease in self.leases)

    def split(self, parts: int, *, whole_groups: bool = False) -> tuple[BatchMeta, ...]:
        """Cut into consecutive parts; their numbers of samples, or of whole groups, differ by one at most.

        The larger parts come first.

        Raises:
            QueueError: ``queue.invalid`` with fewer samples, or groups, than parts, or fewer than one part.
        """
        units = list(self.by_group().values()) if whole_groups else [[index] for index in range(len(self))]
        if not 1 <= parts <= max(len(units), 1):
            raise QueueError("a batch cannot be split so", expected=f"1 to {len(units)} parts", found=parts)
        least, larger = divmod(len(units), parts)
        bounds = [part * least + min(part, larger) for part in range(parts + 1)]
        return tuple(self.select(chain(*units[start:end])) for start, end in pairwise(bounds))


def _places(names: Iterable[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    return places
