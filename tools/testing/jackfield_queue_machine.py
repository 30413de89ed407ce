"""The queue against a simple model of it, over random histories with crashes: for the backends of all packages.

What must hold at every moment: each consumer is offered just the groups that the model says; no group is ever seen in
part; a batch has its number of groups; nothing is lost and nothing is consumed twice; the backend holds the living
samples and nothing else; the file has what the queue knows.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jackfield.abc.transfer_queue import (
    DeleteRequest,
    DeleteResult,
    GetRequest,
    GetResult,
    KeysRequest,
    KeysResult,
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    StatsResult,
    TagsRequest,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import BatchMeta, GroupKey, NewGroup, RolloutReport, partition_of
from jackfield.queue.records import State
from jackfield.queue.store import STORE_FILE, Store
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import MemoryBackend, MemoryConfig, Values
from jackfield.sdk.cells import dense_column
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

MAX_RETRIES = 50
_CALL_SECONDS = 60.0
STEPS = st.none() | st.integers(0, 5)
NEEDS = {"scorer": {"x"}, "reader": {"x"}, "trainer": {"x", "y"}}
ENDS = ("reader", "trainer")  #: the scorer is a stage: it writes y


@attrs.define(eq=False, repr=False)
class MGroup:
    """A group that is open or published."""

    key: str
    rollouts: int
    published: bool = False
    ended: set[int] = attrs.field(factory=set)
    samples: dict[str, tuple[int, set[str]]] = attrs.field(factory=dict)  # value and columns, of the living
    leases: dict[str, int] = attrs.field(factory=dict)  # epochs
    acks: dict[str, tuple[int | None, bool]] = attrs.field(factory=dict)  # step, and whether it is final

    def satisfied(self) -> bool:
        return {rollout_of(key) for key in self.samples} == set(range(self.rollouts))

    def scored(self) -> bool:
        return all("y" in columns for _, columns in self.samples.values())

    def fixed(self) -> bool:
        return any(name in self.leases or name in self.acks for name in ENDS)

    def free_for(self, consumer: str) -> bool:
        complete = all(NEEDS[consumer] <= columns for _, columns in self.samples.values())
        had = self.scored() if consumer == "scorer" else consumer in self.acks
        return self.published and complete and not had and consumer not in self.leases

    def done(self) -> bool:
        acked = all(name in self.acks and self.acks[name][1] for name in ENDS)
        return self.published and acked and self.scored() and not self.leases

    def ordered(self) -> list[str]:
        return sorted(self.samples, key=lambda key: (rollout_of(key), int(key.rsplit("/")[-1])))


@attrs.define(eq=False, repr=False)
class MPlace:
    """A group index of a batch."""

    retry: int = 0
    reissue: int = 0
    handed: bool = False
    consumed: bool = False
    group: MGroup | None = None


@attrs.define(eq=False, repr=False)
class Model:
    """What a queue should know."""

    batches: dict[int, list[MPlace]] = attrs.field(factory=dict)
    next_batch: int = 0
    committed: int | None = None
    consumed: set[str] = attrs.field(factory=set)
    again: set[int] = attrs.field(factory=set)  # batches that are to be handed out since the last crash

    def final(self, number: int) -> bool:
        return all(each.consumed or (each.group and each.group.published and each.group.acks.keys() & set(ENDS))
                   for each in self.batches[number])  # fmt: skip

    def places(self) -> list[MPlace]:
        return [place for places in self.batches.values() for place in places]

    def groups(self) -> list[MGroup]:
        return [place.group for place in self.places() if place.group is not None]

    def group(self, key: str) -> MGroup | None:
        return next((group for group in self.groups() if group.key == key), None)

    def samples(self) -> dict[str, tuple[int, set[str]]]:
        return {key: sample for group in self.groups() for key, sample in group.samples.items()}


def rollout_of(key: str) -> int:
    return int(key.rsplit("/")[-2])


ACTIONS: dict[str, tuple[int, Callable[[Any], object], dict[str, Any]]] = {}


def action(weight: int, when: Callable[[Any], object] = lambda self: True, **strategies: Any) -> Callable[[Any], Any]:
    """A step of a history: how often it is taken, when it is possible, and what its arguments are drawn from.

    Hypothesis' own choice among rules would spend nearly all steps on those without a precondition.
    """

    def register(method: Any) -> Any:
        ACTIONS[method.__name__] = weight, when, strategies
        return method

    return register


class Memory(MemoryBackend):
    """A store that outlives the queue."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig(), TransferQueueContext())

    async def close(self) -> None:
        return

    def end(self) -> None:
        """Do nothing: it goes with the process."""


class Elsewhere(TransferQueueBackend):
    """A backend whose time is real, in a thread of its own, while the queue's is virtual; it outlives the queue."""

    def __init__(self, make: Callable[[TransferQueueContext], TransferQueueBackend]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = TransferQueueContext(folder=str(Path(self._folder.name) / "queue"))
        super().__init__(None, context)
        self._thread = ThreadPoolExecutor(1)
        self._runner = asyncio.Runner()
        self._backend = make(context)
        self._started = False

    def _do(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.submit(self._runner.run, call).result(_CALL_SECONDS)

    async def start(self) -> None:
        if not self._started:
            self._do(self._backend.start())
            self._started = True

    async def put(self, request: PutRequest) -> PutResult:
        return self._do(self._backend.put(request))  # type: ignore[no-any-return]

    async def get(self, request: GetRequest) -> GetResult:
        return self._do(self._backend.get(request))  # type: ignore[no-any-return]

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        return self._do(self._backend.delete(request))  # type: ignore[no-any-return]

    async def stats(self) -> StatsResult:
        return self._do(self._backend.stats())  # type: ignore[no-any-return]

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        return self._do(self._backend.checkpoint(request))  # type: ignore[no-any-return]

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        return self._do(self._backend.restore(request))  # type: ignore[no-any-return]

    async def put_tags(self, request: TagsRequest) -> None:
        self._do(self._backend.put_tags(request))

    async def keys(self, request: KeysRequest) -> KeysResult:
        return self._do(self._backend.keys(request))  # type: ignore[no-any-return]

    async def close(self) -> None:
        return

    def end(self) -> None:
        """Close it."""
        self._do(self._backend.close())
        self._thread.submit(self._runner.close).result(_CALL_SECONDS)
        self._thread.shutdown()
        self._folder.cleanup()


class QueueMachine(RuleBasedStateMachine):
    """Drives a real queue and the model side by side."""

    def __init__(self, make_store: Callable[[], Memory | Elsewhere] = Memory) -> None:
        super().__init__()
        self.make_store = make_store
        self.stores: list[Memory | Elsewhere] = []
        self.clock = VirtualClock()
        self.runner = asyncio.Runner(loop_factory=self.clock.make_loop)
        self.model = Model()
        self.metas: list[BatchMeta] = []
        self.saved: tuple[Path, Model] | None = None
        self.cleared = False  # since the last checkpoint
        self.root = tempfile.TemporaryDirectory()
        self.folders = 0
        self.value = 0

    def do(self, action: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(action)

    @initialize()
    def begin(self) -> None:
        self.queue = self.do(self.make())
        self.do(self.queue.clear())

    async def make(self, backend: Memory | Elsewhere | None = None) -> TransferQueue:
        if backend is None:
            backend = self.make_store()
            self.stores.append(backend)
        self.backend, self.values = backend, Values(backend)
        path = Path(self.root.name) / "queue" / STORE_FILE
        queue = TransferQueue(backend, self.clock, store=path, durable=True, max_retries=MAX_RETRIES)
        await queue.start()
        for name, columns in NEEDS.items():
            writes = () if name in ENDS else ("y",)
            await queue.register_consumer(name, "p", tuple(sorted(columns)), writes=writes)
        return queue

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.do(self.queue.close())
        self.runner.close()
        for store in self.stores:
            store.end()
        self.root.cleanup()

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        names = [name for name, (weight, when, _) in ACTIONS.items() if when(self) for _ in range(weight)]
        name = data.draw(st.sampled_from(names))
        arguments = {key: data.draw(strategy) for key, strategy in ACTIONS[name][2].items()}
        method = getattr(self, name)
        if "data" in method.__annotations__:
            arguments["data"] = data
        method(**arguments)

    # -- producers

    def offered(self) -> list[int]:
        """Batches with places that were not handed out, and those whose explorer crashed before they were final."""
        model = self.model
        vacant = {number for number, places in model.batches.items() if any(not place.handed for place in places)}
        return sorted(vacant | {number for number in model.again & set(model.batches) if not model.final(number)})

    @action(
        3,
        when=lambda self: len(self.model.batches) < 3 or self.offered(),
        groups=st.integers(1, 3),
        rollouts=st.integers(1, 3),
    )
    def explore(self, groups: int, rollouts: int) -> None:
        """Claim whatever is offered first, or a new batch; open a group at each vacant place."""
        offered = self.offered()
        self.queue.caller = lambda: "explorer's client"
        batch = self.do(self.queue.claim_batch("p", "e", groups))
        self.queue.caller = lambda: None
        if offered:
            assert min(offered) == batch.number
        else:
            assert (self.model.next_batch, groups) == (batch.number, batch.groups)
            self.model.batches[batch.number] = [MPlace() for _ in range(groups)]
            self.model.next_batch += 1
        self.model.again.discard(batch.number)
        places = self.model.batches[batch.number]
        given = self.do(self.pull(batch))
        expected = [(index, place.retry, place.reissue) for index, place in enumerate(places) if not place.handed]
        assert expected == [(key.index, key.retry, key.reissue) for key in given]
        assert batch.vacant == len(given)
        self.do(self.queue.open_groups([self.new_group(key, rollouts) for key in given]))

    def new_group(self, key: GroupKey, rollouts: int) -> NewGroup:
        place = self.model.batches[key.batch][key.index]
        place.handed, place.group = True, MGroup(str(key), rollouts)
        return NewGroup(key=key, task_id="t", rollouts=rollouts)

    async def pull(self, batch: Any) -> list[GroupKey]:
        given: list[GroupKey] = []
        with suppress(DeadlineExceeded):
            async for keys in self.queue.groups_to_fill(batch, 0.0, until="published"):
                given += keys
        return given

    def open_rollouts(self) -> list[tuple[MGroup, int]]:
        groups = [group for group in self.model.groups() if not group.published]
        return [(group, each) for group in groups for each in range(group.rollouts) if each not in group.ended]

    @action(3, when=lambda self: self.open_rollouts(), samples=st.lists(st.booleans(), max_size=2), many=st.booleans())
    def end_rollouts(self, data: st.DataObject, samples: list[bool], many: bool) -> None:
        """Rollouts end with samples, some of which have all columns; or without any, because they failed."""
        chosen = self.open_rollouts() if many else [data.draw(st.sampled_from(self.open_rollouts()))]
        reports = [self.end_rollout(group, rollout, samples) for group, rollout in chosen]
        assert self.do(self.queue.end_rollouts(reports)) == ()
        for group in {id(group): group for group, _ in chosen}.values():
            self.settle(group)
        stray = self.do(self.queue.end_rollouts(reports))  # a second time they change nothing
        assert not set(stray) & self.model.samples().keys()

    def end_rollout(self, group: MGroup, rollout: int, samples: list[bool]) -> RolloutReport:
        group.ended.add(rollout)
        if not samples:
            return RolloutReport(group=group.key, rollout=rollout, error="broke")
        keys = tuple(GroupKey.of(group.key).sample(rollout, sequence) for sequence in range(len(samples)))
        columns = {"x", "y"} if all(samples) else {"x"}
        written = self.put(keys, columns)
        written = msgspec.structs.replace(written, tags=tuple({"n": index} for index in range(len(keys))))
        return RolloutReport(group=group.key, rollout=rollout, keys=keys, written=written)

    def put(self, keys: tuple[str, ...], columns: set[str]) -> Any:
        values = [self.value + index for index in range(len(keys))]
        self.value += len(keys)
        for key, value in zip(keys, values, strict=True):
            group = self.model.group(key.rsplit("/", 2)[0])
            assert group is not None
            group.samples[key] = value, set(columns)
        return self.do(self.values.put("p", keys, {name: dense_column(torch.tensor(values)) for name in columns}))

    def settle(self, group: MGroup) -> None:
        if len(group.ended) == group.rollouts and not group.published:
            group.published = True
            self.decide(group)

    def decide(self, group: MGroup) -> None:
        """Too few samples are left: the group is made again."""
        if group.published and not group.satisfied():
            self.remake(group)
        self.consume()

    def remake(self, group: MGroup) -> None:
        place = next(place for place in self.model.places() if place.group is group)
        place.group, place.handed, place.reissue, place.retry = None, False, 0, place.retry + 1

    @action(1)
    def release_explorer(self) -> None:
        """An explorer dies: its open groups are made again, without counting as retries."""
        self.do(self.queue.end_holder("explorer's client"))
        for places in self.model.batches.values():
            for place in places:
                made = place.consumed or (place.group is not None and place.group.published)
                if place.handed and not made:
                    place.group, place.handed, place.reissue = None, False, place.reissue + 1

    @action(2, when=lambda self: self.model.samples(), many=st.integers(1, 3))
    def fail_samples(self, data: st.DataObject, many: int) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.model.samples())), max_size=many, unique=True))
        groups = [group for group in self.model.groups() if set(keys) & group.samples.keys()]
        call = self.queue.fail_samples(dict.fromkeys(keys, "bad"))
        if any(group.fixed() for group in groups):
            with pytest.raises(QueueError):
                self.do(call)
            return
        self.do(call)
        self.remove(groups, keys)

    def remove(self, groups: list[MGroup], keys: list[str]) -> None:
        for group in groups:
            for key in set(keys) & group.samples.keys():
                del group.samples[key]
            if group.published and group.satisfied() and group.scored():
                group.leases.pop("scorer", None)
        for group in groups:
            self.decide(group)

    @action(1, when=lambda self: self.model.groups())
    def drop_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.groups()))
        if group.fixed():
            with pytest.raises(QueueError):
                self.do(self.queue.drop_groups([group.key], "not wanted"))
            return
        self.do(self.queue.drop_groups([group.key], "not wanted"))
        self.remake(group)

    @action(1, when=lambda self: self.model.samples(), many=st.integers(1, 2))
    def lose(self, data: st.DataObject, many: int) -> None:
        """Values are gone from the store."""
        keys = data.draw(
            st.lists(st.sampled_from(sorted(self.model.samples())), min_size=1, max_size=many, unique=True)
        )
        groups = [group for group in self.model.groups() if set(keys) & group.samples.keys()]
        if any(group.fixed() and not group.acks for group in groups):
            return  # who has leased them names his own
        self.do(self.backend.delete(DeleteRequest(partition="p", keys=tuple(keys))))
        assert set(keys) <= set(self.do(self.queue.fail_lost(keys=keys)))
        for group in [group for group in groups if group.acks]:
            self.gone(group)
        self.remove([group for group in groups if not group.acks], keys)

    # -- columns

    @action(3, when=lambda self: self.model.samples(), many=st.integers(1, 4))
    def add_columns(self, data: st.DataObject, many: int) -> None:
        """Score samples without a lease."""
        samples = self.model.samples()
        keys = data.draw(st.lists(st.sampled_from(sorted(samples)), min_size=1, max_size=many, unique=True))
        there = [key for key in keys if "y" in samples[key][1]]
        if there:
            written = self.do(
                self.values.put("p", there[:1], {"x": dense_column(torch.tensor([samples[there[0]][0]]))})
            )
            with refused("queue.column"):
                self.do(self.queue.add_columns(there[:1], written))
        keys = [key for key in keys if key not in there]
        if keys:
            self.score(keys, keys)

    def score(self, target: Any, keys: list[str]) -> None:
        written = self.do(self.values.put("p", keys, {"y": dense_column(torch.zeros(len(keys), dtype=torch.int64))}))
        assert self.do(self.queue.add_columns(target, written)) == tuple(keys)
        for group in self.model.groups():
            mine = set(keys) & group.samples.keys()
            for key in mine:
                group.samples[key][1].add("y")
            if mine and group.scored():
                group.leases.pop("scorer", None)
        self.consume()

    # -- consumers

    def ready(self, consumer: str) -> list[MGroup]:
        return [group for group in self.model.groups() if group.free_for(consumer)]

    @action(4, consumer=st.sampled_from(sorted(NEEDS)), count=st.none() | st.integers(1, 2))
    def lease_groups(self, consumer: str, count: int | None) -> None:
        ready = self.in_order(self.ready(consumer))
        call = self.queue.lease(consumer, count, deadline_seconds=0)
        if len(ready) < (count or 1):
            with pytest.raises(DeadlineExceeded):
                self.do(call)
            return
        self.leased(self.do(call), ready[:count])

    @staticmethod
    def in_order(groups: list[MGroup]) -> list[MGroup]:
        return sorted(groups, key=lambda group: (GroupKey.of(group.key).batch, GroupKey.of(group.key).index))

    @action(4, when=lambda self: self.model.batches, consumer=st.sampled_from(ENDS))
    def lease_batch(self, data: st.DataObject, consumer: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.batches)))
        places = [place for place in self.model.batches[number] if not place.consumed]
        groups = [place.group for place in places]
        ready = self.in_order([group for group in groups if group is not None and group.free_for(consumer)])
        had = [group for group in groups if group and group.published and consumer in {*group.leases, *group.acks}]
        call = self.queue.lease(consumer, batch=number, deadline_seconds=0)
        if len(ready) < len(groups) - len(had):
            with pytest.raises(DeadlineExceeded):
                self.do(call)
        elif not ready:
            with refused("queue.invalid"):
                self.do(call)
        else:
            self.leased(self.do(call), ready)

    def leased(self, meta: BatchMeta, groups: list[MGroup]) -> None:
        assert [key for group in groups for key in group.ordered()] == list(meta.keys)
        for group in groups:
            group.leases[meta.leases[0].consumer] = meta.leases[0].epoch
        if len(meta):
            values = self.do(self.values.read(meta, ("x",)))["x"].values.tolist()
            samples = self.model.samples()
            assert [samples[key][0] for key in meta.keys] == values
            self.metas.append(meta)

    def living(self, meta: BatchMeta) -> list[MGroup]:
        return [group for name in dict.fromkeys(meta.groups) if (group := self.model.group(name)) is not None]

    def holds(self, meta: BatchMeta) -> bool:
        lease = meta.leases[0]
        return all(group.leases.get(lease.consumer) == lease.epoch for group in self.living(meta))

    @action(4, when=lambda self: self.metas, step=STEPS)
    def ack(self, data: st.DataObject, step: int | None) -> None:
        meta = data.draw(st.sampled_from(self.metas))
        consumer = meta.leases[0].consumer
        if consumer == "scorer":
            self.score_leased(meta)
            return
        if not self.holds(meta):
            with pytest.raises(QueueError) as ended:
                self.do(self.queue.ack(meta, step))
            assert "queue.lease" == ended.value.code
            return
        self.do(self.queue.ack(meta, step))
        final = step is None or (self.model.committed is not None and step <= self.model.committed)
        for group in self.living(meta):
            del group.leases[consumer]
            group.acks[consumer] = step, final
        self.consume()

    def score_leased(self, meta: BatchMeta) -> None:
        """The stage writes its column under its lease."""
        samples = self.model.samples()
        keys = [key for key in meta.keys if key in samples]
        if self.holds(meta) and keys:
            self.score(meta.select(meta.keys.index(key) for key in keys), keys)

    @action(1, when=lambda self: self.metas)
    def release(self, data: st.DataObject) -> None:
        meta = data.draw(st.sampled_from(self.metas))
        if not self.holds(meta):
            with pytest.raises(QueueError) as ended:
                self.do(self.queue.release(meta))
            assert "queue.lease" == ended.value.code
            return
        self.do(self.queue.release(meta))
        for group in self.living(meta):
            del group.leases[meta.leases[0].consumer]
        self.consume()

    @action(1, consumer=st.sampled_from(sorted(NEEDS)))
    def take_over(self, consumer: str) -> None:
        held = [key for group in self.model.groups() if consumer in group.leases for key in group.samples]
        before = len(self.queue.ledger)
        self.do(self.queue.take_over(consumer))
        assert sorted(held) == sorted(key for entry in self.queue.ledger[before:] for key in entry["keys"])
        for group in self.model.groups():
            group.leases.pop(consumer, None)
        self.consume()

    @action(2, step=st.integers(0, 5))
    def commit(self, step: int) -> None:
        self.do(self.queue.commit(step))
        committed = self.model.committed
        self.committed(step if committed is None else max(step, committed))

    def committed(self, step: int) -> None:
        self.model.committed = step
        for group in self.model.groups():
            for consumer, (acked, final) in group.acks.items():
                group.acks[consumer] = acked, final or (acked is not None and acked <= step)
        self.consume()

    def consume(self) -> None:
        """Groups that every consumer is done with are gone; batches that have none left, too."""
        for group in [group for group in self.model.groups() if group.done()]:
            self.gone(group)

    def gone(self, group: MGroup) -> None:
        place = next(place for place in self.model.places() if place.group is group)
        assert not self.model.consumed & group.samples.keys(), "consumed twice"
        self.model.consumed |= group.samples.keys()
        place.group, place.consumed = None, True
        for number, places in list(self.model.batches.items()):
            if all(each.consumed for each in places):
                del self.model.batches[number]

    # -- crashes

    @action(1)
    def checkpoint(self) -> None:
        self.folders += 1
        folder = Path(self.root.name) / f"checkpoint-{self.folders}"
        self.do(self.queue.checkpoint(folder))
        self.cleared = False
        self.saved = folder, self.without_leases()

    def without_leases(self) -> Model:
        """What a new process is to know."""
        model = copy.deepcopy(self.model)
        for place in model.places():
            if place.group is not None and not place.group.published:
                place.group = None
            if place.group is not None:
                place.group.leases.clear()
            elif not place.consumed:
                place.reissue, place.handed = place.reissue + place.handed, False
        return model

    @action(2, step=st.integers(0, 5), orphan=st.booleans())
    def killed(self, step: int, orphan: bool) -> None:
        """A new process with the same store: only open groups, leases and acks after the step are lost."""
        if self.saved is None or self.cleared:
            self.checkpoint()
        assert self.saved is not None
        if orphan:  # a worker died between its values and its report
            self.do(self.values.put("p", ["p/0/0/77/0/0"], {"x": dense_column(torch.tensor([0]))}))
        self.do(self.queue.close())
        self.queue = self.do(self.make(self.backend))
        step = max(step, -1 if self.model.committed is None else self.model.committed)
        assert self.do(self.queue.restore(self.saved[0], step))
        self.model = self.without_leases()
        self.metas.clear()
        self.take_back(step)

    def take_back(self, step: int) -> None:
        for group in self.model.groups():
            later = [name for name, (acked, final) in group.acks.items() if not final and acked and acked > step]
            for name in later:
                del group.acks[name]
        self.model.again = set(self.model.batches)
        self.committed(step)

    @action(1, when=lambda self: self.saved and not self.cleared, step=st.integers(0, 5))
    def trainer_died(self, step: int) -> None:
        """The queue lives: all leases end, and acks of later steps do not count."""
        assert self.saved is not None
        step = max(step, -1 if self.model.committed is None else self.model.committed)
        assert self.do(self.queue.restore(self.saved[0], step))
        again = self.model.again
        for group in self.model.groups():
            group.leases.clear()
        self.metas.clear()
        self.take_back(step)
        self.model.again = again

    @action(1, when=lambda self: self.saved)
    def crash(self) -> None:
        """A new process with the last checkpoint: what was consumed after it comes back, what was before does not."""
        assert self.saved is not None
        self.do(self.queue.close())
        self.queue = self.do(self.make())
        assert not self.do(self.queue.restore(self.saved[0])) or self.cleared
        self.cleared = False
        self.model = copy.deepcopy(self.saved[1])
        self.metas.clear()
        self.model.again = set(self.model.batches)

    @action(1, when=lambda self: self.model.consumed)
    def clear(self) -> None:
        """Begin again with nothing."""
        self.do(self.queue.clear())
        self.cleared, self.saved = True, None
        self.model = Model()
        self.metas.clear()

    @action(1, cut=st.integers(0, 10**6))
    def cut(self, cut: int) -> None:
        """A log that ends anywhere gives the state after a whole call."""
        path = Path(self.root.name) / "queue" / STORE_FILE
        part = Path(self.root.name) / "part" / STORE_FILE
        shutil.rmtree(part.parent, ignore_errors=True)
        part.parent.mkdir()
        log = path.with_name(f"{STORE_FILE}-wal").read_bytes()
        shutil.copy(path, part)
        part.with_name(f"{STORE_FILE}-wal").write_bytes(log[: cut % (len(log) + 1)])
        store = Store(part, durable=True)
        if rows := store.rows():
            State.load(rows)
        whole = [entry for entry in self.queue.ledger if entry["event"] != "clear"]
        kept = [entry for entry in store.entries() if entry["event"] != "clear"]
        assert kept == whole[: len(kept)]
        store.close()

    # -- what always holds

    @invariant()
    def consumers_are_offered_what_the_model_says(self) -> None:
        for name in NEEDS if hasattr(self, "queue") else ():
            keys: tuple[str, ...] = ()
            with suppress(DeadlineExceeded):
                meta = self.do(self.queue.lease(name, deadline_seconds=0))
                keys = meta.keys
                self.do(self.queue.release(meta))
            assert [key for group in self.in_order(self.ready(name)) for key in group.ordered()] == list(keys)

    @invariant()
    def the_file_has_everything(self) -> None:
        if hasattr(self, "queue"):
            assert dict(self.queue._core.state.rows()) == self.queue._core.store.rows()

    @invariant()
    def the_backend_holds_the_living_samples(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.do(self.queue.flush())
        stats = self.do(self.backend.stats())
        samples = self.model.samples()
        size = 8 * sum(len(columns) for _, columns in samples.values())
        assert (len(samples), size) == (stats.samples, stats.bytes)
        found = self.do(self.queue.stats())
        assert (len(samples), size, len(self.model.batches)) == (found["samples"], found["bytes"], found["batches"])

    @invariant()
    def no_sample_is_with_a_consumer_twice(self) -> None:
        """Read from the ledger alone: acks, less what was taken back."""
        acked: dict[str, set[str]] = {name: set() for name in NEEDS}
        for entry in self.queue.ledger if hasattr(self, "queue") else ():
            keys = set(entry.get("keys", ()))
            assert all(partition_of(key) == "p" for key in keys)
            if entry["event"] == "ack" and entry["consumer"] != "scorer":
                assert acked[entry["consumer"]].isdisjoint(keys)
                acked[entry["consumer"]] |= keys
            elif entry["event"] == "rollback":
                acked[entry["consumer"]] -= keys
            elif entry["event"] == "clear":
                acked = {name: set() for name in NEEDS}


def check_queue_against_model(
    make: Callable[[TransferQueueContext], TransferQueueBackend] | None = None, examples: int = 5, steps: int = 40
) -> None:
    """Explore, report, score, lease, ack, commit, fail, drop, lose, clear, checkpoint, crash and restart.

    Args:
        make: of the backend that keeps the values, in the folder of the context; None: the core's own.
        examples: histories.
        steps: of each.
    """
    # Without Phase.shrink a failure is told at once, not after minutes; add it to get the shortest history.
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    store: Callable[[], Memory | Elsewhere] = Memory if make is None else lambda: Elsewhere(make)
    run_state_machine_as_test(lambda: QueueMachine(store), settings=options)
