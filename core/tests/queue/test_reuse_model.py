"""Groups that are used several times, against a simple model, over random histories with crashes.

What must hold at every moment: a consumer may use just the groups that the model says; a group is deleted when no use
is left and all of them are final, and not before.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Coroutine
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import VirtualClock, _VirtualTimeLoop
from jackfield.errors import DeadlineExceeded
from jackfield.queue import BatchMeta, LocalQueue, Priority, Reuse, TransferQueue, dense_column
from jackfield.queue.memory import MemoryBackend, MemoryConfig

torch = pytest.importorskip("torch")

REUSE = Reuse(max_uses=2, cooldown=1, max_staleness=5, capacity=3)
DECAY = 0.5  #: versions are whole numbers, and used groups that may be used again have one use: no ties


@attrs.define(eq=False)
class MGroup:
    version: int
    uses: list[int] = attrs.field(factory=list)
    retired: int | None = None
    pending: set[int] = attrs.field(factory=set)  # steps that a rollback can take back
    leased: bool = False

    def left(self) -> bool:
        return self.retired is None and len(self.uses) < 2

    def priority(self) -> float:
        return self.version - DECAY * len(self.uses)

    def noted(self) -> list[int]:
        return [*self.uses, *([] if self.retired is None else [self.retired])]


@attrs.define(eq=False)
class Model:
    groups: dict[str, MGroup] = attrs.field(factory=dict)
    committed: int = -1
    step: int = 0
    version: int = 0

    def usable(self, fresh: bool) -> set[str]:
        return {
            name
            for name, group in self.groups.items()
            if group.left() and not group.leased and (self.step - group.uses[-1] > 1 if group.uses else fresh)
        }

    def best(self, names: set[str], count: int) -> list[str]:
        return sorted(names, key=lambda name: -self.groups[name].priority())[:count]

    def retire(self, names: set[str]) -> None:
        for name in names:
            group = self.groups[name]
            if group.left() and not group.leased:
                group.retired = self.step
                self.note(group)

    def retire_stale(self, fresh: bool) -> None:
        oldest = self.step - 5
        groups = self.groups.items()
        self.retire({name for name, group in groups if group.version < oldest and (group.uses or fresh)})
        self.forget()

    def use(self, names: list[str]) -> None:
        for name in names:
            group = self.groups[name]
            group.leased = False
            group.uses.append(self.step)
            self.note(group)
        kept = {name for name, group in self.groups.items() if group.uses and group.left()}
        if len(kept) > 3:
            self.retire(kept - set(self.best(kept, 3)))
        self.forget()

    def note(self, group: MGroup) -> None:
        if self.step > self.committed:
            group.pending.add(self.step)

    def forget(self) -> None:
        for name, group in list(self.groups.items()):
            if not group.left() and not group.leased and all(step <= self.committed for step in group.noted()):
                del self.groups[name]

    def rollback(self, step: int) -> set[str]:
        touched = {name for name, group in self.groups.items() if any(each > step for each in group.pending)}
        for name in touched:
            group = self.groups[name]
            group.uses = [each for each in group.uses if each <= step]
            group.pending = {each for each in group.pending if each <= step}
            if group.retired is not None and group.retired > step:
                group.retired = None
        return touched


class ReuseMachine(RuleBasedStateMachine):
    """Drives a real queue and the model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.runner = asyncio.Runner(loop_factory=lambda: _VirtualTimeLoop(self.clock))
        self.model = Model()
        self.batches: list[BatchMeta] = []
        self.saved: tuple[str, Model] | None = None
        self.folders: list[tempfile.TemporaryDirectory[str]] = []

    def do(self, action: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(action)

    @initialize()
    def begin(self) -> None:
        self.queue = self.do(self.make())

    async def make(self) -> TransferQueue:
        queue = LocalQueue(MemoryBackend(MemoryConfig(), TransferQueueContext()), self.clock)
        await queue.start()
        await queue.register_consumer("a", "p", ("x",), sampler=Priority(decay=DECAY), reuse=REUSE)
        return queue

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.do(self.queue.close())
        self.runner.close()
        for folder in self.folders:
            folder.cleanup()

    @rule(groups=st.integers(1, 3))
    def publish(self, groups: int) -> None:
        self.publish_groups(groups)

    def publish_groups(self, groups: int) -> None:
        self.do(self.put(groups))

    async def put(self, groups: int) -> None:
        ticket = await self.queue.claim_ticket("p", "e", groups)
        while not await self.queue.vacancies(ticket):  # a restored one is offered again
            ticket = await self.queue.claim_ticket("p", "e", groups)
        async for slot in self.queue.slots(ticket, 0.0, until="published"):
            self.model.version += 1
            group = await self.queue.open_group(slot, "t", runs=1)
            column = {"x": dense_column(torch.zeros(2))}
            await self.queue.put_run(group, 0, column, [{"weight_version_min": self.model.version}] * 2)
            self.model.groups[group] = MGroup(self.model.version)

    @rule(groups=st.integers(1, 3), fresh=st.booleans(), acks=st.booleans(), later=st.integers(0, 2))
    def sample(self, groups: int, fresh: bool, acks: bool, later: int) -> None:
        self.take(groups, fresh, acks, later)

    def take(self, groups: int, fresh: bool, acks: bool, later: int) -> None:
        self.model.step += later
        self.model.retire_stale(fresh)
        expected = self.model.best(self.model.usable(fresh), groups)
        sampling = self.queue.sample_groups("a", groups, self.model.step, fresh=fresh, deadline_seconds=0)
        if fresh and len(expected) < groups:
            with pytest.raises(DeadlineExceeded):
                self.do(sampling)
            return
        batch = self.do(sampling)
        assert expected == list(dict.fromkeys(batch.group_ids))
        assert 2 * len(expected) == len(batch)
        for name in expected:
            self.model.groups[name].leased = True
        if len(batch):
            self.batches.append(batch)
            if acks:
                self.ack(batch)

    @rule(steps=st.integers(1, 4), again=st.integers(1, 2))
    def train(self, steps: int, again: int) -> None:
        """What a trainer does: something new at each step, and something that was used before."""
        for _ in range(steps):
            self.publish_groups(1)
            self.take(1, fresh=True, acks=True, later=1)
            self.take(again, fresh=False, acks=True, later=0)

    def ack(self, batch: BatchMeta) -> None:
        self.batches.remove(batch)
        self.do(self.queue.ack(batch, step=self.model.step))
        self.model.use(list(dict.fromkeys(batch.group_ids)))

    @precondition(lambda self: self.batches)
    @rule(acks=st.booleans())
    def end(self, acks: bool) -> None:
        batch = self.batches[0]
        if acks:
            self.ack(batch)
            return
        self.batches.remove(batch)
        self.do(self.queue.release(batch))
        for name in batch.group_ids:
            self.model.groups[name].leased = False

    @rule(back=st.integers(0, 3))
    def commit(self, back: int) -> None:
        step = max(self.model.step - back, 0)
        self.do(self.queue.commit(step))
        self.model.committed = max(self.model.committed, step)
        for group in self.model.groups.values():
            group.pending = {each for each in group.pending if each > step}
        self.model.forget()

    @rule(back=st.integers(0, 3))
    def rollback(self, back: int) -> None:
        step = max(self.model.step - back, self.model.committed)
        expected = self.model.rollback(step)
        assert expected == {key.rsplit("/", 2)[0] for key in self.do(self.queue.rollback(step))}

    @rule()
    def checkpoint(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.folders.append(folder)
        self.do(self.queue.checkpoint(folder.name))
        model = copy.deepcopy(self.model)
        for group in model.groups.values():
            group.leased = False
        self.saved = folder.name, model

    @precondition(lambda self: self.saved)
    @rule()
    def crash(self) -> None:
        assert self.saved is not None
        self.do(self.queue.close())
        self.queue = self.do(self.make())
        self.do(self.queue.restore(self.saved[0]))
        self.model = copy.deepcopy(self.saved[1])
        self.batches.clear()

    @invariant()
    def the_consumer_may_use_what_the_model_says(self) -> None:
        if not hasattr(self, "queue"):
            return
        leases = self.queue._leases
        consumer = self.queue._state.consumers["a"]
        for fresh in (False, True):
            found = {group.id for group in leases._usable(consumer, self.model.step, fresh)}
            assert self.model.usable(fresh) == found

    @invariant()
    def the_backend_holds_the_living_groups(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.do(self.queue.flush())
        assert (
            2 * len(self.model.groups)
            == self.do(self.queue.backend.stats()).samples
            == self.do(self.queue.stats())["rows"]
        )


ReuseMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
TestReuseAgainstModel = ReuseMachine.TestCase
