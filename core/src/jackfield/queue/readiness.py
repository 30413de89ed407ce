"""Which groups a consumer could have now, and which of them its sampler chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jackfield.errors import QueueError
from jackfield.queue.missing import some
from jackfield.queue.records import BatchState, Consumer, Group, Use


class ReadyGroups:
    """The groups that a consumer could have, as a sampler sees them."""

    def __init__(self, consumer: Consumer, groups: Iterable[Group], step: int | None) -> None:
        self.step = step
        self.groups = {str(group.key): group for group in groups}
        self._consumer = consumer

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def tags(self, name: str) -> Mapping[str, Any]:
        group = self.groups[name]
        tags = [group.tags_of(sample) for sample in group.samples.values()]
        bounds = {}
        for bound, choose in (("weight_version_min", min), ("weight_version_max", max)):
            versions = [each[bound] for each in tags if bound in each]
            if versions:
                bounds[bound] = choose(versions)
        return {**tags[0], **bounds}

    def uses(self, name: str) -> int:
        use = self.groups[name].uses.get(self._consumer.name)
        return 0 if use is None else len(use.steps)


def choose(consumer: Consumer, ready: ReadyGroups, count: int | None) -> Sequence[str]:
    chosen = consumer.sampler.sample(ready, count)
    if len(set(chosen) & set(ready)) != len(chosen) or (count is not None and len(chosen) > count):
        raise QueueError(
            f"a sampler of consumer {consumer.name!r} chose groups that it was not offered, twice, or too many",
            expected="as many distinct ready ones as were asked for, at most",
            found=some(list(chosen)),
        )
    return chosen


def require_some(count: int | None) -> None:
    if count is not None and count < 1:
        raise QueueError("at least one group is leased", expected="1 or more", found=count)


def has_enough(consumer: Consumer, batch: BatchState, count: int | None) -> bool:
    """Tell whether as many groups are ready as were asked for, or as are left for the consumer."""
    ready = batch.ready.get(consumer, {})
    if count is not None and len(ready) >= count:
        return True
    return all(place.index in ready or place.is_consumed or _has_had(consumer, place.group) for place in batch.places)


def _has_had(consumer: Consumer, group: Group | None) -> bool:
    if group is None or group.state != "published":
        return False
    return consumer.name in group.uses or consumer.has_written(group)


def place_of(group: Group) -> tuple[int, int]:
    return group.key.batch, group.key.index


def _has_rested(use: Use, step: int | None, rest: int) -> bool:
    last = use.steps[-1] if use.steps else None
    return step is None or last is None or step - last > rest


def oldest_version(group: Group, otherwise: int) -> int:
    """Find the oldest weights that made a token of the group; samples without a version count as ``otherwise``."""
    versions = [sample.tags.get("weight_version_min", otherwise) for sample in group.samples.values()]
    return min(map(int, versions), default=otherwise)


def usable(consumer: Consumer, step: int | None, fresh: bool) -> list[Group]:
    """Find the groups that may be used at ``step``, in the order of batch and index."""
    rest = 0 if consumer.reuse is None else consumer.reuse.cooldown
    again = [group for group in consumer.used if _has_rested(group.uses[consumer.name], step, rest)]
    new = consumer.ready if fresh else ()
    return sorted([*again, *new], key=place_of)
