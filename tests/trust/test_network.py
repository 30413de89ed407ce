"""Who can reach a run from outside, and what a stranger can make it keep."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from jackfield_commands import Command, CommandServer

pytestmark = pytest.mark.timeout(500)

SECONDS = 300.0
RAY = (
    "{name: ray, replicas: 1, metrics_port: 0, placement: shared, ray: {engine_ranks: 2, agent_workers: 1,"
    " reward_workers: 1, cpus_per_place: 1, object_store_bytes: 200000000}}"
)


def processes(command: Command) -> list[psutil.Process]:
    """A command and all below it."""
    root = psutil.Process(command.pid)
    return [root, *root.children(recursive=True)]


def listening(process: psutil.Process) -> list[str]:
    """Where a process takes connections or datagrams, but for sockets that are connected."""
    found = process.net_connections("inet")
    return [each.laddr.ip for each in found if each.laddr and (each.status == psutil.CONN_LISTEN or not each.raddr)]


def steps(folder: Path) -> int:
    """How many steps a run has trained."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return sum('"kind": "step"' in line for line in lines)


def until(condition: Callable[[], object], command: Command) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert command.running, command.error
        assert time.monotonic() < ends, "it did not come to hold"


@pytest.fixture
def ray_run(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path, ray_interpreters: str
) -> Iterator[list[psutil.Process]]:
    """The processes of a run in a cluster of its own that has begun to train."""
    settings = quickstart_settings("ray", f"cluster={RAY}", "schedule.steps=10000", ray_interpreters)
    command = jackfield.start("run", *settings)
    below: list[psutil.Process] = []
    try:
        until(lambda: steps(tmp_path / "ray"), command)
        workers = json.loads((tmp_path / "ray" / "workers.json").read_text()).values()
        below = list({*processes(command), *(psutil.Process(worker["pid"]) for worker in workers)})
        yield below
    finally:
        command.kill()
        for each in below:
            if each.is_running():
                each.kill()
        psutil.wait_procs(below, SECONDS)


def test_a_cluster_that_a_run_starts_listens_on_loopback_only(ray_run: list[psutil.Process]) -> None:
    """Every socket of Ray's own processes, of its agents and metrics and of workers."""
    places = {(each.name(), place) for each in ray_run for place in listening(each)}
    names = {name for name, _ in places}
    assert {"raylet", "gcs_server"} <= names
    assert any(name.startswith("ray::RayHost") for name in names), names
    far = [(name, place) for name, place in places if not _is_loopback(place)]
    assert [] == far


def _is_loopback(place: str) -> bool:
    address = ipaddress.ip_address(place)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# -- strangers -------------------------------------------------------------------------------------------------------

FLOOD = 1 << 27  #: bytes that a stranger tries to send on each of its connections
CONNECTIONS = 3
BOUND = 150 << 20  #: bytes that a process may grow by; it is sent more than ten times as much
STALLED_SECONDS = 2.0  #: after which a stranger gives up whose bytes are not read


def _greeting(mechanism: bytes) -> bytes:
    """How a ZeroMQ client begins, and a frame of 4 GiB that it announces."""
    head = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\x00") + bytes(32)
    return head + b"\x06" + (1 << 32).to_bytes(8, "big")


BEGINNINGS = {
    "noise": b"",
    "ZeroMQ": _greeting(b"NULL"),
    "ZeroMQ with a password": _greeting(b"PLAIN"),
    "ZeroMQ with a key": _greeting(b"CURVE"),
    "ZeroMQ without announcing": _greeting(b"PLAIN")[:-9],
    "a length": ((1 << 30) - 1).to_bytes(8, "big"),
    "a number of frames": (1).to_bytes(4, "big") + (1 << 26).to_bytes(8, "big"),
    "HTTP": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4000000000\r\n\r\n",
    "a header without end": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ",
}


def _doors(process: psutil.Process) -> set[tuple[int, Any]]:
    """Every address at which a process takes connections: family and address."""
    inet = {
        (socket.AF_INET, (each.laddr.ip, each.laddr.port))
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    open_here = {
        os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir() if os.path.lexists(file)
    }  # socket:[inode]
    named = {
        (socket.AF_UNIX, fields[7].replace("@", "\0", 1))
        for fields in listed
        if len(fields) == 8 and fields[3] == "00010000" and f"socket:[{fields[6]}]" in open_here
    }
    return inet | named


def _flood(door: tuple[int, Any], beginning: bytes) -> socket.socket:
    """Send until it is refused or nobody reads; the connection stays open."""
    family, address = door
    stranger = socket.socket(family, socket.SOCK_STREAM)
    stranger.settimeout(STALLED_SECONDS)
    piece = bytes([0x41]) * (1 << 20)
    with contextlib.suppress(OSError):
        stranger.connect(address)
        stranger.sendall(beginning)
        for _ in range(FLOOD // len(piece)):
            stranger.sendall(piece)
    return stranger


def _growth_under_attack(process: psutil.Process) -> dict[tuple[str, str], int]:
    """Bytes by which a process has grown beyond the bound, by what strangers began with."""
    doors = _doors(process)
    assert doors, "it listens nowhere"
    grown = {}
    for door in doors:
        for name, beginning in BEGINNINGS.items():
            before = process.memory_info().rss
            with contextlib.ExitStack() as open_ones, ThreadPoolExecutor(CONNECTIONS) as strangers:
                for stranger in strangers.map(_flood, [door] * CONNECTIONS, [beginning] * CONNECTIONS):
                    open_ones.enter_context(stranger)
                growth = process.memory_info().rss - before
            if growth > BOUND:
                grown[str(door[1]), name] = growth
    return grown


def test_strangers_at_a_served_queue_and_its_storage_fill_no_memory(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The controller's socket; afterwards a run that knows the secret works by it as ever."""
    settings = [*quickstart_settings("served", "transfer_queue={name: sql}")]
    served = jackfield.start("queue", "serve", *settings)
    try:
        until((tmp_path / "served" / "queue" / "address.json").is_file, served)
        assert {} == _growth_under_attack(psutil.Process(served.pid))
        address = f"queue.address={tmp_path / 'served' / 'queue' / 'address.json'}"
        name = quickstart_settings("run", "transfer_queue={name: sql}", "schedule.steps=1")
        done = jackfield("run", *name, address)
        assert 0 == done.code, done.error
    finally:
        served.kill()


def test_strangers_at_a_run_fill_no_memory_and_harm_no_sample(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The sockets of storage units, of the run's own process and of its OpenAI address, while it trains."""
    more = ("transfer_queue={name: zmq, units: 1}", "rollout={name: transformers, openai: {}}", "schedule.steps=10000")
    command = jackfield.start("run", *quickstart_settings("run", *more))
    try:
        until(lambda: steps(tmp_path / "run"), command)
        attacked = [each for each in processes(command) if _doors(each)]
        assert len(attacked) >= 2, "a storage unit and the run"
        for each in attacked:
            assert {} == _growth_under_attack(each)
        trained = steps(tmp_path / "run")
        until(lambda: steps(tmp_path / "run") > trained, command)
        assert not (tmp_path / "run" / "samples" / "failed.jsonl").exists()
    finally:
        command.kill()
