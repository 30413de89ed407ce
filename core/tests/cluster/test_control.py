"""Tests of requests from other processes to a run over real sockets, and of its Prometheus metrics."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import stat
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.clock import Clock
from jackfield.cluster.control import list_replicas, scale_replicas, serve_control, serve_metrics
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import ConfigError, JackfieldError, RunError
from jackfield.routing import ReplicaState
from jackfield.sdk.rpc import Address, Server


class Fake:
    """A fake pool that scales to as many replicas as requested, up to three."""

    def __init__(self) -> None:
        self.count = 1

    async def states(self) -> list[ReplicaState]:
        return [
            ReplicaState(replica=number, state="serving", weight_version=5, running=number, restarts=2)
            for number in range(self.count)
        ]

    async def scale(self, count: int) -> list[ReplicaState]:
        if count == 7:
            raise ZeroDivisionError("a mistake")
        if count < 1:
            raise ConfigError("a run needs a replica", found=count)
        if count > 3:
            raise RunError(
                "the cluster has no room for rollout replica 3", code="cluster.unavailable", expected="a place"
            )
        self.count = count
        return await self.states()


def serve(folder: Path, ask: Callable[[], Any], fake: Fake | None = None) -> Any:
    """Call ``ask`` in a thread while a run serves requests."""

    async def life() -> Any:
        pool = cast(ReplicaPool, fake or Fake())
        async with serve_control(folder, pool, Clock(), metrics_port=0):
            return await asyncio.to_thread(ask)

    return asyncio.run(life())


def test_replicas_are_listed_added_and_removed(tmp_path: Path) -> None:
    def ask() -> list[list[ReplicaState]]:
        assert 0o600 == stat.S_IMODE((tmp_path / "control.json").stat().st_mode)
        return [list_replicas(tmp_path), scale_replicas(tmp_path, 3), scale_replicas(tmp_path, 1)]

    first, grown, shrunk = serve(tmp_path, ask)
    assert ([0], [0, 1, 2], [0]) == tuple([state.replica for state in states] for states in (first, grown, shrunk))
    assert ReplicaState(replica=2, state="serving", weight_version=5, running=2, restarts=2) == grown[2]
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("count", "code"),
    [(0, "config.invalid-value"), (4, "cluster.unavailable"), (7, "run.failed")],
    ids=["none", "no room", "a mistake"],
)
def test_what_the_run_says_against_it_is_the_error(tmp_path: Path, count: int, code: str) -> None:
    def ask() -> None:
        scale_replicas(tmp_path, count)

    with pytest.raises(JackfieldError) as caught:
        serve(tmp_path, ask)
    assert code == caught.value.code


def test_the_command_prints_for_people_and_programs(tmp_path: Path) -> None:
    def ask() -> list[str]:
        calls = ([], ["2", "--json"], ["9"], ["many"])
        return [CliRunner().invoke(main, ["replicas", str(tmp_path), *call]).output for call in calls]

    listed, grown, refused, wrong = serve(tmp_path, ask)
    head, row = listed.splitlines()
    assert ["REPLICA", "STATE", "WEIGHT", "VERSION", "RUNNING", "WAITING", "RESTARTS"] == head.split()
    assert ["0", "serving", "5", "0", "0", "2"] == row.split()
    assert [0, 1] == [state["replica"] for state in json.loads(grown)]
    assert "[cluster.unavailable]" in refused
    assert "'many' is not a valid integer" in wrong


def test_a_folder_where_no_run_goes_on(tmp_path: Path) -> None:
    """The folder never had a run, or a killed one, or one of another machine."""

    async def addresses() -> list[Address]:
        server = Server("a run", {}, Clock(), 5.0)
        address = await server.listen()
        await server.close()
        return [address, attrs.evolve(address, process=attrs.evolve(address.process, place="far", host="far"))]

    gone, far = asyncio.run(addresses())
    for name, address in {"no such folder": None, "no address": None, "gone": gone, "far": far}.items():
        folder = tmp_path / name
        if name != "no such folder":
            folder.mkdir()
        if address is not None:
            address.write(folder / "control.json")
        with pytest.raises(RunError) as caught:
            list_replicas(folder)
        assert "run.not-running" == caught.value.code
        assert "far" != name or "a run on far" == caught.value.found


def test_strangers_change_nothing(tmp_path: Path) -> None:
    fake = Fake()

    def ask() -> None:
        file = tmp_path / "control.json"
        known = Address.read(file)
        attrs.evolve(known, secret="00" * 32).write(file)
        with pytest.raises(RunError) as caught:
            scale_replicas(tmp_path, 3)
        assert "run.not-running" == caught.value.code
        known.write(file)

    serve(tmp_path, ask, fake)
    assert 1 == fake.count


def test_a_run_that_ends_meanwhile_is_told_from_an_answer(tmp_path: Path) -> None:
    class Slow(Fake):
        async def scale(self, count: int) -> list[ReplicaState]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def life() -> None:
        async with serve_control(tmp_path, cast(ReplicaPool, Slow()), Clock()):
            asking = asyncio.create_task(asyncio.to_thread(scale_replicas, tmp_path, 2))
            await asked.wait()
        with pytest.raises(RunError) as caught:
            await asking
        assert "run.not-running" == caught.value.code

    asked = asyncio.Event()
    asyncio.run(life())


def test_prometheus_reads_whoever_there_is() -> None:
    fake = Fake()

    async def life() -> tuple[str, str, str]:
        async with serve_metrics(cast(ReplicaPool, fake), 0) as url:

            def scrape() -> str:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    text: str = answer.read().decode()
                    return text

            first = await asyncio.to_thread(scrape)
            fake.count = 2
            grown = await asyncio.to_thread(scrape)
            fake.count = 1
            return first, grown, await asyncio.to_thread(scrape)

    first, grown, shrunk = asyncio.run(life())
    assert first == shrunk
    assert 'replica="1"' not in first
    lines = grown.splitlines()
    assert {'jackfield_rollout_running{replica="1"} 1.0', 'jackfield_rollout_restarts_total{replica="1"} 2.0'} < set(
        lines
    )


def test_a_port_that_is_taken_is_named() -> None:
    async def life(port: int) -> None:
        async with serve_metrics(cast(ReplicaPool, Fake()), port):
            raise AssertionError

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        asyncio.run(life(taken.getsockname()[1]))
    assert "cluster.metrics_port" == caught.value.where
    assert f"[Errno {errno.EADDRINUSE}]" in str(caught.value.found)
