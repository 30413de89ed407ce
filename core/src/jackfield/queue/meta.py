"""The metadata that users of the queue hold, frozen classes of plain values without tensors, and samplers.

A sampler chooses among the ready groups of a consumer. Its choices depend on its settings, its seed and the number of
earlier calls. The queue's checkpoint keeps that number, so that a resumed run makes the same choices.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any, cast

import attrs
import msgspec
from attrs.validators import ge, gt, optional

from jackfield.errors import QueueError
from jackfield.settings import option, structure


@attrs.frozen
class GroupKey:
    """The key of one group of a batch, from which the keys of its samples follow.

    ``retry`` is the number of groups that were dropped at this index before. ``reissue`` is the number of times that
    this retry was handed out again because its explorer died or the run was resumed.
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

    def sample(self, rollout: int, sequence: int, restart: int = 0) -> str:
        """Return the key of a sample."""
        return sample_key(str(self), rollout, sequence, restart)


def _numbered(number: int, again: int) -> str:
    return f"{number}r{again}" if again else str(number)


def sample_key(group: str, rollout: int, sequence: int, restart: int = 0) -> str:
    """Return a sample's key from the group's as text; ``restart`` counts the runs of its rollout that workers lost."""
    return f"{group}/{_numbered(rollout, restart)}/{sequence}"


def group_of(key: str) -> str:
    """Return the group's key, as text, of a sample's key."""
    return key.rsplit("/", 2)[0]


def index_of(group: str) -> int:
    """Return the index in its batch of a group's key, as text."""
    return int(group.rsplit("/", 2)[1])


def batch_of(group: str) -> int:
    """Return the number of the batch of a group's key, as text."""
    return int(group.rsplit("/", 3)[1])


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
    version: int | None = None  #: the weight version at its start; None: unknown


class Written(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The columns of samples that a worker has written to the backend, without the values."""

    columns: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  #: bytes of each sample's new values
    tags: tuple[Mapping[str, Any], ...] = ()  #: tags of each sample; empty: none
    metrics: Mapping[str, float] = {}  #: what is added to the sums that a step reports


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a rollout. The values of its samples are already in the backend."""

    group: str
    rollout: int
    keys: tuple[str, ...] = ()
    written: Written = Written()
    error: str | None = None  #: why it failed; a failed rollout has no samples
    lineage: Mapping[str, Lineage] = {}  #: of its samples, and of parents in other queues


class Lease(msgspec.Struct, frozen=True, gc=False):
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


_PER_SAMPLE = ("keys", "tags", "groups", "leases")


@attrs.frozen(kw_only=True)
class BatchMeta:
    """Samples that are processed together; leased samples come in whole groups."""

    keys: tuple[str, ...]
    tags: tuple[Mapping[str, Any], ...]  #: per sample
    groups: tuple[str, ...]  #: per sample
    leases: tuple[Lease, ...]  #: per sample
    #: the training step that uses its batch in parts; workers keep values until the next step; None: for one lease
    step: int | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, indexes: Iterable[int]) -> BatchMeta:
        """Return the samples at ``indexes``, in that order, under the same leases."""
        chosen = list(indexes)
        if chosen == list(range(len(self))):
            return self
        every: dict[str, Any] = {name: getattr(self, name) for name in _PER_SAMPLE}
        every = {name: tuple(map(values.__getitem__, chosen)) for name, values in every.items()}
        return attrs.evolve(self, **every)

    def joined(self, other: BatchMeta) -> BatchMeta:
        """Return these samples followed by those of ``other``."""
        if not other.keys:
            return self
        return attrs.evolve(self, **{name: getattr(self, name) + getattr(other, name) for name in _PER_SAMPLE})

    def by_group(self) -> dict[str, list[int]]:
        """Return the indexes of each group's samples, in order."""
        return _places(self.groups)

    def by_partition(self) -> dict[str, list[int]]:
        """Return the indexes of each partition's samples, in order."""
        return _places(lease.partition for lease in self.leases)

    def split(self, parts: int, *, whole_groups: bool = False) -> tuple[BatchMeta, ...]:
        """Split into consecutive parts whose numbers of samples, or of whole groups, differ by at most one.

        The larger parts come first. With fewer samples or groups than parts, or no parts, raise ``queue.invalid``.
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


@attrs.frozen(eq=False)
class Ready:
    """The groups from which a sampler chooses for one consumer, in the order of batch and index."""

    _groups: Mapping[str, Any]  # the queue's own records, by name
    _consumer: str
    step: int | None = None  #: step of the calling trainer; None: unknown

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def tags(self, name: str) -> Mapping[str, Any]:
        """Return the tags of a group's first sample, with the oldest and newest weight version of the group.

        Numbers ``reward/NAME`` are the means of its samples.
        """
        tags = self._groups[name].all_tags()
        bounds = dict[str, Any]()
        for tag in (each for each in tags[0] if each.startswith("reward/")):
            values = [each[tag] for each in tags if tag in each]
            bounds[tag] = sum(values) / len(values)
        for bound, choose in (("weight_version_min", min), ("weight_version_max", max)):
            if versions := [each[bound] for each in tags if bound in each]:
                bounds[bound] = choose(versions)
        return {**tags[0], **bounds}

    def uses(self, name: str) -> int:
        """Return the number of times that the consumer has used a group."""
        use = self._groups[name].uses.get(self._consumer)
        return 0 if use is None else len(use.steps)


class Sampler(ABC):
    """The base of samplers. If a sampler chooses no group, the consumer waits for more."""

    @abstractmethod
    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return distinct names from ``ready``, best first, at most ``count`` (None: any number)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state as plain JSON values."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the sampler's state."""
        return


@attrs.define(kw_only=True)
class Sequential(Sampler):
    """A sampler that takes groups in the order of batch and index."""

    epochs: bool = option(False, help="take the groups with the fewest uses first")

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        return list(islice(sorted(ready, key=ready.uses) if self.epochs else ready, count))


@attrs.define(kw_only=True)
class Random(Sampler):
    """A sampler that draws groups uniformly, without replacement within a call.

    Each call has a generator seeded with the seed and the number of the call.
    """

    seed: int = option(0, help="seed of the random choices")
    _calls: int = attrs.field(default=0, init=False)

    def _generator(self) -> random.Random:
        self._calls += 1
        return random.Random(f"{self.seed}/{self._calls}")

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return ``count`` groups in a random order that does not depend on the order of ``ready``."""
        names = sorted(ready)
        return self._generator().sample(names, len(names) if count is None else min(count, len(names)))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._calls = int(saved["calls"])


@attrs.define(kw_only=True)
class Priority(Random):
    """A sampler by priority: a tag's value minus a decay per use. Ties keep the order of ``ready``."""

    tag: str = option("weight_version_min", help="tag with the priority: the oldest weight version, or your own tag")
    decay: float = option(2.0, help="subtracted from the priority for each earlier use", validator=ge(0.0))
    sigma: float = option(0.0, help="standard deviation of Gaussian noise on each priority", validator=ge(0.0))

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return the ``count`` groups of highest priority, highest first. A missing tag counts as 0."""
        noise = self._generator()
        ranked = []
        for place, name in enumerate(ready):
            priority = float(ready.tags(name).get(self.tag, 0.0)) - self.decay * ready.uses(name)
            ranked.append((-(priority + (noise.gauss(0.0, self.sigma) if self.sigma else 0.0)), place, name))
        return [name for _, _, name in heapq.nsmallest(len(ranked) if count is None else count, ranked)]


#: Samplers by the name that configurations use: attrs classes whose fields are their settings, or functions.
SAMPLERS: dict[str, Callable[..., Sampler]] = {"priority": Priority, "random": Random, "sequential": Sequential}


def register_sampler(name: str, make: Callable[..., Sampler]) -> None:
    """Register a sampler under the ``name`` that configurations use.

    ``make`` is an attrs class whose fields are the options, or a function that takes the options. If another sampler
    has the name, raise ``queue.invalid``.
    """
    if SAMPLERS.setdefault(name, make) is not make:
        raise QueueError(f"there is a sampler named {name!r} already", where=name, fix="choose another name")


@attrs.frozen(kw_only=True)
class SamplerSpec:
    """A section of the configuration that chooses a sampler. It can be sent to other processes."""

    name: str = option("sequential", help="sequential, random, priority, or a plugin's sampler")
    options: Mapping[str, Any] = option(factory=dict, help="the sampler's own settings")

    def make(self, where: str = "") -> Sampler:
        """Create a sampler. ``where`` is the path of the options, for error messages.

        An unknown name raises ``queue.invalid``, and an option that the sampler does not have ``ConfigError``.
        """
        if self.name not in SAMPLERS:
            known = f"one of {', '.join(sorted(SAMPLERS))}"
            raise QueueError(f"no sampler is named {self.name!r}", where=where or None, expected=known, found=self.name)
        make = SAMPLERS[self.name]
        if isinstance(make, type) and attrs.has(make):
            return cast(Sampler, structure(make, dict(self.options), where=where))
        return make(**self.options)
