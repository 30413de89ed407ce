"""The metadata that users of the queue hold: frozen classes of plain values without tensors."""

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
    """The key of one attempt at one group of a batch, from which the keys of its samples follow.

    ``retry`` is the number of groups that were dropped at this index before. ``reissue`` is the number of times that
    the same attempt was handed out again because its explorer died or the run was resumed.
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
        """Parse the key of a group; ``queue.unknown-sample`` if the text is not one."""
        partition, *numbers = name.rsplit("/", 3)
        try:
            batch, index, retry = numbers
            number, _, reissue = retry.partition("r")
            return cls(partition, int(batch), int(index), int(number), int(reissue or 0))
        except ValueError:
            raise QueueError(f"{name!r} names no group", code="queue.unknown-sample", where=name) from None

    def rollout(self, number: int, attempt: int = 0) -> str:
        """Return the prefix of a rollout's sample keys. ``attempt`` is the number of workers that died during it."""
        return f"{self}/{_numbered(number, attempt)}"

    def sample(self, rollout: int, sequence: int, attempt: int = 0) -> str:
        """Return the key of a sample."""
        return f"{self.rollout(rollout, attempt)}/{sequence}"


def _numbered(number: int, again: int) -> str:
    return f"{number}r{again}" if again else str(number)


def group_of(key: str) -> str:
    """Return the group's key, as text, of a sample's key."""
    return key.rsplit("/", 2)[0]


def partition_of(key: str) -> str:
    """Return the partition of a sample's key."""
    return key.rsplit("/", 5)[0]


@attrs.frozen
class Batch:
    """A claimed batch: its explorer alone may, and must, publish ``groups`` groups."""

    partition: str
    number: int  #: number in the partition, from 0
    groups: int
    explorer: str
    vacant: int = 0  #: groups that no explorer is generating


@attrs.frozen
class Lineage:
    """The derivation of a sample that was made from other samples."""

    operation: str
    parents: tuple[str, ...]  #: keys of samples of this queue or of another one


@attrs.frozen(kw_only=True)
class NewGroup:
    """A group to open: sibling rollouts of one task."""

    key: GroupKey
    task_id: str
    rollouts: int
    tags: Mapping[str, Any] = attrs.field(factory=dict)  #: tags of all its samples


@attrs.frozen(kw_only=True)
class Written:
    """The columns of samples that a worker has written to the backend, without the values."""

    columns: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  #: bytes of each sample's new values
    tags: tuple[Mapping[str, Any], ...] = ()  #: tags of each sample; empty: none


@attrs.frozen(kw_only=True)
class RolloutReport:
    """The end of a rollout. The values of its samples are already in the backend."""

    group: str
    rollout: int
    keys: tuple[str, ...] = ()
    written: Written = Written()
    error: str | None = None  #: why it failed; a failed rollout has no samples
    lineage: Mapping[str, Lineage] = attrs.field(factory=dict)  #: of its samples, and of parents in other queues


@attrs.frozen
class Lease:
    """The lease under which a consumer holds a sample."""

    partition: str
    consumer: str
    epoch: int


@attrs.frozen
class Notice:
    """The newest value that was posted to a topic."""

    number: int  #: starts at 1 and rises with each notice of the topic
    value: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Reuse:
    """The limits on how often and how long a consumer may reuse groups."""

    max_uses: int | None = option(
        None, help="uses of a group, the first one included; null: no limit", validator=optional(gt(0))
    )
    cooldown: int = option(0, help="steps that a group rests after each use", validator=ge(0))
    max_staleness: int | None = option(
        None,
        help="maximum steps by which a group's weight version may lag behind the step that uses it; older groups are "
        "retired; null: no limit",
        validator=optional(ge(0)),
    )
    capacity: int | None = option(
        None, help="number of used groups to keep, the sampler's first choices; null: all", validator=optional(gt(0))
    )


@attrs.frozen(kw_only=True)
class BatchMeta:
    """Samples that are processed together; leased samples come in whole groups."""

    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]  #: per sample
    groups: tuple[str, ...]  #: per sample
    leases: tuple[Lease, ...]  #: per sample

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, indexes: Iterable[int]) -> BatchMeta:
        """Return the samples at ``indexes``, in that order, under the same leases."""
        chosen = list(indexes)
        return self._with(lambda values: tuple(values[index] for index in chosen))

    def joined(self, other: BatchMeta) -> BatchMeta:
        """Return these samples followed by those of ``other``."""
        return self._with(lambda values, more: values + more, other)

    def _with(self, make: Callable[..., tuple[Any, ...]], *others: BatchMeta) -> BatchMeta:
        names = ("keys", "tags", "groups", "leases")
        return BatchMeta(**{name: make(*(getattr(each, name) for each in (self, *others))) for name in names})

    def by_group(self) -> dict[str, list[int]]:
        """Return the indexes of each group's samples, in order."""
        return _places(self.groups)

    def by_partition(self) -> dict[str, list[int]]:
        """Return the indexes of each partition's samples, in order."""
        return _places(lease.partition for lease in self.leases)

    def split(self, parts: int, *, whole_groups: bool = False) -> tuple[BatchMeta, ...]:
        """Split into consecutive parts whose numbers of samples, or of whole groups, differ by at most one.

        The larger parts come first.

        Raises:
            QueueError: ``queue.invalid`` if there are fewer samples or groups than parts, or ``parts`` is below 1.
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
