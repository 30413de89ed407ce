"""Batches and their groups: assignment to explorers, backpressure, rollouts, failures, and losses."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal

import attrs

from jackfield.errors import DeadlineExceeded, QueueError, some
from jackfield.queue.choices import being_made, missing
from jackfield.queue.leases import Leases
from jackfield.queue.meta import Batch, BatchMeta, GroupKey, NewGroup, RolloutReport, Written, group_of
from jackfield.queue.records import BatchState, Group, Sample, Status, sequence_of
from jackfield.queue.store import Controller

_GONE = "its values are gone from the store, or damaged in it"
_columns = functools.lru_cache(maxsize=1024)(frozenset[str])  # samples share them


@attrs.define(eq=False)
class Groups:
    """The part of the queue for producers: it hands out, opens, publishes, retries and drops groups."""

    core: Controller
    leases: Leases
    max_samples: int | None
    max_bytes: int | None
    max_retries: int
    minimum_rows: int | None = None  #: rollouts with a sample that are enough for a group; None: all
    _claims: Counter[str] = attrs.field(factory=Counter, init=False)  # number of new batches, by explorer
    _mean: float = attrs.field(default=0.0, init=False)  # last known mean bytes of a sample
    _feeds: list[tuple[str, list[str]]] = attrs.field(factory=list, init=False)  # partition and pending keys

    async def claim_batch(
        self,
        partition: str,
        explorer: str,
        groups: int,
        *,
        rollouts: int = 1,
        below: int | None = None,
        share: float | None = None,
        deadline_seconds: float = 600.0,
    ) -> Batch | None:
        """Claim the next batch to generate. Return None when all batches below ``below`` are final.

        Released batches come first, with their published groups. If all batches below ``below`` are claimed, wait,
        since another one may be released; without it, never. ``share`` is the part to claim while others explore.
        ``rollouts`` is the expected number per group, for backpressure. The deadline runs only while nothing changes.
        """
        since, named = self.core.clock.time(), f"{explorer!r}, {groups}"
        if groups < 1 or rollouts < 1 or not explorer:
            raise QueueError("a batch is for a named explorer and one group or more", found=named)
        while True:
            mine = self.core.state.partition(partition)
            offered = (each for each in mine.batches.values() if each.is_offered and not each.failure)
            batch = next((each for each in offered if not each.is_final()), None)
            unready = (each for each in mine.batches.values() if share is not None and not each.is_complete)
            others = any(each.explorers.keys() - {explorer} for each in unready)
            waits = others and self._claims[explorer] >= (share or 0.0) * (self._claims.total() + 1)
            if below is None or (mine.next_batch + below * waits if batch is None else batch.number) < below:
                if batch is None:
                    self._claims[explorer] += 1
                    batch = mine.batches[mine.next_batch] = BatchState(mine, mine.next_batch, rollouts)
                    mine.next_batch += 1
                    batch.groups = [Group(batch, index) for index in range(groups)]
                    for group in batch.groups:
                        self.core.touch(group)
                batch.is_offered, batch.explorers[explorer] = False, self.core.caller()
                return Batch(partition, batch.number, len(batch.groups), explorer, len(batch.vacant()))
            left = [each for number, each in mine.batches.items() if number < below and not each.is_final()]
            for each in left:
                each.require_well()
            if not left:
                return None
            await self.core.wait(self.leases.until(left, since, deadline_seconds), functools.partial(missing, left[:1]))

    async def end_holder(self, client: str, name: str = "a client") -> None:
        """End the leases of a client that is gone; hand out its explorers' batches again, published groups kept."""
        consumers, held = self.core.state.consumers.values(), list[str]()
        held += [group.name for each in consumers for group, hold in each.held.items() if hold.client == client]
        for batch in self.core.state.batches():
            for explorer in sorted(name for name, each in batch.explorers.items() if each == client):
                del batch.explorers[explorer]
                if batch.is_complete or batch.failure is not None:
                    continue
                again = [group for group in batch.groups if group.explorer == explorer and not group.is_made]
                for group in again:
                    if group.status == Status.OPEN:
                        held += [f"{group.name}/{rollout}" for rollout in group.running()]
                        self.leases.forget(group)
                    group.reissue += 1
                    self._vacate(group)
                batch.is_offered |= not batch.explorers and bool(batch.vacant())
                at, why = [each.index for each in again], f"explorer {explorer!r} was released"
                self.core.record("release", partition=batch.partition.name, batch=batch.number, groups=at, reason=why)
        self.leases.end(lambda consumer, hold: hold.client == client)
        if held:
            logging.getLogger("jackfield").warning("%s held %s, which others get now", name, some(held))

    async def groups_to_fill(
        self, batch: Batch, deadline_seconds: float, *, until: Literal["final", "published"] = "final"
    ) -> AsyncIterator[tuple[GroupKey, ...]]:
        """Yield lists of groups to generate: first all vacant ones that have room, later the retries.

        With ``until="final"`` it ends when a consumer has acked all groups, so that none can be dropped any more; else
        when all are published: if one is dropped afterwards, the batch is offered to the next claimant. The deadline
        runs only while the batch does not change and no consumer works with its groups. If there was no room for a
        group in time, raise ``queue.full``; if the batch was released, ``QueueError``.
        """
        partition = self.core.state.partition(batch.partition)
        state, since = partition.batches.get(batch.number), self.core.clock.time()
        if not 0 <= batch.number < partition.next_batch:
            raise QueueError(f"batch {batch.number} has not been claimed", where=batch.partition)
        if state is None:
            return  # consumed
        state.readers += 1
        try:
            while True:
                await asyncio.sleep(0)  # let a woken consumer run first: it may not need the groups any more
                if self._is_over(state, batch.explorer, until):
                    return
                vacant, keys = state.vacant(), list[GroupKey]()
                room = self._room() if vacant else 0
                for group in vacant:
                    if room < state.rollouts and not self.leases.is_demanded(state):
                        break
                    group.status, group.explorer = Status.ASSIGNED, batch.explorer
                    room -= state.rollouts
                    self.core.touch(group)
                    keys.append(group.key)
                if keys:
                    self.core.store.write(self.core.state)
                    yield tuple(keys)
                    since = self.core.clock.time()
                else:
                    await self._wait_to_fill(state, since, deadline_seconds)
        finally:
            state.readers -= 1
            state.offer()
            self.core.wake()

    def _is_over(self, batch: BatchState, explorer: str, until: Literal["final", "published"]) -> bool:
        """Return whether an explorer will get no more groups of a batch."""
        self.core.require_open()
        batch.require_well()
        now = self.core.state.partition(batch.partition.name).batches.get(batch.number)
        if now is None or (batch.is_final() if until == "final" else batch.is_complete):
            return True
        if now is not batch or explorer not in batch.explorers:
            message, expected = "the batch was taken from this explorer", f"one of {sorted(now.explorers)}"
            raise QueueError(message, where=batch.name, expected=expected, found=explorer, fix="claim a batch")
        return False

    async def _wait_to_fill(self, batch: BatchState, since: float, seconds: float) -> None:
        """Wait until the batch changes or there may be room for its vacant groups."""
        until = self.leases.until([batch], max(since, self.core.moved) if batch.vacant() else since, seconds)
        try:
            await self.core.wait(until, lambda: missing([batch]))
        except DeadlineExceeded as error:
            if not batch.vacant():
                raise
            what, found = f"the queue stayed full for {seconds:.6g} s", self.core.state
            expected = f"room for a group within {self.max_samples} samples and {self.max_bytes} bytes"
            fix = "look at why consumers do not ack and commit, or raise max_samples, max_bytes or the deadline"
            details = {"expected": expected, "found": f"{found.samples} samples, {found.bytes} bytes", "fix": fix}
            raise QueueError(what, code="queue.full", where=batch.name, **details) from error

    def _room(self) -> float:
        """Return how many samples fit in addition to those that exist or are being generated."""
        state = self.core.state
        if self.max_samples is None and self.max_bytes is None:
            return float("inf")
        self._mean = state.bytes / state.samples if state.samples else self._mean
        coming = being_made(state)
        room = float("inf") if self.max_samples is None else self.max_samples - state.samples - coming
        if self.max_bytes is not None and self._mean:
            room = min(room, (self.max_bytes - state.bytes) / self._mean - coming)
        return room

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
                message, expected = "the group is not this explorer's any more", f"{group.key}, assigned and not opened"
                raise QueueError(message, where=str(key), expected=expected, found=group.status.name.lower())
            group.status, group.name = Status.OPEN, str(key)
            group.task_id, group.rollouts, group.tags, group.version = new.task_id, new.rollouts, new.tags, new.version
            self.core.state.groups[group.name] = group

    async def end_rollouts(self, reports: Sequence[RolloutReport]) -> tuple[str, ...]:
        """Record that rollouts have ended, after the values of their samples were put into the backend.

        Return the rejected keys, whose group was dropped or whose rollout was reported before; they are deleted.
        """
        stray, published = list[str](), dict[Group, dict[str, str]]()
        groups = [self.core.state.group(report.group) for report in reports]
        for group, report in zip(groups, reports, strict=True):
            if group is not None and not 0 <= report.rollout < group.rollouts:
                raise QueueError("the group has no such rollout", where=report.group, found=report.rollout)
        for group, report in zip(groups, reports, strict=True):
            if group is None or group.is_made or report.rollout in group.ended:
                known = {} if group is None else group.samples
                stray += [key for key in report.keys if key not in known]  # dropped, or reported before
                continue
            self._end_rollout(group, report)
            if len(group.ended) == group.rollouts:
                ordered = sorted(group.samples.items(), key=lambda item: (item[1].rollout, sequence_of(item[0])))
                group.samples, group.status = dict(ordered), Status.PUBLISHED
                published[group] = {}
        self._settle(published)
        self.core.discard(stray)
        return tuple(stray)

    def _end_rollout(self, group: Group, report: RolloutReport) -> None:
        """Record the outcome of a rollout."""
        columns, tags = _columns(tuple(report.written.columns)), report.written.tags or ({},) * len(report.keys)
        for key, size, own in zip(report.keys, report.written.sizes, tags, strict=True):
            if (made := report.lineage.get(key)) is not None:  # tags show the lineage
                own = {**own, "operation": made.operation, "parents": list(made.parents)}
            group.samples[key] = Sample(report.rollout, own, columns, size)
        self.core.state.count(len(report.keys), sum(report.written.sizes))
        self.core.metrics.update(report.written.metrics)  # adds
        if group.version is not None:  # an agent generated them
            self.core.metrics["generated/samples"] += len(report.keys)
            self.core.metrics["generated/response_tokens"] += sum(own.get("response_tokens", 0) for own in tags)
        group.ended[report.rollout] = report.error
        if report.error is not None:
            self.core.fail(f"{group.name}/{report.rollout}", report.error)
        for key, made in report.lineage.items():
            self.core.store.derived[key] = made
            self.core.record("derive", key=key, operation=made.operation, parents=list(made.parents))
        for partition, feed in self._feeds:
            if partition == group.batch.partition.name:
                feed += report.keys

    def _settle(self, groups: Mapping[Group, Mapping[str, str]], minimum: int | None = None) -> None:
        """Publish groups whose rollouts have ended and have samples, or retry them, without those with a reason."""
        changed = []
        for group, failed in groups.items():
            for key, reason in failed.items():
                self.core.fail(key, reason)
            self.leases.remove(group, failed, "failed")
            lost = sorted(set(range(group.rollouts)) - {sample.rollout for sample in group.samples.values()})
            least = minimum or self.minimum_rows or group.rollouts
            if group.is_made and len(lost) <= max(0, group.rollouts - least):
                changed.append(group)
            elif group.is_made:
                counted = Counter(why for _, why in sorted(group.ended.items()) if why is not None)
                errors = "; ".join(f"{count} × {why}" for why, count in counted.most_common(3))
                shortage = errors or f"rollouts without a surviving sample: {', '.join(map(str, lost))}"
                for rollout in lost if not (failed or errors) else ():
                    self.core.fail(f"{group.name}/{rollout}", shortage)
                self._retry(group, [*failed.values()][-1] if failed else shortage)
        self.leases.changed(changed)

    async def new_samples(self, partition: str) -> AsyncIterator[tuple[str, ...]]:
        """Yield the keys of samples as their rollouts end, without a lease, while others of their group still run.

        A published group is skipped: consumers may lease it. The iteration ends when the queue closes.
        """
        batches = self.core.state.partition(partition).batches.values()
        feed = [key for batch in batches for group in batch.groups for key in group.samples]
        self._feeds.append(entry := (partition, feed))
        try:
            while self.core.deletion is not None:
                found = [(key, self.core.state.groups.get(group_of(key))) for key in feed]
                coming = tuple(key for key, group in found if group and not group.is_made and key in group.samples)
                feed.clear()
                if coming:
                    yield coming
                else:
                    await self.core.change.wait()
        finally:
            self._feeds = [each for each in self._feeds if each is not entry]

    async def drop_groups(self, groups: Sequence[str], reason: str, *, counts: bool = True, again: bool = True) -> None:
        """Drop groups, and retry them, or without ``again`` have their batches go on without them.

        Groups that are gone are skipped; ``counts``: max_retries limits retries. The last of a batch is always retried.
        If an acking consumer has leased a group, or it never existed, raise a QueueError and drop none.
        """
        found = [each for name in groups if (each := self.core.state.group(name)) is not None]
        self.leases.require_free(found)
        for group in found:
            if again or sum(each.status != Status.CONSUMED for each in group.batch.groups) == 1:
                self._retry(group, reason, counts)
            else:
                self.core.record("drop", group=group.name, task_id=group.task_id, reason=reason)
                self.leases.consume([group], reason)

    async def fail_samples(self, reasons: Mapping[str, str], *, minimum: int | None = None) -> None:
        """Fail samples by key; groups with ``minimum`` rollouts left (None: as configured) are kept, others retried.

        Samples that are gone are skipped. If an acking consumer has leased such a group, raise a QueueError.
        """
        self.leases.require_free(found := self._by_group(reasons))
        self._settle(found, minimum)

    def _by_group(self, reasons: Mapping[str, str]) -> dict[Group, dict[str, str]]:
        """Return the reasons of existing samples by group."""
        found, group_with = dict[Group, dict[str, str]](), self.core.state.group_with
        for key, group in ((key, each) for key in reasons if (each := group_with(key)) is not None):
            found.setdefault(group, {})[key] = reasons[key]
        return found

    async def fail_lost(self, meta: BatchMeta | None = None, keys: Sequence[str] = ()) -> tuple[str, ...]:
        """Fail the samples whose values the backend has lost, and retry groups with too few samples left.

        A group that an acking consumer has leased is kept, as the consumer may have read everything. If it has not, it
        passes its batch as ``meta``, which is released, and leases its groups again. Acked groups are not retried.
        ``keys`` are lost samples that ``queue.lost`` named. Return the keys of those that are gone from the queue.
        """
        lost = list(dict.fromkeys([*keys, *sorted(await self.leases.lost(self.core.state))]))
        mine = [] if meta is None else [group for groups in self.leases.held(meta).values() for group in groups]
        there = [key for key in lost if self.core.state.knows(key)]
        for group, gone in self._by_group(dict.fromkeys(there, _GONE)).items():
            if group in mine or group.is_acked() or not group.holders():
                self.core.record("lose", group=group.name, keys=list(gone), reason=_GONE)
                if group.is_acked():
                    self.leases.consume([group])
                else:
                    self._settle({group: gone})
        if failed := [key for key in there if not self.core.state.knows(key)]:
            what = "values of %d samples are gone from the queue's store, or damaged; what is needed is made again: %s"
            logging.getLogger("jackfield").warning(what, len(failed), some(failed))
        return tuple(key for key in lost if not self.core.state.knows(key))

    def _retry(self, group: Group, reason: str, counts: bool = True) -> None:
        """Drop a group and retry its index, or fail its batch after too many retries that count."""
        self.leases.forget(group, reason)
        group.reasons += [reason] * counts
        group.retry, group.reissue = (group.retry + 1, 0) if counts else (group.retry, group.reissue + 1)
        self.core.record("drop", group=group.name, task_id=group.task_id, reason=reason)
        if group.retry <= self.max_retries:
            self._vacate(group)
        else:
            counted = Counter(group.reasons).most_common(3)
            why = "; ".join(each if count == 1 else f"{each} ({count} times)" for each, count in counted)
            group.batch.failure = f"{why}; index {group.index} was made again {self.max_retries} times"

    def _vacate(self, group: Group) -> None:
        """Have a group handed out again."""
        group.status, group.explorer, group.batch.is_handed_out = Status.VACANT, None, False
        self.core.touch(group)
        group.batch.offer()

    async def add_columns(self, target: BatchMeta | Sequence[str], written: Written) -> tuple[str, ...]:
        """Record that columns of samples are in the backend, and wake consumers whose columns are complete.

        The holder of a lease may replace columns; without a lease a column that exists is refused (``queue.column``).
        Return the keys of samples that still exist. The values of the others are deleted.
        """
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        tags, columns = written.tags, frozenset(written.columns)
        self.core.metrics.update(written.metrics)  # adds
        if isinstance(target, BatchMeta):
            self.leases.held(target, whole=False)
        if len(set(keys)) != len(keys) or len(written.sizes) != len(keys) or len(tags or keys) != len(keys):
            raise QueueError("something is written of each sample once", expected=f"{len(keys)} distinct samples")
        names = target.groups if isinstance(target, BatchMeta) else tuple(map(group_of, keys))
        groups = {name: self.core.state.group(name) for name in dict.fromkeys(names)}
        known: dict[str, dict[str, Sample]] = {n: {} if group is None else group.samples for n, group in groups.items()}
        samples = [known[name].get(key) for key, name in zip(keys, names, strict=True)]
        for key, sample in () if isinstance(target, BatchMeta) else zip(keys, samples, strict=True):
            if sample is not None and (clash := columns & sample.columns):
                message = f"column {', '.join(sorted(clash))} of sample {key} is written already"
                raise QueueError(message, code="queue.column", where=key, fix="write a column once, or under a lease")
        wider: dict[frozenset[str], frozenset[str]] = {}  # samples share them
        for sample, size, more in zip(samples, written.sizes, tags or ({},) * len(keys), strict=True):
            if sample is None:
                continue
            if not columns <= sample.columns:
                sample.bytes += size
                self.core.state.count(0, size)
            sample.columns = wider.get(sample.columns) or wider.setdefault(sample.columns, sample.columns | columns)
            if more:
                sample.tags = {**sample.tags, **more}
        living = {key: name for key, name, sample in zip(keys, names, samples, strict=True) if sample is not None}
        self.core.discard(key for key in keys if key not in living)
        self.leases.changed(list(filter(None, map(groups.get, dict.fromkeys(living.values())))))
        return tuple(living)
