"""A queue whose controller is served: the same interface from afar, and what becomes of clients that die."""

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

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, LeaseError, QueueError
from jackfield.queue import (
    GroupSlot,
    Lineage,
    LocalQueue,
    Priority,
    Reuse,
    Sampler,
    Ticket,
    TransferQueue,
    column_from_rows,
    dense_column,
)
from jackfield.queue.memory import MemoryBackend, MemoryConfig
from jackfield.queue.protocol import METHODS, ControllerAddress, method
from jackfield.queue.remote import RemoteQueue
from jackfield.queue.serving import QueueServer
from jackfield.sockets import Keys
from jackfield.wire import Wire

torch = pytest.importorskip("torch")


class Watched(MemoryBackend):
    """A store that several clients share here, and that outlives them."""

    async def start(self) -> None:
        """It runs."""

    async def close(self) -> None:
        """It stays."""


@attrs.define(eq=False)
class Served:
    """A controller and its clients, all in this process."""

    queue: LocalQueue
    server: QueueServer
    address: ControllerAddress
    backend: MemoryBackend
    clients: list[RemoteQueue] = attrs.field(factory=list)

    async def client(self, name: str = "a client") -> RemoteQueue:
        made = RemoteQueue(self.address, self.backend, Clock(), name)
        await made.start()
        self.clients.append(made)
        return made


@asynccontextmanager
async def served(heartbeat_seconds: float = 20.0, ledger: Path | None = None, **options: Any) -> AsyncIterator[Served]:
    backend = Watched(MemoryConfig(), TransferQueueContext())
    queue = LocalQueue(backend, Clock(), ledger=ledger)
    await queue.start()
    server = QueueServer(queue, Clock(), heartbeat_seconds=heartbeat_seconds, **options)
    world = Served(queue, server, await server.start(), backend)
    try:
        yield world
    finally:
        for each in world.clients:
            await each.close()
        await server.close()
        await queue.close()


def ids(rows: int = 1) -> dict[str, Any]:
    return {"ids": column_from_rows([torch.arange(3) + row for row in range(rows)])}


async def publish(queue: TransferQueue, ticket: Ticket, runs: int = 1) -> list[str]:
    """Fill a ticket's vacant slots."""
    groups, slots = [], queue.slots(ticket, 5)
    for _ in range(await queue.vacancies(ticket)):
        slot = await anext(slots)
        groups.append(await queue.open_group(slot, task_id=f"task-{slot.index}", runs=runs, tags={"hard": slot.index}))
        for run in range(runs):
            await queue.put_run(groups[-1], run, ids(), [{"rollout": run, "list": [1, 2.5, None, "x"]}])
    await slots.aclose()  # type: ignore[attr-defined]
    return groups


async def until(done: Callable[[], bool]) -> None:
    """Let the loop go on until something has come to pass."""
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0)


def test_every_method_of_the_interface_can_be_called_from_afar() -> None:
    """Apart from those that are the client's own."""
    own = {"start", "close", "done", "put", "put_run", "get"}
    public = {name for name in dir(TransferQueue) if not name.startswith("_")}
    assert set(METHODS) == public - own
    assert {"call", "iterator", "context"} == {method(name).sort for name in METHODS}


def test_a_remote_queue_does_what_a_local_one_does() -> None:
    async def main() -> None:
        async with served() as world:
            explorer, trainer = await world.client("explorer"), await world.client("trainer")
            await trainer.register_consumer("trainer", "train", ("ids", "reward"), reuse=Reuse(max_uses=2),
                                            sampler=Priority(decay=0.5))  # fmt: skip
            ticket = await explorer.claim_ticket("train", "e", 2)
            leasing = asyncio.ensure_future(trainer.lease_groups("trainer", 0, deadline_seconds=20))
            groups = await publish(explorer, ticket, runs=2)
            view = await explorer.wait_group_settled(groups[0], 5)
            assert view == await world.queue.group(groups[0])
            keys = [key for group in groups for key in (await explorer.group(group)).keys]
            assert tuple(keys) == await explorer.put(keys, {"reward": dense_column(torch.ones(4))}, [{"a": 1}] * 4)
            batch = await leasing
            assert tuple(keys) == batch.keys
            assert {"hard": 0, "rollout": 1, "a": 1}.items() <= batch.tags[1].items()
            assert [1, 2.5, None, "x"] == batch.tags[0]["list"]
            assert ids()["ids"].values.tolist() * 4 == (await trainer.get(batch, ["ids"]))["ids"].values.tolist()
            await trainer.renew(batch)
            assert batch.keys == await trainer.ack(batch, step=0)
            with pytest.raises(LeaseError, match="any more"):
                await trainer.ack(batch, step=0)
            again = await trainer.sample_groups("trainer", 2, 1, fresh=False)
            assert batch.keys == again.keys
            await trainer.release(again)
            await trainer.commit(0)
            await explorer.remember_lineage("theirs", Lineage("made", ("ours",)))
            assert {} == await explorer.drain_failures()
            stats = await trainer.stats()
            assert (4, 2, 0) == (stats["rows"], stats["clients"], stats["refused"])
            assert await world.queue.stats() == {n: v for n, v in stats.items() if n not in ("clients", "refused")}

    asyncio.run(main())


def test_values_do_not_pass_the_controller() -> None:
    """A batch of 4 MB is put, leased, read, given a column and acked, by messages of a few KB in all."""

    async def main() -> None:
        async with served() as world:
            client, sizes = await world.client(), list[int]()

            def counted(wire: Wire) -> Any:
                decode = wire.decode

                def count(frames: Any) -> Any:
                    sizes.extend(map(len, frames))
                    return decode(frames)

                return count

            for wire in (world.server._wire, client.connection._wire):
                wire.decode = counted(wire)  # type: ignore[method-assign]
            await client.register_consumer("trainer", "train", ("ids",))
            ticket = await client.claim_ticket("train", "e", 1)
            group = await client.open_group(await anext(client.slots(ticket, 5)), "t", runs=1)
            values = torch.arange(1 << 19)
            await client.put_run(group, 0, {"ids": column_from_rows([values])})
            batch = await client.lease_groups("trainer", 0, deadline_seconds=5)
            assert torch.equal(values, (await client.get(batch, ["ids"]))["ids"].values)
            await client.put(batch, {"more": column_from_rows([values])})
            await client.ack(batch, step=0)
            assert 2 * values.nbytes == (await client.stats())["bytes"]
            assert 20 < len(sizes), "requests and answers"
            assert sum(sizes) < 8192

    asyncio.run(main())


def test_rows_that_go_while_a_column_is_on_its_way_are_not_named() -> None:
    async def main() -> None:
        async with served() as world:
            client = await world.client()
            (group,) = await publish(client, await client.claim_ticket("train", "e", 1))
            keys, store = (await client.group(group)).keys, world.backend.put

            async def interrupted(request: Any) -> Any:
                await world.queue.drop_group(group, "filtered")
                return await store(request)

            world.backend.put = interrupted  # type: ignore[method-assign]
            assert () == await client.put(keys, {"reward": dense_column(torch.ones(1))})

    asyncio.run(main())


def test_waits_are_the_controllers_and_its_errors_arrive_as_they_were_raised() -> None:
    async def main() -> None:
        async with served() as world:
            client = await world.client()
            with pytest.raises(QueueError, match="no consumer 'nobody'") as caught:
                await client.lease("nobody")
            assert "queue.unknown-consumer" == caught.value.code
            await client.register_consumer("trainer", "train", ("ids",))
            ticket = await client.claim_ticket("train", "e", 1)
            group = await client.open_group(await anext(client.slots(ticket, 5)), "t7", runs=2)
            with pytest.raises(DeadlineExceeded, match=r"train/0/0/0 \(task 't7', runs 0, 1"):
                await client.lease("trainer", deadline_seconds=0.01)
            with pytest.raises(RuntimeError, match="the agent died"):
                async with client.ending_run(group, 0, written(1), [{}]):
                    raise RuntimeError("the agent died")
            assert ("train/0/0/0/0r1/0",) == await client.put_run(group, 0, ids()), "broken off, and done again"
            with pytest.raises(QueueError, match="has ended already"):
                await client.put_run(group, 0, ids())

    asyncio.run(main())


def written(rows: int) -> Any:
    from jackfield.queue import Written

    return Written(columns=("ids",), sizes=(24,) * rows)


def test_a_cancelled_call_ends_at_the_controller_and_what_it_had_got_is_given_back() -> None:
    async def main() -> None:
        async with served() as world:
            client = await world.client()
            await client.register_consumer("trainer", "train", ("ids",))
            waiting = asyncio.ensure_future(client.lease("trainer", deadline_seconds=60))
            consumer = world.queue._state.consumer("trainer")
            await until(lambda: consumer.row_demand == 1)
            waiting.cancel()
            await until(lambda: consumer.row_demand == 0)
            await publish(client, await client.claim_ticket("train", "e", 1))
            late = asyncio.ensure_future(client.lease("trainer", deadline_seconds=60))
            await until(lambda: bool(consumer.leased))  # granted; the client has not read the answer
            late.cancel()
            await until(lambda: not consumer.leased)
            assert 1 == len(await client.lease("trainer", deadline_seconds=5))

    asyncio.run(main())


def test_an_iteration_that_is_left_ends_at_the_controller() -> None:
    async def main() -> None:
        async with served() as world:
            client = await world.client()
            ticket = await client.claim_ticket("train", "e", 1)
            slots = client.slots(ticket, 60)
            first = await anext(slots)
            state = world.queue._state.partition("train").tickets[0]
            assert (GroupSlot(0, 0, 0, "train", "e"), 1) == (first, state.iterators)
            nothing_more = asyncio.ensure_future(anext(slots))
            await until(lambda: bool(state.changed._waiting))
            nothing_more.cancel()
            await asyncio.gather(nothing_more, return_exceptions=True)
            await until(lambda: state.iterators == 0)
            done = client.settled_groups("train")
            publishing = asyncio.ensure_future(anext(done))
            group = await client.open_group(first, "t", runs=1)
            await client.put_run(group, 0, ids())
            assert group == (await publishing).id
            await done.aclose()  # type: ignore[attr-defined]
            await until(lambda: not world.queue._state.partition("train").feeds)

    asyncio.run(main())


def test_what_a_client_leaves_is_handed_out_again() -> None:
    """Its explorers' tickets at once, what it has leased when the lease ends."""

    async def main() -> None:
        async with served() as world:
            dying, other = await world.client("explorer 1"), await world.client("explorer 2")
            await dying.register_consumer("trainer", "train", ("ids",), lease_seconds=0.3)
            ticket = await dying.claim_ticket("train", "one", 2)
            slots = dying.slots(ticket, 60)
            group = await dying.open_group(await anext(slots), "t", runs=2)
            await dying.put_run(group, 0, ids())
            leased = await dying.lease("trainer")
            open_run = dying.ending_run(group, 1, written(1), [{}])
            await open_run.__aenter__()
            await dying.close()
            assert 0 == await other.wait_offer("train", 5)
            again = await other.claim_ticket("train", "two", 2)
            assert (0, 2) == (again.number, await other.vacancies(again))
            await publish(other, again)
            new = await other.lease("trainer", deadline_seconds=10)
            assert not set(leased.keys) & set(new.keys)
            assert {"explorer 2"} == set(world.server.clients)

    asyncio.run(main())


def test_a_lease_outlives_its_holder_for_its_time() -> None:
    async def main() -> None:
        async with served() as world:
            dying, other = await world.client(), await world.client()
            await dying.register_consumer("trainer", "train", ("ids",), lease_seconds=0.5)
            await publish(dying, await dying.claim_ticket("train", "one", 1))
            leased = await dying.lease_groups("trainer", 0)
            await dying.close()
            with pytest.raises(DeadlineExceeded, match="1 rows are leased"):
                await other.lease("trainer", deadline_seconds=0.05)
            again = await other.lease("trainer", deadline_seconds=10)
            assert leased.keys == again.keys
            assert leased.claims[0].epoch < again.claims[0].epoch
            with pytest.raises(LeaseError):
                await other.ack(leased, step=0)

    asyncio.run(main())


def test_a_lease_without_a_time_lasts_as_long_as_its_holder() -> None:
    """Beyond the silence after which a dead client's would have ended; then others have the rows at once."""

    async def main() -> None:
        async with served(heartbeat_seconds=0.4) as world:
            holder, other = await world.client(), await world.client()
            await holder.register_consumer("trainer", "train", ("ids",))
            await publish(holder, await holder.claim_ticket("train", "one", 1))
            leased = await holder.lease_groups("trainer", 0)
            with pytest.raises(DeadlineExceeded, match="1 rows are leased"):
                await other.lease("trainer", deadline_seconds=1.5)
            await holder.renew(leased)
            await holder.close()
            again = await other.lease("trainer", deadline_seconds=10)
            assert leased.keys == again.keys
            with pytest.raises(LeaseError):
                await other.ack(leased, step=0)

    asyncio.run(main())


def test_a_process_that_is_killed_is_noticed_by_its_silence(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(heartbeat_seconds=1.0) as world:
            world.address.write(tmp_path / "address.json")
            assert 0o600 == (tmp_path / "address.json").stat().st_mode & 0o777
            code = f"""
import asyncio
from pathlib import Path
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.queue.memory import MemoryBackend, MemoryConfig
from jackfield.queue.protocol import ControllerAddress
from jackfield.queue.remote import RemoteQueue

async def main():
    address = ControllerAddress.read(Path({str(tmp_path / "address.json")!r}))
    queue = RemoteQueue(address, MemoryBackend(MemoryConfig(), TransferQueueContext()), Clock(), "to be killed")
    await queue.start()
    await queue.claim_ticket("train", "one", 1)
    print("claimed", flush=True)
    await queue.wait_notice("never", 0, 60)

asyncio.run(main())
"""
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            try:
                assert process.stdout is not None
                assert b"claimed\n" == await asyncio.to_thread(process.stdout.readline)
                os.kill(process.pid, signal.SIGKILL)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
            other = await world.client()
            assert 0 == await other.wait_offer("train", 20)

    asyncio.run(main())


def test_a_client_that_calls_nothing_is_heard_of() -> None:
    """A thread of its own says that it lives."""

    async def main() -> None:
        async with served(heartbeat_seconds=0.8) as world:
            await world.client("idle")
            (known,) = world.server._clients.values()
            for _ in range(6):
                known.heard = False
                await until(lambda: known.heard)
            assert ("idle",) == world.server.clients

    asyncio.run(main())


def test_a_controller_that_ends_ends_every_call() -> None:
    async def main() -> None:
        async with served() as world:
            client = await world.client()
            waiting = asyncio.ensure_future(client.wait_notice("never", 0, 60))
            await until(lambda: bool(world.queue._state.noticed._waiting))
            await world.server.close()
            with pytest.raises(QueueError, match="the queue's controller has ended") as caught:
                await waiting
            assert "queue.session" == caught.value.code
            with pytest.raises(QueueError, match="has ended"):
                await client.stats()
            await client.close()
            with pytest.raises(QueueError) as caught:
                await client.stats()
            assert "queue.closed" == caught.value.code

    asyncio.run(main())


def test_a_queue_that_was_made_another_one_says_so_to_those_who_had_begun(tmp_path: Path) -> None:
    """Who merely waits for notices goes on."""

    async def main() -> None:
        async with served(ledger=tmp_path / "ledger.jsonl") as world:
            explorer, trainer, idle = [await world.client(name) for name in ("explorer", "trainer", "idle")]
            await explorer.claim_ticket("train", "e", 1)
            notice = asyncio.ensure_future(idle.wait_notice("weights", 0, 20))
            slots = asyncio.ensure_future(anext(explorer.slots(Ticket("train", 0, 1, "e"), 20)))
            assert 0 == (await slots).index
            await trainer.clear(tmp_path / "empty")
            await until(lambda: "explorer" not in world.server.clients)
            with pytest.raises(QueueError, match=r"made another one \(clear\) by trainer"):
                await explorer.claim_ticket("train", "e", 1)
            await trainer.post("weights", {"version": 3})
            assert {"version": 3} == (await notice).value
            assert 0 == (await trainer.claim_ticket("train", "t", 1)).number

    asyncio.run(main())


def test_a_trainer_comes_back_to_a_controller_that_lived_on(tmp_path: Path) -> None:
    """Its leases and the acks after its checkpoint are taken back; explorers notice nothing."""

    async def main() -> None:
        async with served(ledger=tmp_path / "ledger.jsonl") as world:
            explorer, trainer = await world.client("explorer"), await world.client("trainer")
            await trainer.register_consumer("trainer", "train", ("ids",))
            for _ in range(3):
                await publish(explorer, await explorer.claim_ticket("train", "e", 1))
            await trainer.ack(await trainer.lease_groups("trainer", 0), step=0)
            await trainer.checkpoint(tmp_path / "queue")
            await trainer.commit(0)
            lost = await trainer.lease_groups("trainer", 1)
            await trainer.ack(lost, step=1)
            await trainer.lease_groups("trainer", 2)
            await trainer.close()  # killed, say
            slots = explorer.slots(await explorer.claim_ticket("train", "e", 1), 20)
            open_group = await explorer.open_group(await anext(slots), "t", runs=1)
            again = await world.client("trainer, again")
            assert await again.recover(tmp_path / "queue", 0)
            assert lost.keys == (await again.lease_groups("trainer", 1, deadline_seconds=0)).keys
            assert 1 == len(await again.lease_groups("trainer", 2, deadline_seconds=0))
            assert ("train/3/0/0/0/0",) == await explorer.put_run(open_group, 0, ids())

    asyncio.run(main())


def test_a_sampler_of_ones_own_has_to_be_registered() -> None:
    class Mine(Sampler):
        def sample(self, ready: Any, count: int | None) -> Any:
            return list(ready)[:count]

    async def main() -> None:
        async with served() as world:
            client = await world.client()
            with pytest.raises(QueueError, match="a sampler cannot go") as caught:
                await client.register_consumer("trainer", "train", ("ids",), sampler=Mine())
            assert "Mine" == caught.value.found

    asyncio.run(main())


# -- who gets in, and with what


def test_what_is_no_call_is_refused_and_counted_and_the_others_go_on() -> None:
    async def main() -> None:
        async with served() as world:
            client = await world.client()
            line = client.connection
            for name, arguments in (
                ("_check", {}),
                ("state_dict", {}),
                ("get", {"target": ["a"], "columns": ["ids"]}),
                ("lease", {"consumer": 7}),
                ("lease", {"consumer": "trainer", "more": 1}),
                ("claim_ticket", {"partition": "train", "explorer": "e", "groups": True}),
                ("ack", {"batch": {"keys": ["a"]}}),
            ):
                number = next(line._numbers)
                answer = line._ask(number, None, "call", {"id": number, "method": name, "arguments": arguments})
                with pytest.raises(QueueError):
                    await answer.answer
            number = next(line._numbers)
            answer = line._ask(number, None, "next", {"id": number, "opened": 1000})
            with pytest.raises(QueueError, match="nothing is iterated over"):
                await answer.answer
            assert 7 == world.server.refused.total()
            for frames in ([b""], [b"GET / HTTP/1.1\r\n\r\n"], [b"JKF\x01" + bytes(40)], [bytes(100), b"more"]):
                line._socket.send_multipart(frames)  # type: ignore[union-attr]
            stats = await client.stats()
            assert 11 == stats["refused"]
            assert {"rpc.malformed": 3, "rpc.authentication": 1}.items() <= world.server.refused.items()

    asyncio.run(main())


@pytest.mark.parametrize("knows", ["everything", "no secret", "no key"])
def test_beyond_loopback_only_those_with_the_address_file_get_in(tmp_path: Path, knows: str) -> None:
    async def main() -> None:
        async with served(heartbeat_seconds=1.0, encrypted=True) as world:
            world.address.write(tmp_path / "address.json")
            address = ControllerAddress.read(tmp_path / "address.json")
            assert address.address.startswith("tcp://127.0.0.1:")
            assert address.keys is not None
            assert "" == address.keys.server_secret, "the file does not have it"
            if knows == "no secret":
                address = attrs.evolve(address, secret=bytes(32))
            elif knows == "no key":
                mine = Keys.make()
                address = attrs.evolve(address, keys=attrs.evolve(mine, server_public=address.keys.server_public))
            client = RemoteQueue(address, world.backend, Clock(), "somebody")
            if knows == "everything":
                await client.start()
                assert 0 == (await client.stats())["refused"]
                await client.close()
                return
            with pytest.raises(QueueError, match="did not answer for 1 s") as caught:
                await client.start()
            assert "queue.session" == caught.value.code
            assert ({"rpc.authentication"} if knows == "no secret" else {"key"}) == set(world.server.refused)

    asyncio.run(main())


def test_a_missing_address_file_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match="no controller of a queue") as caught:
        ControllerAddress.read(tmp_path / "address.json")
    assert "jackfield queue serve" in str(caught.value.fix)
