"""Samples of whole groups, whatever their tickets: used ones again, those of a partition that has no schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jackfield.queue.leasing import Leasing
from jackfield.queue.meta import BatchMeta
from jackfield.queue.missing import missing_sample
from jackfield.queue.records import Ack, Consumer, Group, Row
from jackfield.queue.reuse import Uses
from jackfield.queue.waiting import wait

__all__ = ["Sampling"]


class Sampling(Leasing):
    """Which groups a consumer may use, and when it is done with them."""

    #: Forgets rows that nobody needs any more; the controller's.
    consume: Callable[[Sequence[Row]], None]

    async def sample_groups(
        self, name: str, groups: int, step: int, *, fresh: bool, deadline_seconds: float
    ) -> BatchMeta:
        """See :meth:`jackfield.queue.TransferQueue.sample_groups`."""
        state, consumer = self._state, self._state.consumer(name)
        until = state.clock.time() + deadline_seconds
        while True:
            self.require_open()
            self._retire_stale(consumer, step, fresh)
            ready = _ReadyGroups(consumer, self._usable(consumer, step, fresh), step)
            if len(ready) >= groups or not fresh:
                chosen = consumer.sampler.sample(ready, groups)
                self._check_sample(consumer, chosen, len(chosen) == len(set(chosen) & set(ready)) <= groups)
                if len(chosen) == groups or not fresh:
                    batch = self._grant_whole(consumer, [ready.groups[name] for name in chosen])
                    for ticket in {ready.groups[name].slot.ticket: None for name in chosen}:
                        ticket.changed.notify()
                    if len(ready) > groups:
                        consumer.groups.pass_on()
                    return batch
            consumer.groups.pass_on()  # somebody else may need fewer
            await self._wait_for_sample(consumer, groups, len(ready), until)

    async def _wait_for_sample(self, consumer: Consumer, groups: int, ready: int, until: float) -> None:
        state, future = self._state, consumer.groups.join()
        consumer.sample_demand += 1
        state.room.notify()  # a producer that is held back may be the one that is waited for
        try:
            await wait(state.clock, future, until, lambda: missing_sample(state, consumer, groups, ready))
        except BaseException:
            consumer.groups.leave(future)
            raise
        finally:
            consumer.sample_demand -= 1

    @staticmethod
    def _usable(consumer: Consumer, step: int, fresh: bool) -> list[Group]:
        """Groups that may be used at ``step``, in the order of ticket and slot."""
        reuse = consumer.reuse
        rested = (
            []
            if reuse is None
            else [
                group
                for group, uses in consumer.used.items()
                if uses.may_be_used_again(reuse)
                and all(each is None or step - each > reuse.cooldown for each in uses.steps[-1:])
                and not any(row in consumer.leased for row in group.rows)
            ]
        )
        unused = Sampling._unused(consumer) if fresh else []
        return sorted([*rested, *unused], key=lambda group: (group.slot.ticket.number, group.slot.index))

    @staticmethod
    def _unused(consumer: Consumer) -> list[Group]:
        tickets = consumer.partition.tickets.values()
        return [group for ticket in tickets for group in ticket.ready.get(consumer, {}).values()]

    def _retire_stale(self, consumer: Consumer, step: int, fresh: bool) -> None:
        """Let groups go that are too stale, now and ever after."""
        if consumer.reuse is None or consumer.reuse.max_staleness is None:
            return
        oldest = step - consumer.reuse.max_staleness
        groups = [*consumer.used, *(self._unused(consumer) if fresh else ())]
        self._retire(consumer, [group for group in groups if _version(group, oldest) < oldest], step)

    def _retire(self, consumer: Consumer, groups: Iterable[Group], step: int) -> None:
        """Be done with groups though the limits leave further uses; like an ack, final with the commit of ``step``."""
        committed = self._state.committed
        final, keys, consumed = committed is not None and step <= committed, list[str](), list[Row]()
        for group in groups:
            uses = consumer.used.setdefault(group, Uses())
            if not uses.may_be_used_again(consumer.reuse) or any(row in consumer.leased for row in group.rows):
                continue
            uses.retired = step
            group.slot.touch()
            if consumer not in group.held_by:
                self._hold(consumer, group)
            for row in group.rows:
                if row in consumer.ready:
                    self._withdraw(consumer, row)
                consumer.acked[row] = Ack(step, final)
                if not final:
                    consumer.provisional.setdefault(step, {})[row] = None
                elif self.finish(consumer, row):
                    consumed.append(row)
            keys += [row.key for row in group.rows]
        if keys:
            self._state.record("retire", consumer=consumer.name, step=step, keys=keys)
        self.consume(consumed)

    def finish(self, consumer: Consumer, row: Row) -> bool:
        """An ack of a row is final: whether nobody needs the row any more."""
        uses = consumer.used.get(row.group)
        if uses is not None and (uses.may_be_used_again(consumer.reuse) or not uses.is_final(self._state.committed)):
            return False
        row.done |= consumer.bit
        return all(row.done & other.bit for other in row.group.partition.consumers)

    def _trim(self, consumer: Consumer, step: int) -> None:
        """Keep as many used groups as the consumer may, those that its sampler chooses first."""
        capacity = None if consumer.reuse is None else consumer.reuse.capacity
        kept = [group for group, uses in consumer.used.items() if uses.may_be_used_again(consumer.reuse)]
        if capacity is not None and len(kept) > capacity:
            ready = _ReadyGroups(consumer, kept, step)
            best = set(consumer.sampler.sample(ready, capacity))
            self._retire(consumer, [group for group in kept if group.id not in best], step)


class _ReadyGroups:
    """The groups that a consumer could have, as a sampler sees them."""

    def __init__(self, consumer: Consumer, groups: Iterable[Group], step: int) -> None:
        self.step = step
        self.groups = {group.id: group for group in groups}
        self._consumer = consumer

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def tags(self, name: str) -> Mapping[str, Any]:
        tags = [row.all_tags() for row in self.groups[name].rows]
        bounds = {}
        for bound, choose in (("weight_version_min", min), ("weight_version_max", max)):
            versions = [each[bound] for each in tags if bound in each]
            if versions:
                bounds[bound] = choose(versions)
        return {**tags[0], **bounds}

    def uses(self, name: str) -> int:
        uses = self._consumer.used.get(self.groups[name])
        return 0 if uses is None else len(uses.steps)


def _version(group: Group, otherwise: int) -> int:
    """Of the oldest weights that made a token of the group; what nobody generated is as old as ``otherwise``."""
    return min(
        (int(row.tags["weight_version_min"]) for row in group.rows if "weight_version_min" in row.tags),
        default=otherwise,
    )
