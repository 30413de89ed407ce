"""Choices among the groups that a consumer may lease, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from jackfield.errors import QueueError, some
from jackfield.queue.meta import GroupKey, Ready
from jackfield.queue.records import BatchState, Consumer, Group, State, Status


def places(consumer: Consumer, names: Sequence[str]) -> list[Group]:
    """Return the groups in the places of these, by key."""
    return [consumer.partition.batches[key.batch].groups[key.index] for key in map(GroupKey.of, names)]


def in_places(consumer: Consumer, names: Sequence[str]) -> list[Group] | None:
    """Return the groups in the places of these, by key; None while they are not all ready."""
    found = places(consumer, names)
    for group in found:
        group.batch.require_well()
    return found if all(map(consumer.is_fresh, found)) else None


def in_time(consumer: Consumer, count: int, step: int, max_staleness: int) -> list[Group] | None:
    """Return ``count`` ready groups, the oldest weights first; None while there are too few.

    A group has to be trained on by the step ``oldest version + max_staleness``. There is None also while a group that
    still runs is among those that have to be taken now, because the steps that are left take ``count`` groups each.
    """
    if len(consumer.usable) < count:
        return None
    by, taken = dict[Group, float](), consumer.has_had
    for group in (group for batch in consumer.partition.batches.values() for group in batch.groups):
        if group.status in (Status.OPEN, Status.PUBLISHED) and not taken(group):
            by[group] = _oldest_version(group) + max_staleness
    order = lambda group: (by[group], group.batch.number, group.index)  # noqa: E731
    ready = sorted(filter(consumer.is_fresh, consumer.usable), key=order)
    running = {last for group, last in by.items() if not consumer.is_fresh(group)}
    chosen = ready[:count]
    for last in running:  # all groups due by then, less those that can be taken after this step
        due = sum(each <= last for each in by.values()) - max(last - step, 0) * count
        if due > sum(by[group] <= last for group in chosen):
            return None
    return chosen if len(chosen) == count else None


def drawn(consumer: Consumer, groups: Sequence[Group], step: int | None, count: int | None) -> list[Group]:
    """Return the groups that a consumer's sampler chooses, and check its choice."""
    named = {group.name: group for group in sorted(groups, key=lambda group: (group.batch.number, group.index))}
    chosen = consumer.sampler.sample(Ready(named, consumer.name, step), count)
    if len(set(chosen) & named.keys()) != len(chosen) or (count is not None and len(chosen) > count):
        what = f"a sampler of consumer {consumer.name!r} chose groups that it was not offered, twice, or too many"
        expected = "as many distinct ready ones as were asked for, at most"
        raise QueueError(what, expected=expected, found=some(list(chosen)))
    return [named[name] for name in chosen]


def _oldest_version(group: Group) -> float:
    """Return the oldest weight version of a group's tokens, or while it runs that of its start; infinite: unknown."""
    if group.status != Status.PUBLISHED:
        return inf if group.version is None else group.version
    return min((sample.tags.get("weight_version_min", inf) for sample in group.samples.values()), default=inf)


def being_made(state: State) -> int:
    """Return how many samples will come that do not exist yet."""
    groups = [group for batch in state.batches() for group in batch.groups]
    assigned = sum(group.batch.rollouts for group in groups if group.status == Status.ASSIGNED)
    return assigned + sum(max(0, each.rollouts - len(each.samples)) for each in groups if each.status == Status.OPEN)


def missing(batches: Sequence[BatchState], consumer: Consumer | None = None, wanted: str = "") -> str:
    """Describe what batches lack to be final, or (``consumer``) for ``wanted`` groups of them to be leased."""
    groups = [group for batch in batches for group in batch.groups]
    found = {
        "indexes without a group": [str(group.index) for group in groups if group.status < Status.OPEN],
        "groups whose rollouts have not ended": [
            f"{group.name} (task {group.task_id!r}, rollouts {', '.join(map(str, group.running()))})"
            for group in groups
            if group.status == Status.OPEN
        ],
    }
    if consumer is None:
        wanted = f"batch {batches[0].number} of partition {batches[0].partition.name!r}"
        made = [group for group in groups if group.status == Status.PUBLISHED]
        found["groups that no consumer has leased"] = [group.name for group in made if not group.holders()]
        holders = {name for group in made if not group.is_acked() for name in group.holders()}
        found["consumers that have leased groups and not acked them"] = sorted(holders)
    else:
        found["groups are ready"] = [group.name for group in groups if consumer.is_fresh(group)]
        found["samples lack columns"] = [
            f"{key} ({', '.join(sorted(consumer.columns - sample.columns))})"
            for group in groups
            for key, sample in group.samples.items()
            if not consumer.columns <= sample.columns
        ]
        used = [(group, use) for group in groups if (use := group.uses.get(consumer.name)) is not None]
        spent = [group.name for group, use in used if use.is_spent(consumer.reuse)]
        found["groups have been used as often as they may"] = spent
        found["groups are leased"] = [group.name for group in consumer.held]
    lacks = [f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names]
    return "; ".join([wanted, *(lacks if groups else ["no explorer has claimed it"])])
