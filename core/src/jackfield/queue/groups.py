"""Groups: what becomes of rollouts, and of groups that fail, are dropped or lost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import attrs

from jackfield.errors import QueueError
from jackfield.queue.leases import Leases
from jackfield.queue.meta import NewGroup, RolloutReport, Written
from jackfield.queue.missing import some
from jackfield.queue.records import Group, Partition, Place, Sample
from jackfield.queue.state import State

_GONE = "its values are gone from the store, or damaged in it"


@attrs.define(eq=False)
class Groups:
    """Opens groups, and publishes, retries or drops them."""

    state: State
    leases: Leases
    max_retries: int = 8

    # -- beginning and end

    def open(self, new: NewGroup) -> None:
        """Open a group at the place that its key names."""
        key = new.key
        if new.rollouts < 1 or (new.minimum_samples is not None and new.minimum_samples < 1):
            found = f"rollouts={new.rollouts}, minimum_samples={new.minimum_samples}"
            raise QueueError("a group has one rollout and one sample at least", found=found)
        batch = self.state.partition(key.partition).batches.get(key.batch)
        if batch is None or not 0 <= key.index < len(batch.places):
            raise QueueError("the batch has been consumed, or does not have this group", where=str(key))
        if batch.failure is not None:
            raise batch.error()
        place = batch.places[key.index]
        if place.key != key or place.explorer is None or place.group is not None or place.is_consumed:
            raise QueueError(
                "the group is not this explorer's to make any more",
                where=str(key),
                expected=f"{place.key}, handed out and not opened",
                found="a group that is open already" if place.key == key and place.group else str(key),
            )
        place.group = Group(key, place, new.task_id, new.rollouts, new.minimum_samples, dict(new.tags))
        self.state.groups[str(key)] = place.group

    def end(self, report: RolloutReport) -> tuple[str, ...]:
        """Record how a rollout ended, and settle the group with its last one; return the keys that were not taken."""
        group = self.state.group(report.group)
        if group is not None and not 0 <= report.rollout < group.rollouts:
            raise QueueError("the group has no such rollout", where=report.group, found=report.rollout)
        if group is None or group.state != "open" or report.rollout in group.ended:
            known = {} if group is None else group.samples
            return tuple(key for key in report.keys if key not in known)  # it was dropped, or reported before
        bits = group.partition.mask(report.columns)
        tags = report.tags or ({},) * len(report.keys)
        for key, size, own in zip(report.keys, report.sizes, tags, strict=True):
            group.samples[key] = Sample(key, report.rollout, _with_lineage(own, report, key), bits, size)
            self.state.count(1, size)
        group.ended[report.rollout] = report.error
        if report.error is not None:
            self.state.failed(f"{group.key}/{report.rollout}", report.error)
        self.state.derive(report.lineage)
        self._announce(group, report.keys)
        if not group.running():
            self._settle(group)
        return ()

    async def new_samples(self, name: str) -> AsyncIterator[tuple[str, ...]]:
        """See :meth:`TransferQueue.new_samples`."""
        found = self.state.partition(name)
        feed = [key for group in found.groups() for key in group.samples]
        found.feeds.append(feed)
        try:
            while not self.state.is_closed:
                coming, feed[:] = tuple(key for key in feed if self._is_unfinished(found, key)), []
                if coming:
                    yield coming
                else:
                    await found.announced.next()
        finally:
            found.feeds.remove(feed)

    def _is_unfinished(self, partition: Partition, key: str) -> bool:
        place = self.state.sample(key) if self.state.knows(key) else None
        if place is None:
            return False
        wanted = partition.mask(name for consumer in partition.consumers for name in consumer.writes)
        return not wanted or place[1].columns & wanted != wanted

    @staticmethod
    def _announce(group: Group, keys: Sequence[str]) -> None:
        for feed in group.partition.feeds:
            feed += keys
        group.partition.announced.notify()

    def _settle(self, group: Group) -> None:
        """Publish a group whose rollouts have ended, or drop it and let its index be made again."""
        if not group.is_satisfied():
            self._retry(group, _shortage(group))
            return
        group.publish()
        group.batch.published += 1
        self.state.touch(group.place, whole=True)
        self.leases.changed(group)
        group.batch.notify()
        self.state.room.notify()  # it may have fewer samples than were expected
        self.leases.finish([group])

    # -- drops and failures

    def drop(self, names: Sequence[str], reason: str) -> None:
        """Drop groups that their producers or stages do not want; that is no failure."""
        groups = [group for name in names if (group := self.state.group(name)) is not None]
        for group in groups:
            _require_free(group)
        for group in groups:
            self._retry(group, reason, failed=False)

    def fail(self, reasons: Mapping[str, str]) -> None:
        """Fail samples; the policy of their groups decides again. Samples that are gone are skipped."""
        found = [(key, place[0]) for key in reasons if (place := self.state.sample(key)) is not None]
        for _, group in found:
            _require_free(group)
        for key, group in found:
            self.state.failed(key, reasons[key])
            self._remove(group, [key])
        for group in {group: None for _, group in found}:
            self._look_again(group, reasons)

    def _look_again(self, group: Group, reasons: Mapping[str, str]) -> None:
        """Settle a published group again, which has lost samples."""
        if group.state == "published" and not group.is_satisfied():
            ours = [reason for key, reason in reasons.items() if key.startswith(f"{group.key}/")]
            self._retry(group, ours[-1])
        elif group.state == "published":
            self.state.touch(group.place, whole=True)
            self.leases.changed(group)
            self.leases.finish([group])

    def lose(self, keys: Iterable[str], mine: Iterable[Group]) -> tuple[str, ...]:
        """Note that values of samples are gone; the policy of their groups decides again.

        A group that an end consumer has leased is left alone, but for those in ``mine``: it may have read everything.
        What one has acked is not made again. Return the keys of lost samples that are not in the queue any more.
        """
        lost = list(dict.fromkeys(keys))
        there = [key for key in lost if self.state.knows(key)]
        self._lose(there, set(mine))
        failed = [key for key in there if not self.state.knows(key)]
        if failed:
            logging.getLogger("jackfield").warning(
                "values of %d samples are gone from the queue's store, or damaged in it; what is needed of them is "
                "made again: %s",
                *(len(failed), some(failed)),
            )
        return tuple(key for key in lost if not self.state.knows(key))

    def _lose(self, keys: Sequence[str], held: set[Group]) -> None:
        lost: dict[Group, list[str]] = {}
        for key in keys:
            found = self.state.sample(key)
            if found is not None and (found[0] in held or found[0].is_acked() or not found[0].is_fixed()):
                lost.setdefault(found[0], []).append(key)
        for group, gone in lost.items():
            self.state.record("lose", group=str(group.key), keys=gone, reason=_GONE)
            if group.is_acked():
                self.consume([group])
                continue
            for key in gone:
                self.state.failed(key, _GONE)
            self._remove(group, gone)
            self._look_again(group, {key: f"{_shortage(group)}; {_GONE}" for key in gone})

    def _retry(self, group: Group, reason: str, *, failed: bool = True) -> None:
        """Drop a group and let its index be made once more, or fail its batch."""
        place, batch = group.place, group.batch
        self.end_group(place, reason, failed=failed)
        place.reasons.append(reason)
        place.retry, place.reissue = place.retry + 1, 0
        self.state.record("drop", group=str(group.key), task_id=group.task_id, reason=reason)
        if place.retry <= self.max_retries:
            batch.vacate(place)
            return
        retried = f"index {place.index} was made again {self.max_retries} times"
        batch.failure = f"{_counted(place.reasons)}; {retried}"
        self.state.batches[batch] = None
        batch.notify()
        for consumer in batch.partition.consumers:
            consumer.changed.notify()
        self.state.room.notify()

    def end_group(self, place: Place, reason: str, *, failed: bool = True) -> None:
        """Take the group of a place out of the queue; its samples are deleted."""
        group = place.group
        assert group is not None
        if group.state == "published":
            place.batch.published -= 1
        if failed:
            self.state.failed(str(group.key), reason)
        self._forget(group)
        self.state.touch(place, whole=True)
        self.state.room.notify()

    def _forget(self, group: Group) -> None:
        self.leases.forget(group)
        self._remove(group, list(group.samples))
        group.place.group = None
        del self.state.groups[str(group.key)]

    def _remove(self, group: Group, keys: Sequence[str]) -> None:
        for key in keys:
            self.state.count(-1, -group.samples.pop(key).bytes)
        self.state.discard(group.partition.name, keys)

    def consume(self, groups: Sequence[Group]) -> None:
        """Forget groups that every consumer is done with, and batches without any."""
        for group in groups:
            group.place.is_consumed = True
            self._forget(group)
            self.state.touch(group.place, whole=True)
        for batch in {group.batch: None for group in groups}:
            if all(place.is_consumed for place in batch.places):
                del batch.partition.batches[batch.number]
                self.state.batches[batch] = None
            batch.notify()

    # -- columns

    def add(self, keys: Sequence[str], written: Written, *, replace: bool) -> tuple[str, ...]:
        """Note that columns of samples are there; return the keys of those that are gone."""
        tags = written.tags
        if len(set(keys)) != len(keys) or len(written.sizes) != len(keys) or len(tags or keys) != len(keys):
            raise QueueError("something is written of each sample once", expected=f"{len(keys)} distinct samples")
        found = [self.state.sample(key) for key in keys]
        if not replace:
            _require_new([place for place in found if place is not None], written.columns)
        for index, place in enumerate(found):
            if place is not None:
                bits = place[0].partition.mask(written.columns)
                self._add(place[1], bits, written.sizes[index], None if tags is None else tags[index])
        for group in {place[0]: None for place in found if place is not None}:
            self.state.touch(group.place, whole=tags is not None)
            self.leases.changed(group)
            self.leases.finish([group])
        return tuple(key for key, place in zip(keys, found, strict=True) if place is None)

    def _add(self, sample: Sample, bits: int, size: int, tags: Mapping[str, object] | None) -> None:
        if bits & ~sample.columns:
            sample.bytes += size
            self.state.count(0, size)
        sample.columns |= bits
        if tags is not None:
            sample.tags = {**sample.tags, **tags}


def _require_new(places: Sequence[tuple[Group, Sample]], columns: Sequence[str]) -> None:
    for group, sample in places:
        clash = group.partition.mask(columns) & sample.columns
        if clash:
            raise QueueError(
                f"column {', '.join(group.partition.names(clash))} of sample {sample.key} is written already",
                code="queue.column",
                where=sample.key,
                fix="write each column once, or under a lease",
            )


def _require_free(group: Group) -> None:
    if group.is_fixed():
        raise QueueError(
            f"group {group.key} cannot be changed any more",
            where=str(group.key),
            expected="a group that no consumer which acks has leased",
            found=f"leased or acked by {', '.join(sorted(group.uses))}",
        )


def _with_lineage(tags: Mapping[str, object], report: RolloutReport, key: str) -> Mapping[str, object]:
    """Add ``operation`` and ``parents`` to a sample's tags, for all who look at tags."""
    made = report.lineage.get(key)
    return dict(tags) if made is None else {**tags, "operation": made.operation, "parents": list(made.parents)}


def _shortage(group: Group) -> str:
    counted = Counter(why for _, why in sorted(group.ended.items()) if why is not None)
    if counted:
        return "; ".join(f"{count} × {why}" for why, count in counted.most_common(3))
    if group.minimum_samples is not None:
        return f"{len(group.samples)} of at least {group.minimum_samples} samples survive"
    alive = {sample.rollout for sample in group.samples.values()}
    lost = [str(rollout) for rollout in range(group.rollouts) if rollout not in alive]
    return f"rollouts without a surviving sample: {', '.join(lost)}"


def _counted(reasons: Sequence[str]) -> str:
    """Join the distinct reasons of an index's attempts, the most frequent first, three at most."""
    counted = Counter(reasons).most_common(3)
    return "; ".join(why if count == 1 else f"{why} (in {count} attempts)" for why, count in counted)
