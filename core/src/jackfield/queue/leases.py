"""Consumers: the groups that they may lease, hold and have acked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import attrs

from jackfield.abc.transfer_queue import KeysRequest
from jackfield.errors import QueueError
from jackfield.queue.choices import drawn, in_places, in_time, missing, places
from jackfield.queue.meta import BatchMeta, Lease, Reuse, SamplerSpec
from jackfield.queue.records import BatchState, Consumer, Group, Hold, State, Status, Use
from jackfield.queue.store import Controller
from jackfield.queue.values import leaving
from jackfield.sdk.archive import SavedSample, batches

_FILE_BYTES = 1 << 28  #: bytes of values per file of an archive


@attrs.define(eq=False)
class Leases:
    """The part of the queue that tracks readiness, leases and acks of whole groups."""

    core: Controller
    archive: Any = None  #: a ``jackfield_archive.Archive``: finished samples stay until it has them, ``rejected`` too
    deleting: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    rejected: list[tuple[list[SavedSample], int, Group | None]] = attrs.field(factory=list, init=False)

    async def register_consumer(
        self,
        name: str,
        partition: str,
        columns: Sequence[str],
        *,
        writes: Sequence[str] = (),
        sampler: SamplerSpec | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """Register a consumer, for which groups of ``partition`` are ready once their samples have ``columns``.

        Groups are deleted when every consumer of their partition is finally done with them. If the consumer is already
        registered, sampler and reuse are updated; another partition or other columns are refused (``queue.invalid``).

        It needs ``columns`` and, if it is a stage, adds those of ``writes``. The sampler chooses among ready groups
        (None: in order), and checkpoints keep its state. ``reuse`` says how often :meth:`lease` returns a group
        (None: once).
        """
        made = None if sampler is None else sampler.make()
        consumer = self.core.state.consumers.get(name)
        if consumer is None:
            consumer = Consumer(name, self.core.state.partition(partition), frozenset(columns), frozenset(writes))
            self.core.state.add_consumer(consumer)
        found = (consumer.partition.name, set(consumer.columns), set(consumer.writes))
        if found != (wanted := (partition, set(columns), set(writes))):
            message = f"consumer {name!r} is registered already, for another partition or other columns"
            raise QueueError(message, where=name, expected=found, found=wanted)
        consumer.sampler = consumer.sampler if made is None else made
        consumer.reuse = consumer.reuse if reuse is None else reuse
        consumer.offer_all()

    def changed(self, groups: Sequence[Group]) -> None:
        """Update readiness and completion of groups that were published or have changed samples or columns."""
        acked: dict[tuple[str, int], list[Group]] = {}  # by stages and their leases
        for group in groups:
            self.core.touch(group)
            for consumer in group.batch.partition.consumers:
                consumer.offer(group)
                if consumer.writes and consumer.name in group.uses and (hold := consumer.held.pop(group, None)):
                    acked.setdefault((consumer.name, hold.epoch), []).append(group)
        for (name, epoch), done in acked.items():
            self.core.record("ack", consumer=name, step=None, epoch=epoch, keys=_keys(done))
        self._finish(groups)

    async def lease(
        self,
        consumer: str,
        groups: int | None = None,
        *,
        batch: int | None = None,
        step: int | None = None,
        fresh: bool | None = True,
        max_staleness: int | None = None,
        again: Sequence[str] = (),
        deadline_seconds: float = 600.0,
    ) -> BatchMeta:
        """Lease groups, whose samples are ordered by rollout and sequence.

        With ``batch``, lease all groups of one batch that the consumer has not had, by index, and wait until the batch
        is complete and they are ready. If the batch was consumed or there is no such group, raise a QueueError; a stage
        then gets an empty batch. With ``groups``, too, lease that many of them in the order in which they became ready,
        and wait for no others.

        With ``max_staleness`` and ``step``, lease ``groups`` groups of all batches that the consumer has not used, the
        oldest weights first. Each step takes as many. The call also waits for groups that still run if later steps
        could not take all of these within ``max_staleness`` steps of the weights that they started with.

        With ``again``, lease the groups with these keys, or what is made in the place of those that were dropped.

        Otherwise, the consumer's sampler chooses among the groups of all batches: ``groups`` of them, or all ready
        ones and at least one. With ``fresh``, it waits for enough, also unused ones; otherwise it returns at once as
        many used groups as there are (None: of all). Those too stale at ``step`` are retired; resting ones stay.
        """
        mine = self.core.state.consumer(consumer)
        if groups is not None and groups < 1:
            raise QueueError("at least one group is leased", expected="1 or more", found=groups)

        def describe() -> str:
            batches = [each for number, each in mine.partition.batches.items() if batch in (None, number)]
            what = f"{groups or 1} groups" if batch is None else f"batch {batch}"
            return missing(batches, mine, f"{what} of partition {mine.partition.name!r} for consumer {mine.name!r}")

        choose = self._choice(mine, groups, batch, step, fresh, max_staleness, again)
        until = self.core.clock.time() + deadline_seconds
        mine.awaited.append(batch)
        self.core.wake()  # a producer under backpressure may generate what this call waits for
        try:
            while (found := choose()) is None:
                began, made = self.core.clock.time(), _are_made(mine, batch, groups, again)
                await self.core.wait(until, describe)
                waited = self.core.clock.time() - began
                self.core.metrics[f"waits/{consumer}/{'columns' if made else 'rollouts'}"] += waited
        finally:
            mine.awaited.remove(batch)
        return self._hold(mine, found)

    def _choice(
        self,
        mine: Consumer,
        groups: int | None,
        batch: int | None,
        step: int | None,
        fresh: bool | None,
        max_staleness: int | None,
        again: Sequence[str],
    ) -> Callable[[], list[Group] | None]:
        """Return what chooses groups for :meth:`lease`, or None while they are not ready."""
        if again:
            return lambda: in_places(mine, again)
        if batch is not None:
            return lambda: self._unused(mine, batch, groups)
        if max_staleness is not None:
            return lambda: in_time(mine, groups or 1, step or 0, max_staleness)
        return lambda: self._choose(mine, groups, step, fresh)

    def _hold(self, consumer: Consumer, groups: Sequence[Group]) -> BatchMeta:
        """Have a consumer hold groups under one lease."""
        consumer.epoch += bool(groups)
        hold = Hold(consumer.epoch, self.core.caller())
        for group in groups:
            consumer.usable.pop(group, None)
            consumer.held[group] = hold
            group.batch.moved = self.core.clock.time()
        keys = tuple(_keys(groups))
        return BatchMeta(
            keys=keys,
            tags=tuple(chain.from_iterable([group.all_tags() for group in groups])),
            groups=tuple(chain.from_iterable([repeat(group.name, len(group.samples)) for group in groups])),
            leases=(Lease(consumer.partition.name, consumer.name, consumer.epoch),) * len(keys),
        )

    def _unused(self, consumer: Consumer, batch: int, count: int | None) -> list[Group] | None:
        """Return the groups of a complete batch that a consumer has not had, or None while they are not ready.

        With ``count``, return the first ones that became ready.
        """
        batches, name = consumer.partition.batches, f"{consumer.partition.name}/{batch}"
        found = batches.get(batch)
        if batch < 0 or (found is None and batch < consumer.partition.next_batch):
            expected = f"one of {sorted(batches)} or a later one"
            raise QueueError("the batch has been consumed", where=name, expected=expected, found=batch)
        if found is None:
            return None  # no explorer has claimed it
        found.require_well()
        if count is not None:
            ready = [group for group in consumer.usable if group.batch is found and consumer.is_fresh(group)]
            return ready[:count] if len(ready) >= count else None
        left = (group for group in found.groups if group.status != Status.CONSUMED)
        if not all(consumer.is_fresh(group) or (group.is_made and consumer.has_had(group)) for group in left):
            return None
        fresh = [group for group in found.groups if consumer.is_fresh(group)]
        if not fresh and not consumer.writes:
            message = f"consumer {consumer.name!r} has had all groups of the batch already"
            raise QueueError(message, where=name, fix="lease each batch once")
        return fresh

    def _choose(self, consumer: Consumer, count: int | None, step: int | None, fresh: Any) -> list[Group] | None:
        """Return groups that a consumer's sampler chooses, or None while there are too few."""
        self._retire_stale(consumer, step, fresh is not False)
        usable = [group for group in consumer.usable if consumer.is_rested(group, step, fresh is not False)]
        wanted = (count or 1) if fresh else 0
        chosen = drawn(consumer, usable, step, count) if len(usable) >= wanted else []
        return chosen if len(chosen) >= wanted else None

    def held(self, meta: BatchMeta, *, whole: bool = True) -> dict[tuple[Consumer, int], list[Group]]:
        """Return the existing groups of a batch by lease, and check that leases are valid and groups whole."""
        found: dict[tuple[Consumer, int], list[Group]] = {}
        named = set(meta.keys)
        for name, lease in dict(zip(meta.groups, meta.leases, strict=True)).items():
            group, consumer = self.core.state.group(name), self.core.state.consumer(lease.consumer)
            if group is None or not (whole or named & group.samples.keys()):
                continue
            hold = consumer.held.get(group)
            if hold is None or hold.epoch != lease.epoch:
                message = f"consumer {consumer.name!r} does not hold group {name} under this lease any more"
                ended = "a lease that was given back, acked, or ended with its holder"
                details = {"where": consumer.name, "expected": f"a lease of epoch {lease.epoch}", "found": ended}
                raise QueueError(message, code="queue.lease", fix="lease the groups again", **details)
            if whole and not named.issuperset(group.samples):
                message = f"group {name} is leased as a whole and cannot be acked or given back in part"
                raise QueueError(message, where=name, expected=f"all of its {len(group.samples)} samples")
            found.setdefault((consumer, lease.epoch), []).append(group)
        return found

    async def release(self, meta: BatchMeta) -> None:
        """Release leased groups, which become ready again for the same consumer."""
        for (consumer, _), groups in self.held(meta).items():
            for group in groups:
                self._return(consumer, group)

    async def take_over(self, consumer: str) -> None:
        """End all leases of a consumer whose holder is gone."""
        self.end(lambda each, hold: each is self.core.state.consumer(consumer))

    def end(self, is_over: Callable[[Consumer, Hold], bool]) -> None:
        """End the leases for which ``is_over`` holds."""
        for consumer in self.core.state.consumers.values():
            over: dict[int, list[Group]] = {}
            for group, hold in consumer.held.items():
                if is_over(consumer, hold):
                    over.setdefault(hold.epoch, []).append(group)
            for epoch, groups in over.items():
                self.core.record("expire", consumer=consumer.name, epoch=epoch, keys=_keys(groups))
                for group in groups:
                    self._return(consumer, group)

    def _return(self, consumer: Consumer, group: Group) -> None:
        """End a consumer's lease and offer it the group again, if it may use it."""
        self.core.touch(group)
        consumer.held.pop(group, None)
        consumer.offer(group)

    async def ack(self, meta: BatchMeta, step: int | None = None, mini_batch: int | None = None) -> None:
        """Ack leased groups. The ack becomes final with the commit of ``step``, or at once without a step.

        The ledger records the ``mini_batch`` of the step.
        """
        for (consumer, epoch), groups in self.held(meta).items():
            for group in groups:
                group.uses.setdefault(consumer.name, Use()).steps.append(step)
                self._return(consumer, group)
            part = {} if mini_batch is None else {"mini_batch": mini_batch}
            self.core.record("ack", consumer=consumer.name, step=step, epoch=epoch, keys=_keys(groups), **part)
            if step is not None and (capacity := consumer.reuse.capacity) is not None:
                used = [group for group in consumer.usable if consumer.name in group.uses]
                best = set(drawn(consumer, used, step, capacity) if len(used) > capacity else used)
                self._retire(consumer, [group for group in used if group not in best], step)
            self._finish(groups)

    async def commit(self, step: int) -> None:
        """Make all acks up to ``step``, whose checkpoint is durable, final, and archive what is to be deleted."""
        core = self.core
        async with self.deleting:
            core.state.committed = max(step, core.state.committed)
            done, keys = self._finish(list(core.state.groups.values()))
            core.record("commit", step=step, keys=keys)
            coming = [leaving(group, dict.fromkeys(group.samples)) for group in done if self.archive]
            for part in batches([*coming, *self.rejected], itemgetter(1), _FILE_BYTES):
                file, keys = await self.archive.write(core.backend, [each for some, *_ in part for each in some])
                # from here to the next wait, file, ledger and state change together
                name = self.archive.publish(file, core.store.end, len(core.store.coming) + 1)
                core.record("archive", file=name, keys=keys)
                self.consume([group for *_, group in part if group and group.status == Status.PUBLISHED])
                self.rejected = self.rejected[sum(group is None for *_, group in part) :]  # they come last
                core.discard(each.key for some, _, group in part if group is None for each in some)

    def take_back(self, step: int) -> None:
        """Revoke every ack after ``step``, because the restored weights do not contain it."""
        for group in self.core.state.groups.values():
            for name, use in list(group.uses.items()):
                if use.last_step() <= step:
                    continue
                use.steps = [each for each in use.steps if each is None or each <= step]
                use.retired = None if use.retired is not None and use.retired > step else use.retired
                if not use.steps and use.retired is None:
                    del group.uses[name]
                self._return(self.core.state.consumers[name], group)

    def _finish(self, groups: Iterable[Group]) -> tuple[list[Group], list[str]]:
        """Return groups that every consumer is done with, and their samples; delete them if there is no archive."""
        done = []
        for group in groups:
            consumers = group.batch.partition.consumers if group.status == Status.PUBLISHED else []
            if consumers and all(each.is_done(group, self.core.state.committed) for each in consumers):
                done.append(group)
        keys = _keys(done)
        if self.archive is None:
            self.consume(done)
        return done, keys

    def consume(self, groups: Sequence[Group], reason: str | None = None) -> None:
        """Delete groups that every consumer is done with, or for a reason, and batches without groups."""
        for group in groups:
            self.forget(group, reason)
            group.status = Status.CONSUMED
        for batch in {group.batch: None for group in groups}:
            if all(group.status == Status.CONSUMED for group in batch.groups):
                del batch.partition.batches[batch.number]
                self.core.store.changed.update(dict.fromkeys(batch.groups))

    def require_free(self, groups: Iterable[Group]) -> None:
        """Raise an error if an acking consumer has leased or acked one of the groups."""
        for group in groups:
            if names := group.holders():
                message, found = "the group cannot be changed", f"leased or acked by {', '.join(sorted(names))}"
                expected = "a group that no consumer which acks has leased"
                raise QueueError(message, where=group.name, expected=expected, found=found)

    async def lost(self, state: State) -> set[str]:
        """Return the samples of a state whose values are no longer in the backend."""
        known = {  # before the backend answers: it may not list what is written meanwhile
            (group.batch.partition.name, key): set(sample.columns)
            for group in state.groups.values()
            for key, sample in group.samples.items()
        }
        there = (await self.core.backend.keys(KeysRequest())).samples
        return {key for (name, key), columns in known.items() if not columns <= set(there.get((name, key), ()))}

    def until(self, batches: Sequence[BatchState], since: float, seconds: float) -> float:
        """Return the end of a wait that restarts at each change of a batch, and is infinite while one is leased."""
        held = [consumer.held for batch in batches for consumer in batch.partition.ends() if consumer.held]
        made = (group for batch in batches if held and batch.is_complete for group in batch.groups)
        is_leased = any(group in groups for group in made for groups in held)
        return float("inf") if is_leased else max(since, *(batch.moved for batch in batches)) + seconds

    def is_demanded(self, batch: BatchState) -> bool:
        """Return whether a consumer waits for the batch, or for any group while no other consumer has work."""
        consumers = batch.partition.consumers
        if any(batch.number in consumer.awaited for consumer in consumers):
            return True
        busy = {each.name for each in consumers if each.held or any(map(each.is_fresh, each.usable))}
        starving = any(None in consumer.awaited and busy <= {consumer.name} for consumer in consumers)
        batches = batch.partition.batches.values()
        return starving and batch is next((each for each in batches if not each.is_complete and not each.failure), None)

    def forget(self, group: Group, reason: str | None = None) -> None:
        """Remove a group's current retry, which was dropped if there is a reason. Its values are deleted."""
        for consumer in group.batch.partition.consumers:
            consumer.usable.pop(group, None)
            consumer.held.pop(group, None)
        self.remove(group, dict.fromkeys(group.samples, reason), "dropped")
        del self.core.state.groups[group.name]
        group.status, group.ended, group.uses = Status.ASSIGNED, {}, {}
        self.core.touch(group)

    def remove(self, group: Group, reasons: Mapping[str, str | None], status: str) -> None:
        """Remove samples from their group. Their values are deleted, or archived first if there are reasons."""
        if self.archive is not None and any(reasons.values()):
            self.rejected.append(leaving(group, reasons, status))
        else:
            self.core.discard(reasons, group.batch.partition.name)
        self.core.state.count(-len(reasons), -sum([group.samples.pop(key).bytes for key in reasons]))

    def _retire_stale(self, consumer: Consumer, step: int | None, fresh: bool) -> None:
        if step is None or consumer.reuse.max_staleness is None:
            return
        oldest, stale = step - consumer.reuse.max_staleness, []
        for group in consumer.usable:
            versions = [int(sample.tags.get("weight_version_min", oldest)) for sample in group.samples.values()]
            if min(versions, default=oldest) < oldest and (fresh or consumer.name in group.uses):
                stale.append(group)
        self._retire(consumer, stale, step)

    def _retire(self, consumer: Consumer, groups: Sequence[Group], step: int) -> None:
        """Retire groups that have uses left. Like an ack, it becomes final with the commit of ``step``."""
        for group in groups:
            group.uses.setdefault(consumer.name, Use()).retired = step
            self._return(consumer, group)
        if groups:
            self.core.record("retire", consumer=consumer.name, step=step, keys=_keys(groups))
            self._finish(groups)


def _are_made(consumer: Consumer, batch: int | None, count: int | None, again: Sequence[str] = ()) -> bool:
    """Return whether the groups that a lease waits for are made and lack only columns."""
    if again:
        return all(group.is_made for group in places(consumer, again))
    batches = [each for number, each in consumer.partition.batches.items() if batch in (None, number)]
    groups = [group for each in batches for group in each.groups if not consumer.has_had(group)]
    wanted = count or (len(groups) if batch is not None else 1)
    return bool(groups) and sum(group.is_made for group in groups) >= wanted


def _keys(groups: Iterable[Group]) -> list[str]:
    return list(chain.from_iterable([group.samples for group in groups]))
