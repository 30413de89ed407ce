"""A transfer session refuses strangers and names the ends that are late or leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError
from jackfield.sdk.rpc import Address, connect
from jackfield.sdk.transfer import TRANSFER, OneSenderEngine, SessionSettings


class Engine(OneSenderEngine):
    """An end that moves no tensors."""

    async def launch(self, content: Any, entries: Any) -> None:
        raise NotImplementedError


Test = Callable[[Engine, dict[str, Any]], Awaitable[None]]


def make(end: Any, seconds: float, host: str = "127.0.0.1", port: int = 0) -> Engine:
    return Engine(SessionSettings(port=port), CheckpointEngineContext(end=end, deadline_seconds=seconds, host=host))


async def opened(sender: Engine) -> dict[str, Any]:
    address: dict[str, Any] = (await sender.prepare()).metadata["session"]
    return address


def run(test: Test, seconds: float = 20.0, host: str = "127.0.0.1") -> None:
    async def main() -> None:
        sender = make("sender", seconds, host)
        try:
            await test(sender, await opened(sender))
        finally:
            await sender.finalize()

    asyncio.run(main())


async def came(address: dict[str, Any], worker: int, version: int = 1, seconds: float = 20.0) -> Engine:
    made = make("receiver", seconds)
    try:
        await made.connect(ConnectRequest(arguments={"session": address, "worker": worker}, version=version))
    except BaseException:
        await made.finalize()
        raise
    return made


def admission(sender: Engine, workers: int, version: int = 1) -> asyncio.Future[None]:
    return asyncio.ensure_future(sender.connect(ConnectRequest(arguments={"workers": workers}, version=version)))


async def met(sender: Engine, address: dict[str, Any], workers: int) -> list[Engine]:
    admitted = admission(sender, workers)
    found = [await came(address, number) for number in reversed(range(workers))]
    await admitted
    return found[::-1]


async def code_of(awaitable: Awaitable[Any]) -> str:
    with pytest.raises(JackfieldError) as caught:
        await awaitable
    return caught.value.code


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"], ids=["within the host", "over TLS"])
def test_what_is_posted_arrives_in_order(host: str) -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        if host != "127.0.0.1":
            address = {**address, "host": "127.0.0.1"}
        workers = await met(sender, address, 2)
        for count in range(3):
            workers[1].tell({"room": count, "worker": 1})
        await sender.until(lambda peer: peer.name == "worker 0" or peer.said.get("room") == 2, "make room")
        sender.tell({"word": 7})
        for worker in workers:
            await worker.until(lambda peer: peer.said.get("word") == 7, "send")
            await worker.finalize()

    run(test, host=host)


def test_what_sends_heartbeats_to_another_machine_ends_with_the_session() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        elsewhere = {**address, "process": {**address["process"], "place": "another machine"}}
        (worker,) = await met(sender, elsewhere, 1)
        assert _beating()
        await worker.finalize()
        await Clock().wait_for(_silent(), 10.0, "the thread that sends heartbeats")

    run(test)


def _beating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "jackfield-heartbeat"]


async def _silent() -> None:
    while _beating():
        await asyncio.sleep(0.01)


def test_a_stranger_that_does_not_know_the_secret_is_refused() -> None:
    """It can neither enter nor post, and the workers are not affected."""

    async def test(sender: Engine, address: dict[str, Any]) -> None:
        admitted = admission(sender, 1)
        assert "weights.transfer" == await code_of(came({**address, "secret": "00" * 32}, 0))
        worker = await came(address, 0)
        await admitted
        await worker.finalize()

    run(test)


def test_a_client_posts_nothing_before_it_has_entered() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        (worker,) = await met(sender, address, 1)
        place = msgspec.convert(address, Address)
        connection = await connect(place, "worker 0", Clock(), {"transfer": TRANSFER})
        calling = connection.call("transfer.post", [{"broken": "lies"}], 5.0, None, "lie")
        assert "weights.transfer" == await code_of(calling)
        await connection.close()
        sender.tell({"word": 1})
        await worker.until(lambda peer: peer.said.get("word") == 1, "send")
        await worker.finalize()

    run(test)


def test_a_number_is_given_once() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        admitted = admission(sender, 2)
        first = await came(address, 0)
        for number in (0, 5):
            assert "weights.transfer" == await code_of(came(address, number))
        second = await came(address, 1)
        await admitted
        await first.finalize()
        await second.finalize()

    run(test)


def test_workers_that_do_not_come_are_named() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        admitted = admission(sender, 3)
        worker = await came(address, 1)
        with pytest.raises(DeadlineExceeded) as caught:
            await admitted
        assert [True, False, True] == [f"worker {number}" in str(caught.value) for number in range(3)]
        await worker.finalize()

    run(test, seconds=0.3)


def test_a_peer_that_is_not_ready_is_named() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        workers = await met(sender, address, 2)
        workers[0].tell({"room": 1})
        with pytest.raises(DeadlineExceeded) as caught:
            await sender.until(lambda peer: "room" in peer.said, "make room")
        assert "worker 1" in str(caught.value)
        assert "worker 0" not in str(caught.value)
        for worker in workers:
            await worker.finalize()

    run(test, seconds=0.5)


def test_another_version_is_noticed_at_both_ends() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        admitted = admission(sender, 1, 2)
        with pytest.raises(WeightsError) as caught:
            await came(address, 0, version=1)
        assert ("weights.version", 1, 2) == (caught.value.code, caught.value.expected, caught.value.found)
        assert "weights.transfer" == await code_of(admitted)

    run(test)


def test_a_reason_reaches_the_others_and_a_finished_worker_may_leave() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        workers = await met(sender, address, 2)
        workers[0].peers[0].said["done"] = True
        assert [] == [item async for item in workers[0].receive_weights()]
        await workers[0].finalize()
        ending = asyncio.ensure_future(sender.until(lambda peer: "done" in peer.said, "take everything"))
        await asyncio.sleep(0.01)
        assert not ending.done()
        workers[1]._why = "broke off: OSError: disk"
        await workers[1].finalize()
        with pytest.raises(WeightsError) as caught:
            await ending
        assert "worker 1 broke off: OSError: disk" in caught.value.message

    run(test)


@pytest.mark.parametrize("end", ["sender", "worker"])
def test_an_end_whose_connection_is_cut_is_named_at_once(end: str) -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        (worker,) = await met(sender, address, 1)
        session, name = (worker, "the sender") if end == "sender" else (sender, "worker 0")
        other = sender if end == "sender" else worker
        other.peers[0].connection._transport.abort()  # type: ignore[union-attr]
        with pytest.raises(WeightsError) as caught:
            await session.until(lambda peer: "done" in peer.said, "finish")
        assert "weights.transfer" == caught.value.code
        assert name in caught.value.message
        await worker.finalize()

    run(test)


def test_a_port_that_is_taken_is_named(unused_port: int) -> None:
    async def main() -> None:
        first = make("sender", 20.0, port=unused_port)
        address = await opened(first)
        with pytest.raises(WeightsError) as caught:
            await make("sender", 20.0, port=address["port"]).prepare()
        assert ("weights.transfer", f"127.0.0.1:{address['port']}") == (caught.value.code, caught.value.where)
        await first.finalize()

    asyncio.run(main())


def test_a_sender_that_cannot_be_reached_is_an_error() -> None:
    async def test(sender: Engine, address: dict[str, Any]) -> None:
        await sender.finalize()
        assert "weights.transfer" == await code_of(came(address, 0))

    run(test)
