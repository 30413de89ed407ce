"""Sender and workers meet: only who knows the secret comes in, everybody who is late or leaves is named."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.weights.meeting import Meeting, reason_of


def run(
    test: Callable[[Meeting, dict[str, Any]], Awaitable[None]], seconds: float = 20.0, patience: float = 0.0
) -> None:
    async def main() -> None:
        sender = Meeting(seconds, patience=patience)
        try:
            await test(sender, sender.open("127.0.0.1"))
        finally:
            await sender.close()

    asyncio.run(main())


async def came(
    address: dict[str, Any], worker: int, version: int = 1, seconds: float = 20.0, patience: float = 0.0
) -> Meeting:
    meeting = Meeting(seconds, patience=patience)
    try:
        await meeting.enter(**address, worker=worker, version=version)
    except BaseException:
        await meeting.close()
        raise
    return meeting


def test_what_is_said_arrives_in_order() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(2, 1))
        workers = [await came(address, number) for number in (1, 0)]
        await admitted
        for count in range(3):
            workers[0].tell({"room": count, "worker": 1})
        await sender.until(lambda peer: peer.number == 0 or peer.said.get("room") == 2, "make room")
        sender.tell({"bucket": 7})
        for worker in workers:
            await worker.until(lambda peer: peer.said.get("bucket") == 7, "send")
            await worker.close()

    run(test)


@pytest.mark.parametrize("hello", [{"worker": 0, "version": 1}, {"secret": "é", "worker": 0, "version": 1}, [1], "x"])
def test_who_does_not_know_the_secret_is_sent_away(hello: Any) -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(1, 1))
        reader, writer = await asyncio.open_connection(address["host"], address["port"])
        text = json.dumps(hello).encode()
        writer.write(struct.pack(">Q", len(text)) + text)
        assert b"" == await reader.read()
        writer.close()
        await writer.wait_closed()
        worker = await came(address, 0)
        await admitted
        await worker.close()

    run(test)


def test_a_stranger_cannot_make_the_sender_take_memory() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(1, 1))
        reader, writer = await asyncio.open_connection(address["host"], address["port"])
        writer.write(struct.pack(">Q", 1 << 40))
        assert b"" == await reader.read()
        writer.close()
        await writer.wait_closed()
        admitted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admitted

    run(test)


def test_a_number_is_given_once() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(2, 1))
        first = await came(address, 0)
        for number in (0, 5):
            with pytest.raises(WeightsError) as caught:
                await came(address, number)
            assert "weights.transfer" == caught.value.code
        second = await came(address, 1)
        await admitted
        await first.close()
        await second.close()

    run(test)


def test_workers_that_do_not_come_are_named() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(3, 1))
        worker = await came(address, 1)
        with pytest.raises(DeadlineExceeded, match="worker 0 and worker 2 to connect"):
            await admitted
        await worker.close()

    run(test, seconds=0.3)


def test_whoever_is_not_ready_is_named() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(2, 1))
        workers = [await came(address, number) for number in (0, 1)]
        await admitted
        workers[0].tell({"room": 1})
        with pytest.raises(DeadlineExceeded, match="for worker 1 to make room,"):
            await sender.until(lambda peer: "room" in peer.said, "make room")
        for worker in workers:
            await worker.close()

    run(test, seconds=0.5)


def test_another_version_is_noticed_at_both_ends() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(1, 2))
        with pytest.raises(WeightsError) as caught:
            await came(address, 0, version=1)
        assert ("weights.version", 1, 2) == (caught.value.code, caught.value.expected, caught.value.found)
        with pytest.raises(WeightsError, match="worker 0 expects weights of version 1"):
            await admitted

    run(test)


def test_a_reason_reaches_the_others_and_done_may_leave() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(2, 1))
        workers = [await came(address, number) for number in (0, 1)]
        await admitted
        workers[0].tell({"done": True})
        await workers[0].close()
        with pytest.raises(WeightsError, match="worker 1 broke off: OSError: disk"):
            await asyncio.gather(
                sender.until(lambda peer: "done" in peer.said, "take everything"),
                workers[1].close(reason_of(OSError("disk"))),
            )
        await sender.close("broke off: " + "x")

    run(test)


def test_a_worker_whose_connection_breaks_comes_back() -> None:
    """Both say again what they have said, also what was said meanwhile; nobody else comes in its place."""

    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(2, 1))
        other, worker = [await came(address, number, patience=20.0) for number in (0, 1)]
        await admitted
        for count in (1, 2):
            worker.peers[0].writer.transport.abort()
            worker.tell({"got": count})
            other.tell({"got": count})
            sender.tell({"made": count})
            await sender.until(lambda peer, count=count: peer.said.get("got") == count, "take a chunk")  # type: ignore[misc]
            await worker.until(lambda peer, count=count: peer.said.get("made") == count, "make a chunk")  # type: ignore[misc]
        with pytest.raises(WeightsError) as caught:
            await came(address, 1)
        assert "weights.transfer" == caught.value.code
        for each in (other, worker):
            each.tell({"done": True})
        await sender.until(lambda peer: "done" in peer.said, "take everything")
        await other.close()
        await worker.close()

    run(test, patience=20.0)


def test_a_worker_that_does_not_come_back_is_named() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(1, 1))
        worker = await came(address, 0, patience=0.2)
        await admitted
        await worker.close()
        with pytest.raises(WeightsError, match=r"worker 0 died or was cut off .* did not come back within 0\.2 s"):
            await sender.until(lambda peer: "done" in peer.said, "take everything")

    run(test, patience=0.2)


def test_a_sender_that_does_not_come_back_is_named() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        admitted = asyncio.ensure_future(sender.admit(1, 1))
        worker = await came(address, 0, patience=0.2)
        await admitted
        await sender.close()
        with pytest.raises(WeightsError, match=r"the sender died or was cut off .* did not come back within 0\.2 s"):
            await worker.until(lambda peer: "done" in peer.said, "send")
        await worker.close()

    run(test, patience=0.2)


def test_a_port_that_is_taken_is_named() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        with pytest.raises(WeightsError, match=rf"(?s)cannot listen.*127\.0\.0\.1:{address['port']}"):
            Meeting(20.0).open("127.0.0.1", address["port"])

    run(test)


def test_a_sender_that_cannot_be_reached_is_named() -> None:
    async def test(sender: Meeting, address: dict[str, Any]) -> None:
        await sender.close()
        with pytest.raises(WeightsError, match=f"cannot be reached.*127.0.0.1:{address['port']}"):
            await came(address, 0)

    run(test)
