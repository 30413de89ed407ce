"""A served queue has the same interface for remote clients and cleans up after clients that end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, QueueError
from jackfield.queue import TransferQueue
from jackfield.queue.meta import Reuse, SamplerSpec
from jackfield.queue.transfer_queue import QUEUE, QueueServer, connect_queue
from jackfield.sdk.cells import column_from_rows
from jackfield.sdk.rpc import Connection

torch = pytest.importorskip("torch")


@attrs.define(eq=False)
class Served:
    """A controller and its clients, all in this process."""

    queue: TransferQueue
    server: QueueServer
    file: Path
    connections: list[Connection] = attrs.field(factory=list)

    async def client(self, name: str = "a client") -> Any:
        from jackfield_queue_bench import Bench

        queue, connection = await connect_queue(self.file, name, Clock())
        self.connections.append(connection)
        queue.backend = self.queue.backend
        return Bench(queue, Clock())  # type: ignore[arg-type]


@asynccontextmanager
async def served(folder: Path, heartbeat_seconds: float = 20.0, host: str = "127.0.0.1") -> AsyncIterator[Served]:
    from jackfield_queue_bench import Memory

    queue = TransferQueue(Memory(), Clock())
    await queue.start()
    server = QueueServer(queue, Clock(), heartbeat_seconds)
    address = await server.listen(host, 0)
    address.write(folder / "address.json")
    world = Served(queue, server, folder / "address.json")
    try:
        yield world
    finally:
        for each in world.connections:
            await each.close()
        await server.close()
        await queue.close()


async def until(done: Callable[[], bool]) -> None:
    """Run the loop until a condition holds."""
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0)


def test_the_contract_has_the_methods_of_the_queue_that_are_not_its_owners() -> None:
    owned = {"start", "close", "end_holder"}
    public = {name for name in dir(TransferQueue) if not name.startswith("_") and name != "ledger"}
    assert {method.name for method in QUEUE} == public - owned
    assert {"groups_to_fill", "new_samples"} == {method.name for method in QUEUE if method.streams}


def test_a_remote_queue_does_what_a_local_one_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as world:
            explorer, trainer = await world.client("explorer"), await world.client("trainer")
            sampler = SamplerSpec(name="priority", options={"decay": 0.5})
            await trainer.trainer("ids", "reward", reuse=Reuse(max_uses=2), sampler=sampler)
            batch = await explorer.claim(2)
            leasing = asyncio.ensure_future(trainer.lease(0, seconds=20.0))
            coming = asyncio.ensure_future(anext(explorer.queue.new_samples("train")))
            await explorer.publish(batch)
            first, *_ = await coming
            keys = tuple(f"train/0/{group}/0/{rollout}/0" for group in range(2) for rollout in range(2))
            assert keys[0] == first
            assert keys == await explorer.reward(keys)
            meta = await leasing
            assert keys == meta.keys
            assert {"batch": 0, "group": 0, "retry": 0, "rollout": 1}.items() <= meta.tags[1].items()
            assert [0, 0, 0] * 4 == (await trainer.values.read(meta, ["ids"]))["ids"].values.tolist()
            await trainer.queue.ack(meta, step=0)
            with pytest.raises(QueueError) as twice:
                await trainer.queue.ack(meta, step=0)
            assert "queue.lease" == twice.value.code
            again = await trainer.queue.lease("trainer", 2, step=1, fresh=False)
            assert set(meta.keys) == set(again.keys)
            await trainer.queue.release(again)
            await trainer.queue.commit(0)
            assert {} == await explorer.queue.drain_failures()
            stats = await trainer.queue.stats()
            assert (4, 2, 0) == (stats["samples"], stats["clients"], stats["refused"])

    asyncio.run(main())


def test_values_do_not_pass_the_controller(tmp_path: Path) -> None:
    """Putting, leasing, reading, extending and acking a sample of 4 MB takes messages of a few KB in total."""

    async def main() -> None:
        async with served(tmp_path) as world:
            client, sizes = await world.client(), list[int]()
            for connection in (world.connections[0], *world.server.clients.values()):
                took = connection.data_received
                connection.data_received = lambda data, took=took: (sizes.append(len(data)), took(data))  # type: ignore
            await client.trainer()
            (key,) = await client.vacant(await client.claim())
            values = torch.arange(1 << 19)
            await client.report(await client.open(key, 1), 0, {"ids": column_from_rows([values])})
            meta = await client.lease(0, seconds=5.0)
            assert torch.equal(values, (await client.values.read(meta, ["ids"]))["ids"].values)
            written = await client.values.write(meta, {"more": column_from_rows([values])})
            await client.queue.add_columns(meta, written)
            await client.queue.ack(meta, step=0)
            assert 2 * values.nbytes == (await client.queue.stats())["bytes"]
            assert 10 < len(sizes)
            assert sum(sizes) < 8192

    asyncio.run(main())


def test_errors_arrive_as_they_were_raised(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as world:
            client = await world.client()
            for wrong, code in (
                (client.queue.lease("missing"), "queue.unknown-consumer"),
                (client.queue.fail_samples({"train/9/0/0/0/0": "x"}), "queue.unknown-sample"),
                (client.queue.claim_batch("train", "e", "two"), "rpc.value"),
            ):
                with pytest.raises(JackfieldError) as caught:
                    await wrong
                assert code == caught.value.code
            await client.trainer()
            (key,) = await client.vacant(await client.claim())
            await client.open(key)
            with pytest.raises(DeadlineExceeded) as late:
                await client.lease(0, seconds=0.01)
            assert "train/0/0/0 (task 'task-0', rollouts 0, 1)" in late.value.message

    asyncio.run(main())


def test_a_cancelled_wait_ends_at_the_controller_and_gives_back_its_lease(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as world:
            client = await world.client()
            await client.trainer()
            waiting = asyncio.ensure_future(client.queue.lease("trainer", deadline_seconds=60))
            consumer = world.queue._core.state.consumer("trainer")
            await until(lambda: consumer.awaited == [None])
            waiting.cancel()
            await until(lambda: not consumer.awaited)
            await client.publish(await client.claim())
            late = asyncio.ensure_future(client.queue.lease("trainer", deadline_seconds=60))
            await until(lambda: bool(consumer.held))  # granted; the client has not read the reply
            late.cancel()
            await until(lambda: not consumer.held)
            assert 2 == len(await client.queue.lease("trainer", deadline_seconds=5))

    asyncio.run(main())


def test_an_iteration_that_is_left_ends_at_the_controller(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as world:
            client = await world.client()
            groups = client.queue.groups_to_fill(await client.claim(), 60)
            await anext(groups)
            state = world.queue._core.state.partition("train").batches[0]
            assert 1 == state.readers
            more = asyncio.ensure_future(anext(groups))
            await until(lambda: len(world.queue._core.change._waiters) > 1)  # beside the deletion
            more.cancel()
            await asyncio.gather(more, return_exceptions=True)
            await groups.aclose()
            await until(lambda: not state.readers)

    asyncio.run(main())


def test_what_a_client_leaves_is_handed_out_again(tmp_path: Path) -> None:
    """The batches of its explorers and its leases end with the client."""

    async def main() -> None:
        async with served(tmp_path, heartbeat_seconds=0.4) as world:
            dying, other = await world.client("explorer 1"), await world.client("explorer 2")
            await dying.trainer()
            await dying.publish(await dying.claim(explorer="one"))
            leased = await dying.lease(0)
            await dying.claim(explorer="one")
            with pytest.raises(DeadlineExceeded):
                await other.queue.lease("trainer", deadline_seconds=1.5)  # beyond several heartbeats
            await world.connections[0].close("has ended before its work was done")
            again = await other.queue.lease("trainer", deadline_seconds=10)
            assert leased.keys == again.keys
            with pytest.raises(QueueError) as ended:
                await other.queue.ack(leased, step=0)
            assert "queue.lease" == ended.value.code
            assert 1 == (await other.claim(explorer="two")).number

    asyncio.run(main())


def test_a_process_that_is_killed_is_noticed(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from jackfield.clock import Clock
from jackfield.queue.transfer_queue import connect_queue

async def main():
    queue, connection = await connect_queue(Path(sys.argv[1]), "to be killed", Clock())
    await queue.claim_batch("train", "one", 1)
    print("claimed", flush=True)
    await queue.wait_notice("never", 0, 60)

asyncio.run(main())
"""

    async def main() -> None:
        async with served(tmp_path, heartbeat_seconds=1.0) as world:
            assert 0o600 == world.file.stat().st_mode & 0o777
            command = [sys.executable, "-c", program, str(world.file)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            try:
                assert process.stdout is not None
                assert b"claimed\n" == await asyncio.to_thread(process.stdout.readline)
                os.kill(process.pid, signal.SIGKILL)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
            other = await world.client()
            again = await other.queue.claim_batch("train", "two", 1, below=1, deadline_seconds=20)
            assert 0 == again.number

    asyncio.run(main())


def test_a_controller_that_ends_ends_every_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as world:
            client = await world.client()
            waiting = asyncio.ensure_future(client.queue.wait_notice("never", 0, 60))
            await until(lambda: len(world.queue._core.change._waiters) > 1)
            await world.server.close()
            for call in (waiting, client.queue.stats()):
                with pytest.raises(QueueError) as caught:
                    await call
                assert "queue.session" == caught.value.code

    asyncio.run(main())


def test_a_queue_that_was_made_another_one_ends_those_who_had_begun(tmp_path: Path) -> None:
    """A client that only waits for notices is not ended."""

    async def main() -> None:
        async with served(tmp_path) as world:
            explorer, trainer, idle = [await world.client(name) for name in ("explorer", "trainer", "idle")]
            await explorer.claim()
            notice = asyncio.ensure_future(idle.queue.wait_notice("weights", 0, 20))
            await until(lambda: len(world.queue._core.change._waiters) > 1)
            await trainer.queue.clear()
            await until(world.connections[0].lost.done)
            with pytest.raises(QueueError) as caught:
                await explorer.claim()
            assert "queue.session" == caught.value.code
            await trainer.queue.post("weights", {"version": 3})
            assert {"version": 3} == (await notice).value
            assert 0 == (await trainer.claim()).number

    asyncio.run(main())


def test_a_trainer_comes_back_to_a_controller_that_lived_on(tmp_path: Path) -> None:
    """Its leases and the acks after its checkpoint are revoked; explorers are not affected."""

    async def main() -> None:
        async with served(tmp_path) as world:
            explorer, trainer = await world.client("explorer"), await world.client("trainer")
            await trainer.trainer()
            for _ in range(3):
                await explorer.publish(await explorer.claim())
            await trainer.queue.ack(await trainer.lease(0), step=0)
            await trainer.queue.checkpoint(tmp_path / "queue")
            await trainer.queue.commit(0)
            lost = await trainer.lease(1)
            await trainer.queue.ack(lost, step=1)
            await trainer.lease(2)
            await world.connections[1].close("has ended before its work was done")  # as if it were killed
            (key,) = await explorer.vacant(await explorer.claim())
            group = await explorer.open(key, 1)
            again = await world.client("trainer, again")
            assert await again.queue.restore(tmp_path / "queue", 0)
            assert lost.keys == (await again.lease(1)).keys
            assert 2 == len(await again.lease(2))
            assert ("train/3/0/0/0/0",) == await explorer.end(group, 0)

    asyncio.run(main())


def test_a_missing_address_file_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(QueueError) as caught:
        asyncio.run(connect_queue(tmp_path / "address.json", "me", Clock()))
    assert "queue.unreachable" == caught.value.code
    assert "jackfield queue serve" in str(caught.value.fix)
