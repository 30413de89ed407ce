"""Unix sockets within a host: who gets in, and what is left of those who were killed."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.transfer_queue import GetRequest, PutRequest, TransferQueueContext
from jackfield.sdk.cells import dense_column
from jackfield_testing import in_loop, refused
from jackfield_transport_zmq.backend import ZMQBackend
from jackfield_transport_zmq.config import QueueConfig
from jackfield_transport_zmq.near import SCHEME, connected, listening
from jackfield_transport_zmq.sockets import password
from jackfield_transport_zmq.wire import REQUESTS, Wire

NOBODY = 65534
OWNER = """
import asyncio, sys
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield_transport_zmq.backend import ZMQBackend
from jackfield_transport_zmq.config import QueueConfig

async def main(folder):
    backend = ZMQBackend(QueueConfig(), TransferQueueContext(folder=folder))
    await backend.start()
    print(*backend._client.directory.units[0].address.split("@"), backend._children[0].process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


async def works(backend: Any, key: str = "a") -> None:
    """Put and read a value that goes through shared memory."""
    values = torch.arange(1 << 15, dtype=torch.float32)[None]
    await backend.put(PutRequest(partition="p", keys=(key,), columns={"x": dense_column(values)}))
    found = await backend.get(GetRequest(partition="p", keys=(key,), columns=("x",)))
    assert torch.equal(values, found.columns["x"].values)


@contextmanager
def another_user() -> Iterator[None]:
    """What the kernel says of sockets that are connected, or listen, from now on."""
    own = os.geteuid()
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)


def stranger(address: str) -> socket.socket:
    """A connection to a unit."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20.0)
    try:
        connection.connect("\0" + address.removeprefix(SCHEME))
    except OSError:
        connection.close()
        raise
    return connection


def heard(guest: socket.socket, content: bytes) -> bytes:
    """What a unit answers until it closes the connection, which may be at once."""
    with suppress(ConnectionError):
        guest.sendall(content)
        return guest.recv(1)
    return b""


@pytest.mark.needs("other users")
@in_loop
async def test_another_user_is_turned_away_also_with_the_password(opened: Any) -> None:
    """An abstract address has no permissions, so each end asks the kernel who is at the other one."""
    async with opened() as backend:
        directory = backend._client.directory
        with another_user():
            guest = stranger(directory.units[0].address)
        with guest:
            assert b"" == heard(guest, password(directory.secret))
        assert 1.0 == (await backend.stats()).details["unit 0 refused connections"]
        await works(backend)


@pytest.mark.needs("other users")
def test_the_password_is_not_shown_to_another_users_process() -> None:
    """Somebody who listens at the address of a unit that has died hears nothing."""
    with another_user():
        server, address = listening()
    with server:
        with refused("queue.unreachable", "another user"):
            connected(address, b"of these tests", lambda _: None)
        server.settimeout(20.0)
        connection, _ = server.accept()
        with connection:
            assert b"" == connection.recv(1)


@in_loop
async def test_who_says_nothing_does_not_hold_others_up(opened: Any) -> None:
    """Many who connect and never show the password, or half of it."""
    async with opened() as backend:
        directory = backend._client.directory
        with ExitStack() as stack:
            for number in range(60):
                guest = stack.enter_context(stranger(directory.units[0].address))
                guest.sendall(password(directory.secret)[: number % 64])
            await works(backend)
        await works(backend, "b")


@in_loop
async def test_who_says_nothing_is_turned_away_in_time(opened: Any) -> None:
    """Also who shows a half of the password."""
    async with opened() as backend:
        directory = backend._client.directory
        with stranger(directory.units[0].address) as silent, stranger(directory.units[0].address) as slow:
            slow.sendall(password(directory.secret)[:32])
            for guest in (silent, slow):
                assert await asyncio.to_thread(heard, guest, b"") == b""
        assert 2.0 == (await backend.stats()).details["unit 0 refused connections"]
        await works(backend)


@in_loop
async def test_members_get_in_when_silent_ones_hold_all_files(opened: Any) -> None:
    """The oldest of those without a password go."""
    async with opened() as backend:
        address, unit = backend._client.directory.units[0].address, backend._children[0].process.pid
        limited(unit, 8)
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(stranger(address))
            member = connected(address, backend._client.directory.secret, lambda _: None)
            stack.callback(member.socket.close)
            member.send(Wire(REQUESTS, backend._client.directory.secret).encode("stats", {"id": 1}))
            assert select.select([member.socket], [], [], 4.0)[0]  # before silent ones are turned away for their time
            assert [*member.receive()]


@in_loop
async def test_a_unit_at_its_limit_of_files_waits_until_one_is_free(opened: Any) -> None:
    """It does not ask again and again."""
    async with opened() as backend:
        directory, unit = backend._client.directory, backend._children[0].process.pid
        limits = limited(unit, 0)
        member = connected(directory.units[0].address, directory.secret, lambda _: None)
        with member.socket:
            member.send(Wire(REQUESTS, directory.secret).encode("stats", {"id": 1}))
            before = processor_seconds(unit)
            assert not select.select([member.socket], [], [], 1.5)[0]
            assert 0.1 > processor_seconds(unit) - before
            resource.prlimit(unit, resource.RLIMIT_NOFILE, limits)
            assert select.select([member.socket], [], [], 20.0)[0]
            assert [*member.receive()]


def limited(pid: int, more: int) -> tuple[int, int]:
    """Let a process open so many files more; return its limits before."""
    here = len(os.listdir(f"/proc/{pid}/fd"))
    _, hard = before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (here + more, hard))
    return before


def processor_seconds(pid: int) -> float:
    """Of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@in_loop
async def test_nothing_is_left_of_a_killed_queue_and_another_starts_in_its_place(tmp_path: Path) -> None:
    """The list of units alone, which only this user can read, and which says that they are gone."""
    folder = tmp_path / "queue"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        _, name, pid = owner.stdout.readline().split()
        unit = os.pidfd_open(int(pid))
        assert f"@{name}\n" in Path("/proc/net/unix").read_text(encoding="utf-8")
        owner.send_signal(signal.SIGKILL)
        assert select.select([unit], [], [], 20.0)[0]
        os.close(unit)
    assert f"@{name}\n" not in Path("/proc/net/unix").read_text(encoding="utf-8")
    assert {"units.json": 0o600} == {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    context = TransferQueueContext(folder=str(folder), joins=True)
    late = ZMQBackend(QueueConfig(seconds=0.2), context)
    await late.start()
    with refused(("queue.lost", "queue.unreachable")):  # the first call may have been on its way
        await works(late)
    with refused("queue.unreachable", "storage units"):
        await works(late)
    await late.close()
    again = ZMQBackend(QueueConfig(), TransferQueueContext(folder=str(folder)))
    await again.start()
    joined = ZMQBackend(QueueConfig(), context)
    await joined.start()
    await works(joined)
    await joined.close()
    await again.close()
    assert [] == list(folder.iterdir())


@in_loop
async def test_the_folders_name_may_be_long(tmp_path: Path) -> None:
    """An address with a file in it would have 108 bytes at most."""
    folder = tmp_path / ("f" * 200) / ("g" * 200)
    backend = ZMQBackend(QueueConfig(), TransferQueueContext(folder=str(folder)))
    await backend.start()
    await works(backend)
    await backend.close()


def test_the_address_of_a_socket_is_free_again_when_it_is_closed() -> None:
    server, address = listening()
    with closing(server):
        assert 108 > len(address)
        with stranger(address):
            pass
    with pytest.raises(ConnectionRefusedError):
        stranger(address)
