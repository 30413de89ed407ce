"""The queue against a simple model of it, over random histories with crashes: for the backends of all packages.

What must hold at every moment: each consumer is offered just the rows that the model says; no group is ever seen in
part; a ticket has its number of groups; nothing is lost and nothing is consumed twice; the backend holds the living
rows and nothing else.
"""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
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
    LostResult,
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    StatsResult,
    TagsRequest,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.clock import VirtualClock, _VirtualTimeLoop
from jackfield.errors import DeadlineExceeded, LeaseError, QueueError
from jackfield.queue import BatchMeta, Claim, GroupSlot, LocalQueue, TransferQueue, dense_column
from jackfield.queue.journal import Entry, Journal, read_journal
from jackfield.queue.memory import MemoryBackend, MemoryConfig

__all__ = ["check_queue_against_model"]

_CALL_SECONDS = 60.0
LEASE_SECONDS = 10.0
MAX_RETRIES = 50
STEPS = st.none() | st.integers(0, 5)
NEEDS = {"scorer": {"x"}, "trainer": {"x", "y"}}


@attrs.define(eq=False, repr=False)
class MRow:
    key: str
    value: int
    columns: set[str]
    lease: dict[str, tuple[int, bool]] = attrs.field(factory=dict)  # consumer: (epoch, whole)
    ack: dict[str, tuple[int | None, bool]] = attrs.field(factory=dict)  # consumer: (step, final)

    def free_for(self, consumer: str) -> bool:
        return NEEDS[consumer] <= self.columns and consumer not in self.lease and consumer not in self.ack


@attrs.define(eq=False, repr=False)
class MGroup:
    id: str
    runs: int
    minimum: int | None
    published: bool = False
    consumed: bool = False  # some rows of it
    held: set[str] = attrs.field(factory=set)
    ended: set[int] = attrs.field(factory=set)
    rows: dict[str, MRow] = attrs.field(factory=dict)  # living

    def acked(self) -> bool:
        return self.consumed or any(all(name in row.ack for row in self.rows.values()) for name in self.held)

    def satisfied(self) -> bool:
        if self.minimum is not None:
            return len(self.rows) >= self.minimum
        return {run_of(key) for key in self.rows} == set(range(self.runs))

    def ordered(self) -> list[str]:
        return sorted(self.rows, key=lambda key: (run_of(key), int(key.rsplit("/")[-1])))


@attrs.define(eq=False, repr=False)
class MSlot:
    attempt: int = 0
    claim: int = 0
    handed: bool = False
    group: MGroup | None = None


@attrs.define(eq=False, repr=False)
class Model:
    tickets: dict[int, list[MSlot]] = attrs.field(factory=dict)
    next_ticket: int = 0
    committed: int | None = None
    consumed: set[str] = attrs.field(factory=set)
    again: set[int] = attrs.field(factory=set)  # tickets that are to be handed out since the last crash

    def final(self, number: int) -> bool:
        """Whether a ticket has nothing left that could be dropped."""
        groups = [slot.group for slot in self.tickets[number]]
        return all(group is not None and group.published and group.acked() for group in groups)

    def groups(self) -> list[MGroup]:
        return [slot.group for slots in self.tickets.values() for slot in slots if slot.group is not None]

    def rows(self) -> dict[str, MRow]:
        return {key: row for group in self.groups() for key, row in group.rows.items()}

    def ready(self, consumer: str) -> set[str]:
        return {key for key, row in self.rows().items() if row.free_for(consumer)}


def claim(batch: BatchMeta) -> Claim:
    """The one that all rows of a batch are held under."""
    (found,) = set(batch.claims)
    return found


def run_of(key: str) -> int:
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
        """Nothing is left of it anyway."""


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

    async def lost(self, request: GetRequest) -> LostResult:
        return self._do(self._backend.lost(request))  # type: ignore[no-any-return]

    async def close(self) -> None:
        return

    def end(self) -> None:
        """Close it."""
        self._do(self._backend.close())
        self._thread.submit(self._runner.close).result(_CALL_SECONDS)
        self._thread.shutdown()
        self._folder.cleanup()


Store = Memory | Elsewhere


class Watched(Journal):
    """Remembers what the state was at each length of the file, and looks at the store whenever a line is written."""

    def __init__(self, machine: QueueMachine, path: Path) -> None:
        super().__init__(path)
        self.machine = machine
        self.states: list[tuple[int, str]] = []

    def begin(self, base: str) -> None:
        super().begin(base)
        self.states = []
        self.remember()

    def append(self, entries: Sequence[Entry]) -> None:
        before = self.states[-1][1]
        self.store_has(before)  # where a kill tears the line
        super().append(entries)
        self.remember()
        self.store_has(self.states[-1][1])  # where a kill comes right after it

    def remember(self) -> None:
        self.states.append((self.path.stat().st_size, json.dumps(self.machine.queue.state_dict())))

    def store_has(self, state: str) -> None:
        """Every row that the journal knows has its values, and what it does not know is to be forgotten."""
        if len(self.states) % 4 or not isinstance(self.machine.backend, Memory):
            return
        cells = self.machine.backend._cells
        rows = {row["key"]: set(row["columns"]) for row in saved_rows(json.loads(state))}
        assert all(columns <= cells.get(("p", key), {}).keys() for key, columns in rows.items())
        recorded = read_journal(self.path)
        assert recorded is not None
        assert {key for _, key in cells} <= rows.keys() | set(recorded["discarded"].get("p", ()))


def saved_rows(state: Any) -> list[Any]:
    tickets = [ticket for partition in state["partitions"].values() for ticket in partition["tickets"]]
    groups = [slot["group"] for ticket in tickets for slot in ticket["slots"] if slot["group"] is not None]
    return [row for group in groups for row in group["rows"]]


def comparable(state: Any) -> Any:
    """Without what the journal does not have, or has otherwise: epochs go on higher, and more rows may be forgotten."""
    for consumer in state["consumers"].values():
        del consumer["epoch"]
    for name in ("discarded", "ledger", "marks", "mark"):
        state.pop(name, None)
    return state


class QueueMachine(RuleBasedStateMachine):
    """Drives a real queue and the model side by side."""

    def __init__(self, make_store: Callable[[], Store] = Memory) -> None:
        super().__init__()
        self.make_store = make_store
        self.stores: list[Store] = []
        self.clock = VirtualClock()
        self.runner = asyncio.Runner(loop_factory=lambda: _VirtualTimeLoop(self.clock))
        self.model = Model()
        self.batches: list[BatchMeta] = []
        self.saved: tuple[tempfile.TemporaryDirectory[str], Model] | None = None
        self.folders: list[tempfile.TemporaryDirectory[str]] = []
        self.cleared = False  # since the last checkpoint
        self.journals = tempfile.TemporaryDirectory()
        self.value = 0
        self.restored: dict[str, set[str]] = {name: set() for name in NEEDS}  # acks that the last checkpoint held

    def do(self, action: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(action)

    @initialize()
    def begin(self) -> None:
        self.queue = self.do(self.make())
        self.do(self.queue.clear(f"{self.journals.name}/empty"))

    async def make(self, backend: Store | None = None) -> TransferQueue:
        if backend is None:
            backend = self.make_store()
            self.stores.append(backend)
        self.backend = backend
        path = Path(self.journals.name) / "journal"
        settings = {"lease_seconds": LEASE_SECONDS, "max_retries": MAX_RETRIES, "journal": path}
        queue = LocalQueue(self.backend, self.clock, **settings)
        queue._journal = Watched(self, path)
        await queue.start()
        for name, columns in NEEDS.items():
            await queue.register_consumer(name, partition="p", columns=tuple(sorted(columns)))
        return queue

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.do(self.queue.close())
        self.runner.close()
        for store in self.stores:
            store.end()
        for folder in (*self.folders, self.journals):
            folder.cleanup()

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
        """Tickets with slots that nobody has been given, and those whose explorer crashed before they were final."""
        model = self.model
        vacant = {number for number, slots in model.tickets.items() if any(not slot.handed for slot in slots)}
        return sorted(vacant | {number for number in model.again & set(model.tickets) if not model.final(number)})

    @action(
        3,
        when=lambda self: len(self.model.tickets) < 3 or self.offered(),
        groups=st.integers(1, 3),
        runs=st.integers(1, 3),
        minimum=st.none() | st.integers(1, 2),
    )
    def explore(self, groups: int, runs: int, minimum: int | None) -> None:
        """Claim whatever is offered first, or a new ticket; open a group in each vacant slot."""
        offered = self.offered()
        ticket = self.do(self.queue.claim_ticket("p", explorer="e", groups=groups))
        if offered:
            assert min(offered) == ticket.number
        else:
            assert (self.model.next_ticket, groups) == (ticket.number, ticket.groups)
            self.model.tickets[ticket.number] = [MSlot() for _ in range(groups)]
            self.model.next_ticket += 1
        # those before it are final: nobody has to look after them any more
        self.model.again = {number for number in self.model.again if offered and number > ticket.number}
        slots = self.model.tickets[ticket.number]
        given = self.do(self.pull(ticket))
        expected = [(index, slot.attempt, slot.claim) for index, slot in enumerate(slots) if not slot.handed]
        assert expected == [(place.index, place.attempt, place.claim) for place in given]
        for place in given:
            slots[place.index].handed = True
            group = self.do(self.queue.open_group(place, task_id="t", runs=runs, minimum_rows=minimum))
            slots[place.index].group = MGroup(group, runs, minimum)

    async def pull(self, ticket: Any) -> list[GroupSlot]:
        given = []
        with suppress(DeadlineExceeded):
            async for slot in self.queue.slots(ticket, 0.0, until="published"):
                given.append(slot)  # noqa: PERF401
        return given

    def open_runs(self) -> list[tuple[MGroup, int]]:
        return [
            (group, number)
            for group in self.model.groups()
            if not group.published
            for number in range(group.runs)
            if number not in group.ended
        ]

    @action(2, when=lambda self: self.open_runs(), rows=st.integers(0, 2), complete=st.booleans())
    def put_run(self, data: st.DataObject, rows: int, complete: bool) -> None:
        group, number = data.draw(st.sampled_from(self.open_runs()))
        self.put_rows(group, number, rows, complete)

    @action(4, when=lambda self: self.open_runs(), complete=st.booleans())
    def put_runs(self, data: st.DataObject, complete: bool) -> None:
        """End what is open, in some order, mostly well."""
        for group, number in data.draw(st.permutations(self.open_runs())):
            self.put_rows(group, number, data.draw(st.sampled_from((1, 1, 1, 2, 2, 0))), complete)

    def put_rows(self, group: MGroup, number: int, rows: int, complete: bool) -> None:
        values = list(range(self.value, self.value + rows))
        self.value += rows
        names = ("x", "y") if complete else ("x",)
        columns = {name: dense_column(torch.tensor(values, dtype=torch.int64)) for name in names}
        keys = self.do(self.queue.put_run(group.id, number, columns))
        assert rows == len(keys)
        for key, value in zip(keys, values, strict=True):
            group.rows[key] = MRow(key, value, set(names))
        self.end_run(group, number)

    @action(1, when=lambda self: self.open_runs())
    def fail_run(self, data: st.DataObject) -> None:
        group, number = data.draw(st.sampled_from(self.open_runs()))
        self.do(self.queue.fail_run(group.id, number, "failed"))
        self.end_run(group, number)

    def end_run(self, group: MGroup, number: int) -> None:
        group.ended.add(number)
        if len(group.ended) == group.runs:
            if group.satisfied():
                group.published = True
            else:
                self.refill(group)

    def refill(self, group: MGroup) -> None:
        for slots in self.model.tickets.values():
            for slot in slots:
                if slot.group is group:
                    slot.attempt, slot.claim, slot.handed, slot.group = slot.attempt + 1, 0, False, None

    @action(3, when=lambda self: any("y" not in row.columns for row in self.model.rows().values()))
    def put_column(self, data: st.DataObject) -> None:
        lacking = sorted(key for key, row in self.model.rows().items() if "y" not in row.columns)
        keys = data.draw(st.lists(st.sampled_from(lacking), unique=True, min_size=1))
        rows = self.model.rows()
        column = dense_column(torch.tensor([rows[key].value for key in keys], dtype=torch.int64))
        assert tuple(keys) == self.do(self.queue.put(keys, {"y": column}))
        for key in keys:
            rows[key].columns.add("y")

    @action(1, when=lambda self: self.model.rows())
    def fail_row(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.rows())))
        group = next(group for group in self.model.groups() if key in group.rows)
        if group.held or group.consumed:
            with pytest.raises(QueueError):
                self.do(self.queue.fail_rows([key], "bad"))
            return
        self.do(self.queue.fail_rows([key], "bad"))
        del group.rows[key]
        if group.published and not group.satisfied():
            self.refill(group)

    @action(3, when=lambda self: self.model.rows(), mine=st.booleans())
    def lose_row(self, data: st.DataObject, mine: bool) -> None:
        """The backend has lost a row's values, as a reader of it, or of the batch that it holds, was told."""
        batch = data.draw(
            st.sampled_from([each for each in self.batches if self.holds(each)] or self.batches or [None])
        )
        batch = batch if mine else None
        rows = self.model.rows()
        key = data.draw(st.sampled_from(sorted(set(batch.keys) & set(rows) if batch else rows) or sorted(rows)))
        if batch is not None and not self.holds(batch):
            with pytest.raises(LeaseError):
                self.do(self.queue.fail_lost(batch, [key]))
            return
        group = next(group for group in self.model.groups() if key in group.rows)
        theirs = group.held and not group.acked() and not (batch and set(batch.keys) & set(group.rows))
        assert (() if theirs else (key,)) == self.do(self.queue.fail_lost(batch, [key]))
        if theirs:
            return
        acked = group.acked()
        del group.rows[key]
        if acked:
            group.consumed, group.held = True, set(NEEDS)
            self.model.consumed.add(key)
            self.consume(group)
        elif group.published and not group.satisfied():
            group.held.clear()
            self.refill(group)

    @action(1, when=lambda self: self.model.groups())
    def drop_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.groups()))
        if group.held or group.consumed:
            with pytest.raises(QueueError):
                self.do(self.queue.drop_group(group.id, "filtered"))
            return
        self.do(self.queue.drop_group(group.id, "filtered"))
        self.refill(group)

    @action(1, when=lambda self: self.open_runs())
    def explorer_dies(self) -> None:
        self.do(self.queue.release_tickets("e"))
        for slots in self.model.tickets.values():
            for slot in slots:
                if slot.handed and (slot.group is None or not slot.group.published):
                    slot.claim, slot.handed, slot.group = slot.claim + 1, False, None

    # -- consumers

    @action(2, consumer=st.sampled_from(sorted(NEEDS)), most=st.none() | st.integers(1, 3))
    def lease(self, consumer: str, most: int | None) -> None:
        if not self.model.ready(consumer):
            with pytest.raises(DeadlineExceeded):
                self.do(self.queue.lease(consumer, most, deadline_seconds=0))
            return
        self.lease_rows(consumer, most)

    def lease_rows(self, consumer: str, most: int | None) -> BatchMeta:
        ready = self.model.ready(consumer)
        batch: BatchMeta = self.do(self.queue.lease(consumer, most, deadline_seconds=0))
        assert set(batch.keys) <= ready
        assert len(batch) == len(set(batch.keys)) == min(len(ready), most or len(ready))
        self.leased(batch, whole=False)
        return batch

    @action(4, when=lambda self: self.model.ready("scorer"), most=st.none() | st.integers(1, 4), step=STEPS)
    def score(self, most: int | None, step: int | None) -> None:
        """What a reward stage does."""
        batch = self.lease_rows("scorer", most)
        rows = self.model.rows()
        self.do(self.queue.put(batch, {"y": dense_column(torch.tensor([rows[key].value for key in batch.keys]))}))
        for key in batch.keys:
            rows[key].columns.add("y")
        self.ack_batch(batch, step)

    def whole_groups(self, consumer: str) -> dict[int, list[MGroup]]:
        """Groups that could be leased, by ticket."""
        found: dict[int, list[MGroup]] = {}
        for number, slots in self.model.tickets.items():
            for group in [slot.group for slot in slots if slot.group is not None]:
                free = all(row.free_for(consumer) for row in group.rows.values())
                if group.published and group.rows and free and not group.consumed:
                    found.setdefault(number, []).append(group)
        return found

    @action(4, when=lambda self: self.whole_groups("trainer"), step=STEPS, acks=st.booleans())
    def train(self, data: st.DataObject, step: int | None, acks: bool) -> None:
        """What a trainer does with the groups of one ticket that are ready."""
        ready = self.whole_groups("trainer")
        number = data.draw(st.sampled_from(sorted(ready)))
        batch = self.do(self.queue.lease_groups("trainer", number, len(ready[number]), deadline_seconds=0))
        assert tuple(key for group in ready[number] for key in group.ordered()) == batch.keys
        for group in ready[number]:
            group.held.add("trainer")
        self.leased(batch, whole=True)
        if acks:
            self.ack_batch(batch, step)

    @action(
        2,
        when=lambda self: self.model.tickets,
        consumer=st.sampled_from(sorted(NEEDS)),
        most=st.none() | st.integers(1, 2),
    )
    def lease_groups(self, data: st.DataObject, consumer: str, most: int | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.tickets)))
        slots = self.model.tickets[number]
        groups = [slot.group for slot in slots]
        ready = self.whole_groups(consumer).get(number, [])
        remaining = sum(group is None or consumer not in group.held for group in groups)
        lease = self.queue.lease_groups(consumer, number, most, deadline_seconds=0)
        if len(ready) < (remaining if most is None else min(most, remaining)):
            with pytest.raises(DeadlineExceeded):
                self.do(lease)
        elif most is None and not ready:
            with pytest.raises(QueueError, match="has had all groups"):
                self.do(lease)
        else:
            batch = self.do(lease)
            assert tuple(key for group in ready[:most] for key in group.ordered()) == batch.keys
            for group in ready[:most]:
                group.held.add(consumer)
            self.leased(batch, whole=True)

    def leased(self, batch: BatchMeta, whole: bool) -> None:
        rows = self.model.rows()
        for key in batch.keys:
            rows[key].lease[claim(batch).consumer] = claim(batch).epoch, whole
        if len(batch):
            values = self.do(self.queue.get(batch, ("x",)))["x"].values.tolist()
            assert [rows[key].value for key in batch.keys] == values
            self.batches.append(batch)

    def holds(self, batch: BatchMeta) -> bool:
        rows = self.model.rows()
        living = [rows[key] for key in batch.keys if key in rows]
        held = claim(batch)
        return all(row.lease.get(held.consumer, (0, 0))[0] == held.epoch for row in living)

    @action(3, when=lambda self: self.batches, step=STEPS)
    def ack(self, data: st.DataObject, step: int | None) -> None:
        self.ack_batch(data.draw(st.sampled_from(self.batches)), step)

    def ack_batch(self, batch: BatchMeta, step: int | None) -> None:
        if not self.holds(batch):
            with pytest.raises(LeaseError):
                self.do(self.queue.ack(batch, step=step))
            return
        keys = self.do(self.queue.ack(batch, step=step))
        rows = self.model.rows()
        assert [key for key in batch.keys if key in rows] == list(keys)
        final = step is None or (self.model.committed is not None and step <= self.model.committed)
        for key in keys:
            del rows[key].lease[claim(batch).consumer]
            rows[key].ack[claim(batch).consumer] = step, final
        self.consume()

    @action(1, when=lambda self: self.batches)
    def release(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        if not self.holds(batch):
            with pytest.raises(LeaseError):
                self.do(self.queue.release(batch))
            return
        self.do(self.queue.release(batch))
        held = claim(batch)
        self.give_back(held.consumer, lambda row: row.lease.get(held.consumer, (0, 0))[0] == held.epoch)

    def give_back(self, consumer: str, chosen: Any) -> None:
        for group in self.model.groups():
            for row in group.rows.values():
                if chosen(row):
                    row.lease.pop(consumer, None)
                    row.ack.pop(consumer, None)
                    if not group.consumed:
                        group.held.discard(consumer)

    @action(2, step=st.integers(0, 5))
    def commit(self, step: int) -> None:
        self.do(self.queue.commit(step))
        committed = self.model.committed
        self.model.committed = step if committed is None else max(step, committed)
        for row in self.model.rows().values():
            for consumer, (acked, final) in row.ack.items():
                row.ack[consumer] = acked, final or (acked is not None and acked <= step)
        self.consume()

    def consume(self, changed: MGroup | None = None) -> None:
        """Rows that every consumer acked finally are gone; tickets that have none left, too."""
        for number, slots in list(self.model.tickets.items()):
            gone = changed is not None and changed in [slot.group for slot in slots]
            for group in [slot.group for slot in slots if slot.group is not None]:
                for key, row in list(group.rows.items()):
                    if len(row.ack) == len(NEEDS) and all(final for _, final in row.ack.values()):
                        assert key not in self.model.consumed, "consumed twice"
                        self.model.consumed.add(key)
                        del group.rows[key]
                        gone = group.consumed = True
            complete = all(slot.group is not None and slot.group.published for slot in slots)
            if gone and complete and not any(slot.group.rows for slot in slots if slot.group is not None):
                del self.model.tickets[number]

    @action(1, step=st.integers(0, 5))
    def rollback(self, step: int) -> None:
        if self.model.committed is not None and step < self.model.committed:
            with pytest.raises(QueueError):
                self.do(self.queue.rollback(step))
            return
        keys = self.do(self.queue.rollback(step))
        assert sorted(self.rolled_back(step)) == sorted(keys)

    def rolled_back(self, step: int, kept: Sequence[str] = ()) -> list[str]:
        expected = []
        for consumer in set(NEEDS) - set(kept):

            def later(row: MRow, consumer: str = consumer) -> bool:
                acked, final = row.ack.get(consumer, (None, True))
                return not final and acked is not None and acked > step

            expected += [key for key, row in self.model.rows().items() if later(row)]
            self.give_back(consumer, later)
        return expected

    @action(1, when=lambda self: self.batches)
    def time_passes(self) -> None:
        self.do(self.clock.sleep(2 * LEASE_SECONDS))
        for consumer in NEEDS:
            self.give_back(consumer, lambda row, consumer=consumer: consumer in row.lease)

    # -- crashes

    @action(1)
    def checkpoint(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.folders.append(folder)
        self.do(self.queue.checkpoint(folder.name))
        self.cleared = False
        self.saved = folder, self.without_leases()

    def without_leases(self) -> Model:
        """What a new process is to know."""
        model = copy.deepcopy(self.model)
        for slots in model.tickets.values():
            for slot in slots:
                if slot.group is not None and not slot.group.published:
                    slot.group = None
                if slot.group is None:
                    slot.claim, slot.handed = slot.claim + slot.handed, False
                else:
                    leases = [lease for row in slot.group.rows.values() for lease in row.lease.items()]
                    leased = {name for name, (_, whole) in leases if whole}
                    slot.group.held -= leased
                    for row in slot.group.rows.values():
                        row.lease.clear()
        return model

    @action(2, step=st.integers(0, 5), torn=st.booleans(), kept=st.sets(st.sampled_from(sorted(NEEDS))))
    def killed(self, step: int, torn: bool, kept: set[str]) -> None:
        """A new process with the same store: nothing is lost but open groups, leases and acks after the step."""
        if self.saved is None or self.cleared:
            self.checkpoint()
        journal = self.queue._journal
        assert isinstance(journal, Watched)
        assert self.saved is not None
        if torn:  # a line more was begun
            with journal.path.open("ab") as file:
                file.write(b'0123456789abcdef [["slot"')
        self.do(self.queue.close())
        self.queue = self.do(self.make(self.backend))
        able = self.model.committed is None or step >= self.model.committed
        folder = self.saved[0].name
        assert able == self.do(self.queue.recover(folder, step, kept=sorted(kept)))
        if not able:
            step = self.model.committed or 0
            assert self.do(self.queue.recover(folder, step, kept=sorted(kept)))
        self.model = self.without_leases()
        self.batches.clear()
        self.rolled_back(step, kept)
        self.model.committed = step
        for row in self.model.rows().values():
            for consumer, (acked, _) in row.ack.items():
                row.ack[consumer] = acked, acked is None or acked <= step
        self.model.again = {number for number in self.model.tickets if not self.model.final(number)}
        self.consume()
        rows = self.model.rows().items()
        self.restored = {name: {key for key, row in rows if name in row.ack} for name in NEEDS}

    @action(2)
    def cut(self, data: st.DataObject) -> None:
        """A journal that ends anywhere gives the state after the last whole line."""
        journal = self.queue._journal
        assert isinstance(journal, Watched)
        sizes = [size for size, _ in journal.states]
        end = data.draw(st.integers(sizes[0], sizes[-1]))
        part = journal.path.with_name("part")
        part.write_bytes(journal.path.read_bytes()[:end])
        expected = comparable(json.loads([state for size, state in journal.states if size <= end][-1]))
        found = read_journal(part)
        assert found is not None
        assert expected == comparable({**found, "lineage": expected["lineage"]})

    @action(1, when=lambda self: self.saved)
    def crash(self) -> None:
        """A new process with the last checkpoint: what was consumed after it comes back, what was before does not."""
        assert self.saved is not None
        self.do(self.queue.close())
        self.queue = self.do(self.make())
        self.do(self.queue.restore(self.saved[0].name))
        self.cleared = False
        self.model = copy.deepcopy(self.saved[1])
        self.batches.clear()
        self.model.again = {number for number in self.model.tickets if not self.model.final(number)}
        rows = self.model.rows().items()
        self.restored = {name: {key for key, row in rows if name in row.ack} for name in NEEDS}

    @action(1, when=lambda self: self.model.consumed)
    def clear(self) -> None:
        """Begin anew; an earlier checkpoint can still be restored."""
        folder = tempfile.TemporaryDirectory()
        self.folders.append(folder)
        self.do(self.queue.clear(f"{folder.name}/empty"))
        self.cleared = True
        self.model = Model()
        self.batches.clear()
        self.restored = {name: set() for name in NEEDS}

    # -- what always holds

    @invariant()
    def consumers_are_offered_what_the_model_says(self) -> None:
        if not hasattr(self, "queue"):
            return
        for name, consumer in self.queue._state.consumers.items():
            assert self.model.ready(name) == {row.key for row in consumer.ready}

    @invariant()
    def the_journal_has_everything(self) -> None:
        if hasattr(self, "queue"):
            found = read_journal(Path(self.journals.name) / "journal")
            assert found is not None
            assert comparable(self.queue.state_dict()) == comparable({**found, "lineage": {}})

    @invariant()
    def groups_and_tickets_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        for group in self.model.groups():
            view = self.do(self.queue.group(group.id))
            assert ("published" if group.published else "open", tuple(group.ordered())) == (view.state, view.keys)
        partition = self.queue._state.partition("p")
        assert set(self.model.tickets) == set(partition.tickets)
        for number, slots in self.model.tickets.items():
            ticket = partition.tickets[number]
            assert len(slots) == len(ticket.slots)
            assert sum(slot.group is not None and slot.group.published for slot in slots) == ticket.published

    @invariant()
    def the_backend_holds_the_living_rows(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.do(self.queue.flush())
        stats = self.do(self.queue.backend.stats())
        rows = self.model.rows()
        size = 8 * sum(len(row.columns) for row in rows.values())
        assert (len(rows), size) == (stats.samples, stats.bytes)
        assert (len(rows), size) == (self.do(self.queue.stats())["rows"], self.do(self.queue.stats())["bytes"])

    @invariant()
    def no_row_is_with_a_consumer_twice(self) -> None:
        """Read from the ledger alone: acks, less what was taken back."""
        if not hasattr(self, "queue"):
            return
        acked = {name: set(keys) for name, keys in self.restored.items()}
        for entry in self.queue.ledger:
            keys = set(entry.get("keys", ()))
            if entry["event"] == "ack":
                assert acked[entry["consumer"]].isdisjoint(keys)
                acked[entry["consumer"]] |= keys
            elif entry["event"] == "rollback" and entry["consumer"]:
                assert acked[entry["consumer"]] >= keys
                acked[entry["consumer"]] -= keys
            elif entry["event"] == "clear":
                acked = {name: set() for name in NEEDS}


def check_queue_against_model(
    make: Callable[[TransferQueueContext], TransferQueueBackend] | None = None, examples: int = 5, steps: int = 40
) -> None:
    """Explore, put (of some columns, too), lease, ack, commit, rollback, lose, clear, checkpoint, crash and restart.

    Args:
        make: of the backend that keeps the values, in the folder of the context; None: the core's own, whose contents
            are then compared with the journal line by line.
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
    store: Callable[[], Store] = Memory if make is None else lambda: Elsewhere(make)
    run_state_machine_as_test(lambda: QueueMachine(store), settings=options)
