"""RPC over real sockets and processes: calls, iterations, errors, cancellation, deaths and strangers."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RolloutError, RpcError
from jackfield.sdk.rpc import Address, Connection, Contract, Process, Server, Service, caller, connect, stub

SECONDS = 30.0


@attrs.frozen(kw_only=True)
class Meta:
    """A value that is sent."""

    keys: tuple[str, ...] = attrs.field(default=(), validator=attrs.validators.max_len(3))
    tags: tuple[Mapping[str, Any], ...] = ()


class Queue:
    """An object that is served."""

    def __init__(self) -> None:
        self.released: list[Meta] = []
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.cancelled = self.closed = 0

    async def echo(self, meta: Meta | None) -> Meta | None:
        return meta

    async def lease(self, count: int, deadline_seconds: float = SECONDS) -> Meta:
        self.asked.set()
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Meta(keys=("a", "b")[:count])

    async def release(self, meta: Meta) -> None:
        self.released.append(meta)

    async def groups(self, count: int) -> AsyncIterator[tuple[str, ...]]:
        try:
            for number in range(count):
                yield (f"group-{number}",)
        finally:
            self.closed += 1

    async def fail(self, how: str) -> None:
        if how == "ours":
            raise RolloutError("no weights", code="rollout.stale", where="replica 1", fix="wait")
        raise ValueError("a mistake")

    async def who(self) -> str:
        return caller().name


CONTRACT = Contract(Queue, undo={"lease": "release"})


class World:
    """A server with one client."""

    def __init__(self, server: Server, queue: Queue, connection: Connection, ended: list[str]) -> None:
        self.server, self.queue, self.connection, self.ended = server, queue, connection, ended
        self.remote = stub(connection, "queue", CONTRACT, Queue, SECONDS)


@asynccontextmanager
async def world(host: str = "127.0.0.1", port: int = 0, seconds: float = SECONDS) -> AsyncIterator[World]:
    queue, ended = Queue(), list[str]()

    async def on_end(connection: Connection, reason: str) -> None:
        ended.append(f"{connection.name} {reason}")

    server = Server("the controller", {"queue": Service(target=queue, contract=CONTRACT)}, Clock(), seconds, on_end)
    address = await server.listen(host, port)
    connection = await connect(address, "the client", Clock(), {"queue": CONTRACT})
    try:
        yield World(server, queue, connection, ended)
    finally:
        await connection.close()
        await server.close()


def run(test: Callable[[World], Awaitable[None]], **options: Any) -> World:
    async def main() -> World:
        async with world(**options) as made:
            await test(made)
        return made

    return asyncio.run(main())


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not ready():
            await asyncio.sleep(0)


@pytest.mark.parametrize("place", [{}, {"port": -1}, {"host": "0.0.0.0"}], ids=["within the host", "tcp", "tls"])
def test_calls_return_what_the_method_returns(place: dict[str, Any]) -> None:
    if place.get("port"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"port": free.getsockname()[1]}

    async def test(made: World) -> None:
        meta = Meta(keys=("x",), tags=({"a": 1.5, "b": [1, None, "c"]},))
        assert (meta, None) == (await made.remote.echo(meta), await made.remote.echo(None))
        assert "the client" == await made.remote.who()
        assert [("group-0",), ("group-1",)] == [group async for group in made.remote.groups(2)]

    run(test, **place)


def test_errors_keep_class_code_and_fields() -> None:
    async def test(made: World) -> None:
        with pytest.raises(RolloutError) as ours:
            await made.remote.fail("ours")
        error = ours.value
        assert ("rollout.stale", "no weights", "replica 1", "wait") == (
            error.code,
            error.message,
            error.where,
            error.fix,
        )
        with pytest.raises(JackfieldError) as theirs:
            await made.remote.fail("a mistake")
        assert ("run.failed", "the controller") == (theirs.value.code, theirs.value.where)

    run(test)


def test_values_are_checked_at_both_ends() -> None:
    async def test(made: World) -> None:
        for call in (made.remote.lease("x"), made.remote.echo(object()), made.remote.echo(3)):  # type: ignore[arg-type]
            with pytest.raises(RpcError) as caught:
                await call
            assert "rpc.value" == caught.value.code
        with attrs.validators.disabled():
            long = Meta(keys=("a", "b", "c", "d"))
        with pytest.raises(RpcError) as caught:
            await made.remote.echo(long)
        assert "rpc.value" == caught.value.code

    run(test)


def test_a_cancelled_call_is_cancelled_at_the_other_end() -> None:
    async def test(made: World) -> None:
        asked = asyncio.create_task(made.remote.lease(2))
        await made.queue.asked.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (1, []) == (made.queue.cancelled, made.queue.released)

    run(test)


def test_a_result_that_comes_after_its_caller_has_left_is_given_back() -> None:
    async def test(made: World) -> None:
        asked = asyncio.create_task(made.remote.lease(2))
        await made.queue.asked.wait()
        made.queue.answers.set()  # the reply is on its way
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: bool(made.queue.released) or made.queue.cancelled == 1)

    run(test)


def test_a_deadline_names_who_was_waited_for_and_what_for() -> None:
    async def test(made: World) -> None:
        short = stub(made.connection, "queue", CONTRACT, Queue, 0.05)
        with pytest.raises(DeadlineExceeded) as caught:
            await short.lease(1, deadline_seconds=0.05)
        assert "the controller to lease 1" in caught.value.message
        assert 1 == made.queue.cancelled

    run(test)


def test_an_iteration_is_closed_when_its_reader_leaves() -> None:
    async def test(made: World) -> None:
        iteration = made.remote.groups(100)
        assert ("group-0",) == await anext(iteration)
        await iteration.aclose()  # type: ignore[attr-defined]
        await until(lambda: made.queue.closed == 1)

    run(test)


def test_the_end_of_a_connection_fails_what_is_open_and_cancels_it() -> None:
    async def test(made: World) -> None:
        asked = asyncio.create_task(made.remote.lease(1))
        await made.queue.asked.wait()
        await made.connection.close("done")
        with pytest.raises(RpcError) as caught:
            await asked
        assert ("rpc.lost", 1) == (caught.value.code, made.queue.cancelled)
        with pytest.raises(RpcError) as caught:
            await made.remote.echo(None)
        assert "rpc.lost" == caught.value.code
        await until(lambda: bool(made.ended))
        assert ["the client done"] == made.ended

    run(test)


def test_contracts_that_differ_are_refused() -> None:
    async def test(made: World) -> None:
        with pytest.raises(RpcError) as caught:
            await connect(made.server.address, "old", Clock(), {"queue": Contract(Queue, ["echo"])})
        assert "rpc.version" == caught.value.code

    run(test)


def test_a_field_more_is_another_contract() -> None:
    @attrs.frozen(kw_only=True)
    class Newer(Meta):
        size: int = 0

    class Younger(Queue):
        async def echo(self, meta: Newer | None) -> Newer | None:  # type: ignore[override]
            return meta

    Younger.echo.__annotations__ = {"meta": Newer | None, "return": Newer | None}
    Younger.echo.__signature__ = inspect.signature(Queue.echo)  # type: ignore[attr-defined]
    assert CONTRACT.fingerprint == Contract(Queue).fingerprint != Contract(Younger).fingerprint


def test_what_is_not_served_is_refused() -> None:
    async def test(made: World) -> None:
        for service, contract in (("other", CONTRACT), ("queue", Contract(World, []))):
            calling = made.connection.call(f"{service}.missing", [], SECONDS, None, "missing")
            with pytest.raises(RpcError) as caught:
                await calling
            assert ("rpc.method", contract is not None) == (caught.value.code, True)

    run(test)


def test_only_who_knows_the_secret_comes_in(tmp_path: Path) -> None:
    async def test(made: World) -> None:
        file = tmp_path / "address.json"
        made.server.address.write(file)
        assert 0o600 == file.stat().st_mode & 0o777
        address = Address.read(file)
        assert address == made.server.address
        with pytest.raises(RpcError) as caught:
            await connect(attrs.evolve(address, secret="00" * 32), "a stranger", Clock(), {})
        assert "rpc.lost" == caught.value.code
        await until(lambda: made.server.refused == 1)
        assert 1 == len(made.server.clients)
        await made.remote.echo(None)

    run(test)


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"JKR1" + (1 << 30).to_bytes(4, "big"),
        b"JKR1\0\0\0\x03abc",
        b"JKR1\0\0\0\x02\x91\x09",
    ],
    ids=["http", "a gigabyte", "no message", "an unknown tag"],
)
def test_strangers_are_hung_up_on(content: bytes) -> None:
    async def test(made: World) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(stranger, f"\0{made.server.address.port}")
            await loop.sock_sendall(stranger, content)
            while await loop.sock_recv(stranger, 1 << 16):
                pass
        await until(lambda: made.server.refused == 1)
        await made.remote.echo(None)

    run(test)


def test_a_reply_without_a_call_ends_the_connection() -> None:
    async def test(made: World) -> None:
        (connection,) = made.server.clients.values()
        import msgspec

        from jackfield.sdk.rpc.wire import Reply

        connection.send(Reply(7, msgspec.Raw(msgspec.msgpack.encode(None))))
        with pytest.raises(RpcError) as caught:
            await made.remote.lease(1)
        assert "rpc.lost" == caught.value.code

    run(test)


def test_no_address_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for text in (None, "{", "{}"):
        file = tmp_path / "address.json"
        if text is not None:
            file.write_text(text)
        with pytest.raises(RpcError) as caught:
            Address.read(file)
        assert ("rpc.address", str(file)) == (caught.value.code, caught.value.where)


CLIENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_rpc import CONTRACT, Queue
from jackfield.clock import Clock
from jackfield.sdk.rpc import Address, connect, stub

async def main():
    connection = await connect(Address.read(Path(sys.argv[1])), "the other", Clock(), {"queue": CONTRACT})
    await stub(connection, "queue", CONTRACT, Queue, 60.0).lease(1)

asyncio.run(main())
"""


def test_a_server_of_another_machine_that_has_nothing_to_say_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends heartbeats, whether or not it ends silent clients."""
    monkeypatch.setattr(Process, "is_near", property(lambda process: False))

    async def main() -> None:
        server = Server("a worker", {}, Clock(), 0.4, watches=False)
        connection = await connect(await server.listen(), "a client", Clock(), {})
        with pytest.raises(DeadlineExceeded):
            await Clock().wait_for(asyncio.shield(connection.lost), 1.0, "its end")
        await connection.close()
        await server.close()

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_dies_or_is_stopped_is_named_and_ended(number: int, tmp_path: Path) -> None:
    """Its calls are cancelled; a stopped client is killed, so that it does no harm if it continues."""

    async def test(made: World) -> None:
        made.server.address.write(tmp_path / "address.json")
        command = [sys.executable, "-c", CLIENT, str(tmp_path / "address.json"), str(Path(__file__).parent)]
        process = subprocess.Popen(command)
        try:
            await made.queue.asked.wait()
            os.kill(process.pid, number)
            await until(lambda: bool(made.ended))
            assert -signal.SIGKILL == await asyncio.to_thread(process.wait, SECONDS)
        finally:
            process.kill()
        assert 1 == made.queue.cancelled
        assert made.ended[0].startswith("the other ")
        assert ("deadlines.heartbeat" in made.ended[0]) == (number == signal.SIGSTOP)
        await made.remote.echo(None)

    run(test, seconds=2.0)
