"""A replica whose actor dies, on virtual time: real hosts and stand-ins, and what Ray does between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateResult, RolloutContext, ServerInfo
from jackfield.clock import VirtualClock
from jackfield.errors import WeightsError, WorkerLost
from jackfield.runtime.ray import Host, LastingReplica, RemoteServer
from jackfield.runtime.revival import LastingWeights
from jackfield.runtime.router import ReplicaRouter
from jackfield.weights import Replica

from ..test_revival import Mortal, request

NAME = "rollout replica 0"


class Method:
    """A method of an actor."""

    def __init__(self, actor: Actor, name: str, *, retries: bool = False) -> None:
        self.actor, self.name, self.retries = actor, name, retries

    def options(self, *, max_task_retries: int) -> Method:
        return Method(self.actor, self.name, retries=max_task_retries == -1)

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self.actor.do(self.name, arguments, self.retries))


class Actor:
    """A host whose process Ray starts again five seconds after its death."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.host: Host | None = None
        self.born, self.died = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def begin(self) -> None:
        self.host, self.died = Host(NAME, "", False), asyncio.Event()
        self.born.set()

    async def die(self) -> None:
        self.host = None
        self.born.clear()
        self.died.set()
        await self.clock.sleep(5.0)
        self.begin()

    async def do(self, name: str, arguments: tuple[Any, ...], retries: bool) -> Any:
        if retries:
            await self.born.wait()
        if self.host is None:
            raise RayActorError
        call = asyncio.ensure_future(getattr(self.host, name)(*arguments))
        died = self.died
        death = asyncio.ensure_future(died.wait())
        await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not died.is_set():
            return call.result()
        call.cancel()
        if retries:
            return await self.do(name, arguments, retries)
        raise RayActorError


class World:
    """The actor, its replica as the controller sees it and as agents do, and the servers that were made in it."""

    def __init__(self, restarts: int = 3) -> None:
        self.clock = VirtualClock()
        self.restarts = restarts
        self.made: list[Mortal] = []
        self.free = asyncio.Event()  # the engine does not train
        self.brought: list[int] = []  # the lives that were brought weights because nobody synchronised

    def make(self) -> None:
        self.actor = Actor(self.clock)
        self.actor.begin()
        self.replica = LastingReplica(
            self.actor,
            NAME,
            RolloutContext(model=ModelSpec(path="m"), clock=self.clock),
            self.begin,
            restarts=self.restarts,
            start_seconds=60.0,
            seconds=600.0,
        )
        self.server = RemoteServer(self.actor, NAME, 600.0)

    async def begin(self) -> None:
        await self.actor.born.wait()
        host = self.actor.host
        assert host is not None
        if host._worker is None:
            self.made.append(Mortal(self, len(self.made)))  # type: ignore[arg-type]
            host._worker = self.made[-1]

    async def bring_up(self, replica: LastingReplica) -> None:
        await self.free.wait()
        if replica.behind:
            self.brought.append(len(self.made) - 1)
            await self.clock.sleep(8.0)
            self.made[-1].require()
            await replica.admit()

    async def die(self) -> None:
        self.made[-1].die()
        await self.actor.die()

    def run(self, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            self.make()
            await self.replica.start()
            self.keeping = asyncio.ensure_future(self.replica.keep(self.bring_up))
            await asyncio.sleep(0)
            await life()
            self.keeping.cancel()
            await asyncio.gather(self.keeping, return_exceptions=True)

        self.clock.run(whole())
        assert not ray.is_initialized()  # nobody here is in a cluster, and nobody may start one

    def generate(self, count: int) -> list[asyncio.Task[GenerateResult]]:
        return [asyncio.ensure_future(self.server.generate(request(name=f"{n}"))) for n in range(count)]


def test_requests_wait_for_a_new_replica_and_its_weights() -> None:
    """None is lost, and none is served before the engine has stopped to train and sent them."""
    world = World()

    async def life() -> None:
        running = world.generate(3)
        await world.clock.sleep(2.5)
        await world.die()
        await world.clock.sleep(60.0)
        late = asyncio.ensure_future(world.server.generate(request(name="late")))
        await world.clock.sleep(60.0)
        assert [] == world.made[1].calls
        assert not world.server.available
        world.free.set()
        results = await asyncio.gather(*running, late)
        assert [(1, 2, 3, 4)] * 4 == [result.token_ids for result in results]
        assert {1} == {version for result in results for version in result.weight_versions}
        assert world.server.available

    world.run(life)
    assert ([1], 2, 1) == (world.brought, len(world.made), world.replica.revived)


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_a_synchronisation_that_is_faster_brings_the_weights(seconds: float) -> None:
    """It fails, because the replica dies in it, and is made again; nobody else has to bring any."""
    world = World()

    class Weights:
        versions = 0

        async def sync(self, version: int) -> Any:
            self.versions += 1
            if self.versions == 1:
                dying = asyncio.ensure_future(world.die())
                await world.clock.sleep(seconds)  # the replica is there again before the transfer ends, or not
                await dying
                raise WeightsError("the transfer broke off")
            return version

    async def life() -> None:
        running = world.generate(1)
        weights = Weights()
        assert 7 == await LastingWeights(weights, [Replica(world.replica, ServerInfo(replica=0))]).sync(7)
        assert 2 == weights.versions
        assert not world.replica.behind
        assert (1, 2, 3, 4) == (await running[0]).token_ids
        world.free.set()
        await world.clock.sleep(1.0)

    world.run(life)
    assert ([], 2) == (world.brought, len(world.made))


def test_a_replica_that_dies_again_before_it_serves_is_made_once_more() -> None:
    world = World()

    async def life() -> None:
        world.free.set()
        running = world.generate(1)
        await world.clock.sleep(1.5)
        await world.die()
        await world.clock.sleep(2.0)
        await world.die()  # it starts
        await world.clock.sleep(11.0)
        await world.die()  # it is brought weights
        assert {3} == set((await running[0]).weight_versions)

    world.run(life)
    assert ([2, 3], 3) == (world.brought, world.replica.revived)


@pytest.mark.parametrize("restarts", [0, 1])
def test_one_that_dies_too_often_is_lost(restarts: int) -> None:
    world = World(restarts)

    async def life() -> None:
        world.free.set()
        for _ in range(restarts + 1):
            assert not world.keeping.done()
            await world.die()
            await world.clock.sleep(30.0)
        with pytest.raises(WorkerLost, match="rollout replica 0 died") as lost:
            await world.keeping
        assert ("worker.died", NAME) == (lost.value.code, lost.value.where)

    world.run(life)
    assert restarts + 1 == len(world.made)


def test_a_server_that_dies_in_a_living_process_takes_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    dying: list[asyncio.Task[None]] = []

    def end(code: int) -> None:
        if not dying:
            world.actor.died.set()
            dying.append(asyncio.ensure_future(world.actor.die()))
        raise asyncio.CancelledError  # nothing happens in this process any more

    monkeypatch.setattr("os._exit", end)

    async def life() -> None:
        world.free.set()
        running = world.generate(2)
        await world.clock.sleep(1.5)
        world.made[0].die()
        results = await asyncio.gather(*running)
        assert [(1, 2, 3, 4)] * 2 == [result.token_ids for result in results]
        assert {1} == {version for result in results for version in result.weight_versions}

    world.run(life)
    assert (2, 1) == (len(world.made), world.replica.revived)


def test_runs_leave_a_replica_that_is_made_anew() -> None:
    world = World()

    async def life() -> None:
        other = Mortal(world, 7)  # type: ignore[arg-type]
        router = ReplicaRouter({0: world.server, 1: other}, world.clock)  # type: ignore[dict-item]
        generate = router.of_one_run()
        await generate(request(name="first"))
        dying = asyncio.ensure_future(world.die())
        lost = asyncio.ensure_future(router.generate(request(name="lost")))
        await world.clock.sleep(1.0)
        await generate(request(name="second"))
        world.free.set()
        await asyncio.gather(dying, lost)
        await generate(request(name="third"))
        assert ["second", "third"] == [call.request_id for call in other.calls]

    world.run(life)
    assert ["first"] == [call.request_id for call in world.made[0].calls]
    assert ["lost"] == [call.request_id for call in world.made[1].calls]
