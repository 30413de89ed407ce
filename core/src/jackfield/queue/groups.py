"""Groups: the end of rollouts, and groups that fail, are dropped or are lost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import attrs

from jackfield.abc.transfer_queue import KeysRequest
from jackfield.errors import QueueError
from jackfield.queue.leases import Leases, some
from jackfield.queue.meta import BatchMeta, NewGroup, RolloutReport, Written, group_of
from jackfield.queue.records import Group, Sample, State, Status, sequence_of
from jackfield.queue.store import Controller

_GONE = "its values are gone from the store, or damaged in it"


@attrs.define(eq=False)
class Groups:
    """The part of the queue that opens, publishes, retries and drops groups."""

    core: Controller
    leases: Leases
    max_retries: int
    _feeds: list[tuple[str, list[str]]] = attrs.field(factory=list, init=False)  # partition and pending keys

    async def open_groups(self, groups: Sequence[NewGroup]) -> None:
        """Open groups, whose rollouts start now.

        If a group is no longer assigned to this explorer, raise a QueueError; those before it in the list are open.
        """
        for new in groups:
            key = new.key
            if new.rollouts < 1:
                raise QueueError("a group has one rollout at least", found=new.rollouts)
            batch = self.core.state.partition(key.partition).batches.get(key.batch)
            if batch is None or not 0 <= key.index < len(batch.groups):
                raise QueueError("the batch has been consumed, or does not have this group", where=str(key))
            batch.require_well()
            group = batch.groups[key.index]
            if group.key != key or group.status != Status.ASSIGNED:
                expected, is_open = f"{group.key}, handed out and not opened", group.status == Status.OPEN
                found = "a group that is open already" if group.key == key and is_open else str(key)
                message = "the group is not this explorer's to make any more"
                raise QueueError(message, where=str(key), expected=expected, found=found)
            group.status, group.name = Status.OPEN, str(key)
            group.task_id, group.rollouts, group.tags = new.task_id, new.rollouts, new.tags
            self.core.state.groups[group.name] = group

    async def end_rollouts(self, reports: Sequence[RolloutReport]) -> tuple[str, ...]:
        """Record that rollouts have ended, after the values of their samples were put into the backend.

        Return the rejected keys, whose group was dropped or whose rollout was reported before. Their values are
        deleted.
        """
        stray = tuple(key for report in reports for key in self._end(report))
        self.core.discard(stray)
        return stray

    def _end(self, report: RolloutReport) -> tuple[str, ...]:
        """Record the end of a rollout; the last one settles the group. Return the rejected keys."""
        group = self.core.state.group(report.group)
        if group is not None and not 0 <= report.rollout < group.rollouts:
            raise QueueError("the group has no such rollout", where=report.group, found=report.rollout)
        if group is None or group.is_made or report.rollout in group.ended:
            known = {} if group is None else group.samples
            return tuple(key for key in report.keys if key not in known)  # dropped, or reported before
        columns, tags = frozenset(report.written.columns), report.written.tags or ({},) * len(report.keys)
        for key, size, own in zip(report.keys, report.written.sizes, tags, strict=True):
            if (made := report.lineage.get(key)) is not None:  # tags show the lineage
                own = {**own, "operation": made.operation, "parents": list(made.parents)}
            group.samples[key] = Sample(report.rollout, own, columns, size)
            self.core.state.count(1, size)
        group.ended[report.rollout] = report.error
        if report.error is not None:
            self.core.fail(f"{group.name}/{report.rollout}", report.error)
        for key, made in report.lineage.items():
            self.core.store.derived[key] = made
            self.core.record("derive", key=key, operation=made.operation, parents=list(made.parents))
        for partition, feed in self._feeds:
            if partition == group.batch.partition.name:
                feed += report.keys
        if not group.running():
            ordered = sorted(group.samples.items(), key=lambda item: (item[1].rollout, sequence_of(item[0])))
            group.samples, group.status = dict(ordered), Status.PUBLISHED
            self._settle(group)
        return ()

    def _settle(self, group: Group, reason: str = "") -> None:
        """Publish a group whose rollouts have ended and have samples, or drop it and retry its index."""
        if group.is_made and {sample.rollout for sample in group.samples.values()} == set(range(group.rollouts)):
            self.leases.changed(group)
        elif group.is_made:
            lost = sorted(set(range(group.rollouts)) - {sample.rollout for sample in group.samples.values()})
            counted = Counter(why for _, why in sorted(group.ended.items()) if why is not None).most_common(3)
            errors = "; ".join(f"{count} × {why}" for why, count in counted)
            shortage = errors or f"rollouts without a surviving sample: {', '.join(map(str, lost))}"
            self._retry(group, reason or shortage)

    async def new_samples(self, partition: str) -> AsyncIterator[tuple[str, ...]]:
        """Yield the keys of existing samples, then of new ones as their rollouts end, without a lease.

        Samples that have the columns of all stages are skipped. The iteration ends when the queue closes.
        """
        batches = self.core.state.partition(partition).batches.values()
        feed = [key for batch in batches for group in batch.groups for key in group.samples]
        self._feeds.append(entry := (partition, feed))
        try:
            while not self.core.is_closed:
                consumers = self.core.state.partition(partition).consumers
                wanted = frozenset[str]().union(*(consumer.writes for consumer in consumers))
                found = [(key, self.core.state.groups.get(group_of(key))) for key in feed]
                there = [(key, group.samples[key]) for key, group in found if group and key in group.samples]
                coming = tuple(key for key, sample in there if not wanted or not wanted <= sample.columns)
                feed.clear()
                if coming:
                    yield coming
                else:
                    await self.core.change.wait()
        finally:
            self._feeds = [each for each in self._feeds if each is not entry]

    async def drop_groups(self, groups: Sequence[str], reason: str) -> None:
        """Drop and retry groups. Groups that are gone are skipped.

        If an acking consumer has leased a group, or it never existed, raise a QueueError and drop none.
        """
        found = [group for name in groups if (group := self.core.state.group(name)) is not None]
        _require_free(found)
        for group in found:
            self._retry(group, reason, failed=False)

    async def fail_samples(self, reasons: Mapping[str, str]) -> None:
        """Fail samples by key and publish or retry their groups again. Samples that are gone are skipped.

        If an acking consumer has leased such a group, raise a QueueError and fail no sample.
        """
        found = self._by_group(reasons)
        _require_free(found)
        for group, failed in found.items():
            self._fail(group, failed)

    def _by_group(self, reasons: Mapping[str, str]) -> dict[Group, dict[str, str]]:
        """Return the reasons of existing samples by group."""
        found: dict[Group, dict[str, str]] = {}
        for key, reason in reasons.items():
            if (group := self.core.state.group_with(key)) is not None:
                found.setdefault(group, {})[key] = reason
        return found

    def _fail(self, group: Group, reasons: Mapping[str, str]) -> None:
        """Fail samples of a group and publish or retry it again."""
        for key, reason in reasons.items():
            self.core.fail(key, reason)
        self.leases.remove(group, list(reasons))
        self._settle(group, [*reasons.values()][-1])

    async def fail_lost(self, meta: BatchMeta | None = None, keys: Sequence[str] = ()) -> tuple[str, ...]:
        """Fail the samples whose values the backend has lost, and retry groups with too few samples left.

        A group that an acking consumer has leased is kept, as the consumer may have read everything. If it has not, it
        passes its batch as ``meta``, which is released, and leases its groups again. Acked groups are not retried.
        ``keys`` are lost samples that the backend has already named (``found`` of ``queue.lost``).

        Return the keys of lost samples that are no longer in the queue.
        """
        lost = list(dict.fromkeys([*keys, *sorted(await self.lost(self.core.state))]))
        mine = [] if meta is None else [group for groups in self.leases.held(meta).values() for group in groups]
        there = [key for key in lost if self.core.state.knows(key)]
        for group, gone in self._by_group(dict.fromkeys(there, _GONE)).items():
            if group in mine or group.is_acked() or not group.holders():
                self.core.record("lose", group=group.name, keys=list(gone), reason=_GONE)
                if group.is_acked():
                    self.leases.consume([group])
                else:
                    self._fail(group, gone)
        failed = [key for key in there if not self.core.state.knows(key)]
        if failed:
            logging.getLogger("jackfield").warning(
                "values of %d samples are gone from the queue's store, or damaged in it; what is needed of them is "
                "made again: %s",
                *(len(failed), some(failed)),
            )
        return tuple(key for key in lost if not self.core.state.knows(key))

    async def lost(self, state: State) -> set[str]:
        """Return the samples of a state whose values are no longer in the backend."""
        known = {  # before the backend answers: it may not list what is written meanwhile
            (group.batch.partition.name, key): set(sample.columns)
            for group in state.groups.values()
            for key, sample in group.samples.items()
        }
        there = (await self.core.backend.keys(KeysRequest())).samples
        return {key for (name, key), columns in known.items() if not columns <= set(there.get((name, key), ()))}

    def _retry(self, group: Group, reason: str, *, failed: bool = True) -> None:
        """Drop a group and retry its index, or fail its batch after too many retries."""
        if failed:
            self.core.fail(group.name, reason)
        self.leases.forget(group)
        group.reasons.append(reason)
        group.retry, group.reissue = group.retry + 1, 0
        self.core.record("drop", group=group.name, task_id=group.task_id, reason=reason)
        if group.retry <= self.max_retries:
            self.vacate(group)
        else:
            counted = Counter(group.reasons).most_common(3)
            why = "; ".join(each if count == 1 else f"{each} (in {count} attempts)" for each, count in counted)
            group.batch.failure = f"{why}; index {group.index} was made again {self.max_retries} times"

    def vacate(self, group: Group) -> None:
        """Have a group handed out again."""
        group.status, group.explorer = Status.VACANT, None
        self.core.touch(group)
        group.batch.offer()

    async def add_columns(self, target: BatchMeta | Sequence[str], written: Written) -> tuple[str, ...]:
        """Record that columns of samples are in the backend, and wake consumers whose columns are complete.

        The holder of a lease may replace columns; without a lease a column that exists is refused (``queue.column``).
        Return the keys of samples that still exist. The values of the others are deleted.
        """
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        tags, columns = written.tags, frozenset(written.columns)
        if isinstance(target, BatchMeta):
            self.leases.held(target, whole=False)
        if len(set(keys)) != len(keys) or len(written.sizes) != len(keys) or len(tags or keys) != len(keys):
            raise QueueError("something is written of each sample once", expected=f"{len(keys)} distinct samples")
        groups = [self.core.state.group_with(key) for key in keys]
        for key, group in () if isinstance(target, BatchMeta) else zip(keys, groups, strict=True):
            if group is not None and (clash := columns & group.samples[key].columns):
                message = f"column {', '.join(sorted(clash))} of sample {key} is written already"
                fix = "write each column once, or under a lease"
                raise QueueError(message, code="queue.column", where=key, fix=fix)
        wider: dict[frozenset[str], frozenset[str]] = {}  # samples share them
        for index, (key, group) in enumerate(zip(keys, groups, strict=True)):
            if group is None:
                self.core.discard([key])
                continue
            sample = group.samples[key]
            if not columns <= sample.columns:
                sample.bytes += written.sizes[index]
                self.core.state.count(0, written.sizes[index])
            sample.columns = wider.setdefault(sample.columns, sample.columns | columns)
            if tags:
                sample.tags = {**sample.tags, **tags[index]}
        for group in dict.fromkeys(group for group in groups if group is not None):
            self.leases.changed(group)
        return tuple(key for key, group in zip(keys, groups, strict=True) if group is not None)


def _require_free(groups: Iterable[Group]) -> None:
    for group in groups:
        if names := group.holders():
            found = f"leased or acked by {', '.join(sorted(names))}"
            expected = "a group that no consumer which acks has leased"
            raise QueueError(f"group {group.name} cannot be changed", where=group.name, expected=expected, found=found)
