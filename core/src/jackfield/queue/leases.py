"""Consumers: which groups they may have, hold and are done with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from jackfield.errors import LeaseError, QueueError
from jackfield.queue.meta import BatchMeta, Lease, Reuse
from jackfield.queue.missing import missing_batch, missing_groups
from jackfield.queue.readiness import ReadyGroups, choose, has_enough, oldest_version, place_of, require_some, usable
from jackfield.queue.records import BatchState, Consumer, Group, Partition, Use
from jackfield.queue.samplers import Sampler
from jackfield.queue.state import State


@attrs.define(eq=False)
class Leases:
    """Readiness, leases and acks of whole groups."""

    state: State
    consume: Callable[[Sequence[Group]], None]  #: forgets groups that every consumer is done with
    caller: Callable[[], str | None] = lambda: None  #: the client that calls

    # -- readiness

    def register(
        self,
        name: str,
        partition: Partition,
        columns: tuple[str, ...],
        writes: tuple[str, ...],
        sampler: Sampler | None,
        reuse: Reuse | None,
    ) -> None:
        """See :meth:`TransferQueue.register_consumer`."""
        consumer = self.state.consumers.get(name)
        if consumer is None:
            consumer = Consumer(name, partition, columns, writes)
            partition.consumers.append(consumer)
            self.state.consumers[name] = consumer
            for group in partition.groups():
                self.offer(consumer, group)
        found = (consumer.partition, set(consumer.columns), set(consumer.writes))
        if found != (partition, set(columns), set(writes)):
            raise QueueError(
                f"consumer {name!r} is registered already, for something else",
                where=name,
                expected=f"{consumer.columns} of partition {consumer.partition.name!r}, writing {consumer.writes}",
                found=f"{columns} of partition {partition.name!r}, writing {writes}",
            )
        consumer.sampler = consumer.sampler if sampler is None else sampler
        consumer.reuse = consumer.reuse if reuse is None else reuse

    def look_again(self) -> None:
        """Offer everything that is there: the state is another one."""
        for group in self.state.groups.values():
            for name, use in group.uses.items():
                consumer = self.state.consumers[name]
                if use.is_made() and not use.is_spent(consumer.reuse):
                    consumer.used[group] = None
            self.changed(group)

    def offer(self, consumer: Consumer, group: Group) -> None:
        """Make a published group available to a consumer whose columns are there and that has not had it."""
        complete = group.state == "published" and group.common() & consumer.needs == consumer.needs
        if not complete or consumer.name in group.uses or consumer.has_written(group):
            return
        consumer.ready[group] = None
        group.batch.ready.setdefault(consumer, {})[group.key.index] = group
        consumer.changed.notify()

    def withdraw(self, consumer: Consumer, group: Group) -> None:
        """Take a group away that is leased, changed or gone."""
        if group in consumer.ready:
            del consumer.ready[group]
            del group.batch.ready[consumer][group.key.index]

    def changed(self, group: Group) -> None:
        """Look again at a group that was published, or whose samples or columns changed; stages may be done."""
        for consumer in group.partition.consumers:
            use = group.uses.get(consumer.name)
            if use is not None and use.epoch and consumer.has_written(group):
                self._end_stage(consumer, group, use)
            self.withdraw(consumer, group)
            self.offer(consumer, group)

    def _end_stage(self, consumer: Consumer, group: Group, use: Use) -> None:
        self.state.record("ack", consumer=consumer.name, step=None, epoch=use.epoch, keys=list(group.samples))
        self._end_lease(consumer, group, use)
        del group.uses[consumer.name]
        consumer.changed.notify()

    def forget(self, group: Group) -> None:
        """Take a group from every consumer: it is consumed, or dropped."""
        for consumer in group.partition.consumers:
            self.withdraw(consumer, group)
            consumer.used.pop(group, None)
            use = group.uses.pop(consumer.name, None)
            if use is not None and use.epoch:
                self._end_lease(consumer, group, use)
            for step in () if use is None else use.noted():
                consumer.pending.get(step, {}).pop(group, None)
            consumer.changed.notify()

    # -- leasing

    async def lease_batch(self, name: str, number: int, count: int | None, seconds: float) -> BatchMeta:
        """See :meth:`TransferQueue.lease_batch`."""
        consumer, until = self.state.consumer(name), self.state.clock.time() + seconds
        require_some(count)
        consumer.awaited.append(number)
        self.state.room.notify()  # a producer that is held back may make what this call waits for
        try:
            while True:
                batch = self._living(consumer, number)
                if batch is not None and has_enough(consumer, batch, count):
                    ready = batch.ready.get(consumer, {})
                    if count is None and not ready:
                        raise _had(consumer, batch)
                    return self._grant(consumer, [ready[index] for index in sorted(ready)[:count]])
                changed = consumer.changed.next()
                await self.state.wait(changed, until, lambda: missing_batch(consumer, number))
        finally:
            consumer.awaited.remove(number)

    @staticmethod
    def _living(consumer: Consumer, number: int) -> BatchState | None:
        """Find a batch; None where no explorer has claimed it yet."""
        partition = consumer.partition
        batch = partition.batches.get(number)
        if batch is not None and batch.failure is not None:
            raise batch.error()
        if number < 0 or (batch is None and number < partition.next_batch):
            raise QueueError(
                f"batch {number} of partition {partition.name!r} has been consumed",
                where=f"{partition.name}/{number}",
                expected=f"one of {sorted(partition.batches)} or a later one",
                found=number,
            )
        return batch

    async def lease_groups(
        self, name: str, count: int | None, step: int | None, fresh: bool, seconds: float
    ) -> BatchMeta:
        """See :meth:`TransferQueue.lease_groups`."""
        consumer, until = self.state.consumer(name), self.state.clock.time() + seconds
        require_some(count)
        while True:
            self._retire_stale(consumer, step, fresh)
            ready = ReadyGroups(consumer, usable(consumer, step, fresh), step)
            if len(ready) >= (count or 1) or not fresh:
                chosen = choose(consumer, ready, count)
                if not fresh or len(chosen) >= (count or 1):
                    return self._grant(consumer, [ready.groups[each] for each in chosen])
            await self._wait_for_groups(consumer, until, count, len(ready))

    async def _wait_for_groups(self, consumer: Consumer, until: float, count: int | None, ready: int) -> None:
        consumer.waiting += 1
        self.state.room.notify()  # a producer that is held back may make what this call waits for
        try:
            changed = consumer.changed.next()
            await self.state.wait(changed, until, lambda: missing_groups(consumer, count or 1, ready))
        finally:
            consumer.waiting -= 1

    def _grant(self, consumer: Consumer, groups: Sequence[Group]) -> BatchMeta:
        if groups:
            consumer.epoch += 1
            consumer.leases[consumer.epoch] = dict.fromkeys(groups)
            consumer.holders[consumer.epoch] = self.caller()
        for group in groups:
            self.withdraw(consumer, group)
            consumer.used.pop(group, None)
            group.uses.setdefault(consumer.name, Use()).epoch = consumer.epoch
            group.batch.notify()
        samples = [(group, sample) for group in groups for sample in group.samples.values()]
        return BatchMeta(
            keys=tuple(sample.key for _, sample in samples),
            tags=tuple(group.tags_of(sample) for group, sample in samples),
            groups=tuple(str(group.key) for group, _ in samples),
            leases=(Lease(consumer.partition.name, consumer.name, consumer.epoch),) * len(samples),
        )

    def held(self, meta: BatchMeta, *, whole: bool = True) -> dict[tuple[Consumer, int], list[Group]]:
        """Find the living groups of a batch by lease.

        Raises:
            LeaseError: a lease does not hold any more.
            QueueError: a group is named in part, and ``whole``.
        """
        found: dict[tuple[Consumer, int], list[Group]] = {}
        named = set(meta.keys)
        for name, lease in dict(zip(meta.groups, meta.leases, strict=True)).items():
            group, consumer = self.state.group(name), self.state.consumer(lease.consumer)
            if group is None or not (whole or named & group.samples.keys()):
                continue
            if group not in consumer.leases.get(lease.epoch, ()):
                raise _not_held(consumer, group, lease)
            if whole and not named.issuperset(group.samples):
                raise QueueError(
                    f"group {name} is leased as a whole and cannot be acked or given back in part",
                    where=name,
                    expected=f"all of its {len(group.samples)} samples",
                )
            found.setdefault((consumer, lease.epoch), []).append(group)
        return found

    # -- giving back

    def _end_lease(self, consumer: Consumer, group: Group, use: Use) -> None:
        held = consumer.leases[use.epoch]
        del held[group]
        if not held:
            del consumer.leases[use.epoch], consumer.holders[use.epoch]
        use.epoch = 0
        group.batch.notify()

    def release(self, meta: BatchMeta) -> None:
        """See :meth:`TransferQueue.release`."""
        for (consumer, _), groups in self.held(meta).items():
            self._give_back(consumer, groups)

    def end(self, is_over: Callable[[Consumer, int], bool]) -> list[str]:
        """End leases, whose holders are gone; the keys of their samples."""
        ended: list[str] = []
        for consumer in self.state.consumers.values():
            for epoch in [epoch for epoch in consumer.leases if is_over(consumer, epoch)]:
                groups = list(consumer.leases[epoch])
                keys = [key for group in groups for key in group.samples]
                self.state.record("expire", consumer=consumer.name, epoch=epoch, keys=keys)
                self._give_back(consumer, groups)
                ended += keys
        return ended

    def _give_back(self, consumer: Consumer, groups: Iterable[Group]) -> None:
        for group in groups:
            use = group.uses[consumer.name]
            self._end_lease(consumer, group, use)
            self._return(consumer, group, use)

    def _return(self, consumer: Consumer, group: Group, use: Use) -> None:
        """Make a group available again to a consumer, where it may have it."""
        self.state.touch(group.place)
        if not use.is_made():
            del group.uses[consumer.name]
            self.offer(consumer, group)
        elif not use.is_spent(consumer.reuse):
            consumer.used[group] = None
        consumer.changed.notify()

    # -- acks

    def ack(self, meta: BatchMeta, step: int | None) -> None:
        """See :meth:`TransferQueue.ack`."""
        for (consumer, epoch), groups in self.held(meta).items():
            for group in groups:
                use = group.uses[consumer.name]
                self._end_lease(consumer, group, use)
                use.steps.append(step)
                self._note(consumer, group, step)
                self._return(consumer, group, use)
            keys = [key for group in groups for key in group.samples]
            self.state.record("ack", consumer=consumer.name, step=step, epoch=epoch, keys=keys)
            if step is not None:
                self._trim(consumer, step)
            self.finish(groups)

    def _note(self, consumer: Consumer, group: Group, step: int | None) -> None:
        """Remember what is final with the commit of ``step``."""
        if step is not None and (self.state.committed is None or step > self.state.committed):
            consumer.pending.setdefault(step, {})[group] = None

    def commit(self, step: int) -> None:
        """See :meth:`TransferQueue.commit`."""
        state = self.state
        state.committed = step if state.committed is None else max(step, state.committed)
        done: dict[Group, None] = {}
        for consumer in state.consumers.values():
            for earlier in sorted(each for each in consumer.pending if each <= step):
                done |= consumer.pending.pop(earlier)
        state.record("commit", step=step, keys=self.finish(done))

    def take_back(self, step: int) -> None:
        """Take back every ack after ``step``: the weights that are restored do not contain it."""
        for consumer in self.state.consumers.values():
            later = [each for each in consumer.pending if each > step]
            for group in {group: None for each in later for group in consumer.pending.pop(each)}:
                use = group.uses[consumer.name]
                use.take_back(step)
                consumer.used.pop(group, None)
                if not use.epoch:
                    self._return(consumer, group, use)

    def finish(self, groups: Iterable[Group]) -> list[str]:
        """Forget groups that every consumer is done with; return the keys of their samples."""
        done = [group for group in groups if self._is_finished(group)]
        keys = [key for group in done for key in group.samples]
        self.consume(done)
        return keys

    def _is_finished(self, group: Group) -> bool:
        consumers = group.partition.consumers
        committed = self.state.committed
        return group.state == "published" and bool(consumers) and all(c.is_done(group, committed) for c in consumers)

    # -- using groups again

    def _retire_stale(self, consumer: Consumer, step: int | None, fresh: bool) -> None:
        """Give up groups that are too stale, now and ever after."""
        if step is None or consumer.reuse is None or consumer.reuse.max_staleness is None:
            return
        oldest = step - consumer.reuse.max_staleness
        groups = [*consumer.used, *(consumer.ready if fresh else ())]
        self._retire(consumer, [group for group in groups if oldest_version(group, oldest) < oldest], step)

    def _trim(self, consumer: Consumer, step: int) -> None:
        """Keep as many used groups as the consumer may: those that its sampler chooses first."""
        capacity = None if consumer.reuse is None else consumer.reuse.capacity
        if capacity is not None and len(consumer.used) > capacity:
            used = sorted(consumer.used, key=place_of)
            best = set(consumer.sampler.sample(ReadyGroups(consumer, used, step), capacity))
            self._retire(consumer, [group for group in used if str(group.key) not in best], step)

    def _retire(self, consumer: Consumer, groups: Sequence[Group], step: int) -> None:
        """Give up groups though the limits leave further uses; like an ack, final with the commit of ``step``."""
        if not groups:
            return
        for group in groups:
            self.withdraw(consumer, group)
            consumer.used.pop(group, None)
            group.uses.setdefault(consumer.name, Use()).retired = step
            self._note(consumer, group, step)
            self.state.touch(group.place)
            group.batch.notify()
        keys = [key for group in groups for key in group.samples]
        self.state.record("retire", consumer=consumer.name, step=step, keys=keys)
        self.finish(groups)


def _had(consumer: Consumer, batch: BatchState) -> QueueError:
    return QueueError(
        f"consumer {consumer.name!r} has had all groups of batch {batch.number} already",
        where=batch.name,
        fix="lease each batch once",
    )


def _not_held(consumer: Consumer, group: Group, lease: Lease) -> LeaseError:
    return LeaseError(
        f"consumer {consumer.name!r} does not hold group {group.key} under this lease any more",
        where=consumer.name,
        expected=f"a lease of epoch {lease.epoch}",
        found="a lease that was given back, acked, or ended with its holder",
        fix="lease the groups again",
    )
