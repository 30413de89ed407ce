"""A queue whose processes are killed at random: producers, consumers, storage units and the controller.

    python queue_faults.py BACKEND FOLDER SECONDS SEED

``BACKEND`` is ``zmq`` (storage units; a killed controller goes on from its checkpoint) or ``sql`` (SQLite, with a
journal: it goes on where it was). The last line of the output is a JSON object of what was counted.

Three sorts of processes come from this one, which imports everything once, forks them and starts the controller again
after it has killed it. The *controller* runs the queue: an explorer fills batches, a scorer writes a column later, a
trainer takes whole batches in order, acks them and makes a checkpoint now and then; it kills the others. *Workers* put
and read the values, straight at the store. Values follow from a row's place, so that a reader knows the right ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import select
import signal
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from jackfield.abc.transfer_queue import TransferQueueBackend, TransferQueueContext
from jackfield.clock import Clock
from jackfield.errors import QueueError
from jackfield.queue import BatchMeta, TransferQueue, Values, effective_acks, read_ledger
from jackfield.queue.meta import Batch, GroupKey, NewGroup, RolloutReport, Written
from jackfield.queue.store import STORE_FILE
from jackfield.sdk.cells import column_from_rows, dense_column, rows_of
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config as SQLConfig
from jackfield_transport_zmq.backend import ZMQBackend
from jackfield_transport_zmq.config import QueueConfig

GROUPS, RUNS, AHEAD, SAVE_EVERY, UNITS = 3, 2, 3, 4, 2
PARTITION, TRAINER, SCORER = "train", "trainer", "scorer"
_END_SECONDS = 60.0
LARGE = 20_000  #: numbers of every fifth row, which go through shared memory


class Died(Exception):
    """A worker is gone, and with it what it was doing."""


# -- values


def place(key: str) -> tuple[int, int, int]:
    """Batch, group and rollout; the restart does not matter."""
    _, batch, group, _, rollout, _ = key.split("/")
    return int(batch), int(group), int(rollout.partition("r")[0])


def values_of(key: str) -> torch.Tensor:
    """What belongs to a row's place."""
    mark = zlib.crc32(str(place(key)).encode())
    return torch.arange(LARGE if mark % 5 == 0 else mark % 50) + mark


def made(name: str, keys: Sequence[str]) -> dict[str, Any]:
    """A column of rows."""
    if name == "ids":
        return {"ids": column_from_rows([values_of(key) for key in keys])}
    return {"score": dense_column(torch.tensor([float(values_of(key).sum()) for key in keys], dtype=torch.float64))}


async def right(values: Values, keys: Sequence[str]) -> bool:
    """Whether rows hold what belongs to their places."""
    found = await values.get(PARTITION, keys, ("ids", "score"))
    expected = [values_of(key) for key in keys]
    same = all(torch.equal(*pair) for pair in zip(rows_of(found["ids"]), expected, strict=True))
    return same and [float(each.sum()) for each in expected] == found["score"].values.tolist()


# -- workers


def backend_for(name: str, folder: Path, *, join: bool) -> TransferQueueBackend:
    context = TransferQueueContext(folder=str(folder / "queue"))
    if name == "sql":
        return SQLBackend(SQLConfig(), context)
    units = str(folder / "queue" / "units.json") if join else None
    return ZMQBackend(QueueConfig(units=UNITS, join=units, seconds=20.0), context)


async def work(name: str, folder: Path, channel: socket.socket) -> None:
    """Do what the controller asks for, until it is gone."""
    backend = backend_for(name, folder, join=True)
    await backend.start()
    values = Values(backend)
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    while line := await heard(reader):
        order = json.loads(line)
        try:
            if order["do"] == "read":
                answer: dict[str, Any] = {"right": await right(values, order["keys"])}
            else:
                columns = made(order["do"], order["keys"])
                answer = {"sizes": (await values.put(PARTITION, order["keys"], columns)).sizes}
        except QueueError as error:
            answer = {"code": error.code, "message": error.message, "found": error.found}
        writer.write(json.dumps(answer, default=str).encode() + b"\n")
    await backend.close()


async def heard(reader: asyncio.StreamReader) -> bytes:
    """A line; nothing where the other end has been killed."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


class Worker:
    """One worker, as the controller has it; another one takes its place when it has been killed."""

    def __init__(self, spawner: socket.socket) -> None:
        self._spawner = spawner
        self.turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.pid = 0

    async def ask(self, do: str, keys: Sequence[str]) -> dict[str, Any]:
        async with self.turn:
            if self._streams is None:
                self._spawner.send(b"w")
                pid, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, self._spawner, 32, 1)
                self.pid = int(pid)
                self._streams = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptors[0]))
            reader, writer = self._streams
            writer.write(json.dumps({"do": do, "keys": list(keys)}).encode() + b"\n")
            line = await Clock().wait_for(heard(reader), 60, f"worker {self.pid} to {do} {keys[0]}")
            if not line:
                writer.close()
                self._streams, self.pid = None, 0
                raise Died
        answer: dict[str, Any] = json.loads(line)
        if "code" in answer:
            raise QueueError(answer["message"], code=answer["code"], found=answer["found"])
        return answer


# -- the controller


class Controller:
    """One life of it."""

    def __init__(self, name: str, folder: Path, seed: str, spawner: socket.socket) -> None:
        self.name, self.folder = name, folder
        self.draw = random.Random(seed)
        self.producers = [Worker(spawner), Worker(spawner)]
        self.consumer = Worker(spawner)
        self.backend = backend_for(name, folder, join=False)
        self.step, self.moved = 0, asyncio.Event()
        self.last = False  #: the trainer takes no further batches
        self.fills: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Run until it is killed, or asked to end."""
        newest = max((int(each.name) for each in (self.folder / "checkpoints").glob("[0-9]*")), default=None)
        self.queue = queue = TransferQueue(
            self.backend,
            Clock(),
            store=self.folder / "queue" / STORE_FILE,
            durable=self.name == "sql",
            max_retries=1000,
        )
        await queue.start()
        await queue.register_consumer(SCORER, PARTITION, ("ids",), writes=("score",))
        await queue.register_consumer(TRAINER, PARTITION, ("ids", "score"))
        if newest is None:
            await queue.clear()
        else:
            await self.restore(self.folder / "checkpoints" / str(newest), newest)
        async with asyncio.TaskGroup() as tasks:
            loops = (self.explore(tasks), self.score(), self.kill())
            background = [tasks.create_task(loop) for loop in loops]
            await self.train()
            for worker in (*self.producers, self.consumer):
                with suppress(TimeoutError):  # what it writes is not broken off, to come after its rows' deletion
                    await asyncio.wait_for(worker.turn.acquire(), 5)
            for task in (*background, *self.fills):
                task.cancel()
        await queue.commit(self.step - 1)
        await queue.fail_lost()
        self.note("end", rows=(await queue.stats())["samples"], stored=(await self.flushed()))
        await queue.close()

    async def flushed(self) -> int:
        await self.queue.flush()
        return (await self.backend.stats()).samples

    async def restore(self, folder: Path, step: int) -> None:
        self.step = step
        kept = await self.queue.restore(folder, step - 1)
        assert kept or self.name != "sql", "the state is durable"
        self.note("recovered" if kept else "restored")

    def note(self, event: str, **fields: Any) -> None:
        """Append to what the count is made of."""
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    async def explore(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            batch = await self.queue.claim_batch(PARTITION, "explorer", GROUPS, rollouts=RUNS)
            assert batch is not None
            while batch.number >= self.step + AHEAD:
                self.moved.clear()
                await self.moved.wait()
            self.fills.append(tasks.create_task(self.fill(batch)))

    async def fill(self, batch: Batch) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for keys in self.queue.groups_to_fill(batch, 60):
                for key in keys:
                    tasks.create_task(self.make(key))

    async def make(self, key: GroupKey) -> None:
        await self.queue.open_groups([NewGroup(key=key, task_id=f"task-{key.index}", rollouts=RUNS)])
        for rollout in range(RUNS):
            if self.draw.random() < 0.03:
                report = RolloutReport(group=str(key), rollout=rollout, error="no answer")
                await self.queue.end_rollouts([report])
                continue
            await self.put(key, rollout)

    async def put(self, group: GroupKey, rollout: int) -> None:
        """Have a worker write a sample, under another key where it died over it, and report it."""
        for restart in itertools.count():
            worker, key = self.draw.choice(self.producers), group.sample(rollout, 0, restart)
            try:
                sizes = (await worker.ask("ids", [key]))["sizes"]
            except Died:
                continue
            except QueueError as error:
                if error.code != "queue.lost":
                    raise
                continue
            await self.queue.end_rollouts(
                [
                    RolloutReport(
                        group=str(group),
                        rollout=rollout,
                        keys=(key,),
                        written=Written(columns=("ids",), sizes=tuple(sizes)),
                    )
                ]
            )
            self.note("put", keys=[key])
            return

    async def score(self) -> None:
        """A column that comes later."""
        while True:
            batch = await self.queue.lease(SCORER, deadline_seconds=600)
            for indexes in batch.by_group().values():
                await self.score_group(batch.select(indexes))

    async def score_group(self, group: BatchMeta) -> None:
        while True:
            try:
                sizes = (await self.consumer.ask("score", group.keys))["sizes"]
                await self.queue.add_columns(group, Written(columns=("score",), sizes=tuple(sizes)))
                return
            except Died:
                continue
            except QueueError as error:
                if not set(await self.queue.fail_lost(group, error.found or ())) & set(group.keys):
                    raise
                await self.queue.release(group)
                return

    async def train(self) -> None:
        while not self.last:
            batch = await self.queue.lease(TRAINER, batch=self.step, deadline_seconds=60)
            try:
                assert (await self.consumer.ask("read", batch.keys))["right"], f"wrong values in {batch.keys}"
            except Died:
                await self.queue.release(batch)
                continue
            except QueueError as error:
                if error.code != "queue.lost":
                    raise
                if not await self.queue.fail_lost(batch, error.found):
                    raise
                await self.queue.release(batch)
                continue
            assert GROUPS * RUNS == len(batch)
            await self.queue.ack(batch, step=self.step)
            self.step += 1
            self.moved.set()
            if self.step % SAVE_EVERY == 0:
                await self.save()

    async def save(self) -> None:
        """A checkpoint is there when it has its name."""
        partial = self.folder / "checkpoints" / "partial"
        await self.queue.checkpoint(partial)
        partial.rename(partial.with_name(str(self.step)))
        await self.queue.commit(self.step - 1)

    async def kill(self) -> None:
        """Workers and units, at random; a unit that was killed is followed by another one."""
        while True:
            await asyncio.sleep(self.draw.uniform(0.05, 0.8))
            sort = self.draw.choice(["producer", "consumer", "unit"])
            if sort == "unit" and isinstance(self.backend, ZMQBackend):
                assert self.backend._client is not None
                directory = self.backend._client.directory
                living = [unit for unit in directory.units if unit.number not in directory.lost]
                os.kill(self.draw.choice(living).pid, signal.SIGKILL)
                self.note("killed", sort=sort)
                await self.backend.add_unit()
            elif sort != "unit" and (pid := (self.producers[0] if sort == "producer" else self.consumer).pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.note("killed", sort=sort)


# -- the process that forks them


class Zygote:
    """Forks controller and workers; kills the controller."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.folder, self.seed = name, folder, seed
        self.draw = random.Random(seed)
        self.lives = 0

    def fork(self, run: Any) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                asyncio.run(run())
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        return pid

    def life(self, seconds: float, *, last: bool) -> None:
        """One life of the controller, ended by SIGKILL; the last one is asked to end."""
        here, there = socket.socketpair()
        self.lives += 1

        async def control() -> None:
            here.close()
            controller = Controller(self.name, self.folder, f"{self.seed} {self.lives}", there)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, lambda: setattr(controller, "last", True))
            await controller.run()

        pid = self.fork(control)
        there.close()
        ends, workers, told = time.monotonic() + seconds, [], False
        while True:
            readable, _, _ = select.select([here], [], [], max(0.0, min(0.2, ends - time.monotonic())))
            if readable:
                with suppress(ConnectionError):  # the controller has been killed
                    if here.recv(1):
                        workers.append(self.worker(here))
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert told, f"the controller ended by itself: {status}"
                break
            late = time.monotonic() - ends
            if late >= 0 and not told and self.goes_on():
                os.kill(pid, signal.SIGTERM if last else signal.SIGKILL)
                told, ends, late = True, time.monotonic(), 0.0
            assert late < _END_SECONDS, (
                f"the controller, process {pid}, has no checkpoint, has not gone on from one, or does not end"
            )
        here.close()
        for worker in workers:  # they end when their controller has
            os.waitpid(worker, 0)
        assert (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0) if last else os.WIFSIGNALED(status), status

    def goes_on(self) -> bool:
        """Whether there is a checkpoint, and this life has gone on from the one that it found."""
        events = self.folder / "events.jsonl"
        notes = events.read_text() if events.is_file() else ""
        gone_on = notes.count('"event": "recovered"') + notes.count('"event": "restored"')
        return gone_on == self.lives - 1 and any((self.folder / "checkpoints").glob("[0-9]*"))

    def worker(self, channel: socket.socket) -> int:
        mine, theirs = socket.socketpair()

        async def run() -> None:
            mine.close()
            channel.close()
            await work(self.name, self.folder, theirs)

        pid = self.fork(run)
        with suppress(ConnectionError):  # the other end has closed, and this one ends
            socket.send_fds(channel, [str(pid).encode()], [mine.fileno()])
        mine.close()
        theirs.close()
        return pid

    def run(self, seconds: float) -> dict[str, Any]:
        """Lives of 2 to 6 seconds; then one that ends by itself."""
        (self.folder / "checkpoints").mkdir(parents=True)
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 4:
            self.life(min(left - 2, self.draw.uniform(2, 6)), last=False)
        self.life(2.0, last=True)
        return self.count()

    def count(self) -> dict[str, Any]:
        """From the ledger and the controllers' notes."""
        entries = list(read_ledger(self.folder))
        acks = effective_acks(entries)[TRAINER]
        places = Counter((step, *place(key)) for key, step in acks.items())
        steps = max(int(step or 0) for step in acks.values()) + 1
        expected = {(step, step, group, run) for step in range(steps) for group in range(GROUPS) for run in range(RUNS)}
        notes = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        sorts = Counter(note["sort"] for note in notes if note["event"] == "killed")
        return {
            "seed": self.seed,
            "steps": steps,
            "rows_put": sum(len(note["keys"]) for note in notes if note["event"] == "put"),
            "rows_acked": len(acks),
            "groups_failed": sum(entry["event"] == "drop" for entry in entries),
            "rows_lost_and_made_anew": sum(len(entry["keys"]) for entry in entries if entry["event"] == "lose"),
            "rows_taken_back": sum(
                len(entry["keys"]) for entry in entries if entry["event"] == "rollback" and entry["consumer"] == TRAINER
            ),
            "rows_lost": len(expected - places.keys()),
            "rows_doubled": sum(places.values()) - len(expected & places.keys()),
            "left_in_queue": [(note["rows"], note["stored"]) for note in notes if note["event"] == "end"],
            "killed": {**sorts, "controller": self.lives - 1},
            "recovered": sum(note["event"] == "recovered" for note in notes),
            "restored": sum(note["event"] == "restored" for note in notes),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    made_by = Zygote(sys.argv[1], Path(sys.argv[2]), int(sys.argv[4]))
    print(json.dumps(made_by.run(float(sys.argv[3]))), flush=True)
