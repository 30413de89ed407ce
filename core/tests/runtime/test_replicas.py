"""Replicas that join and leave a run, on virtual time: weights before requests, requests before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import (
    BaseRolloutServer,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    RolloutContext,
    SamplingParams,
    ServerInfo,
)
from jackfield.clock import VirtualClock
from jackfield.errors import ConfigError, RunError, WeightsError
from jackfield.runtime.replicas import Joining, Replicas
from jackfield.runtime.revival import LastingServer
from jackfield.runtime.router import ReplicaRouter
from jackfield.weights import Replica

from .test_revival import Mortal

START, TRANSFER, DRAIN = 10.0, 5.0, 30.0


class Server:
    """Needs a second for a token, and starts with the weights of the model's folder."""

    def __init__(self, world: World, number: int) -> None:
        self.context = RolloutContext(model=ModelSpec(path="m"), replica=number, clock=world.clock)
        self.world, self.number, self.version = world, number, 0
        self.served: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.stopped = False

    async def start(self) -> ServerInfo:
        self.world.note(f"{self.number} starts")
        await self.world.clock.sleep(START)
        return ServerInfo(replica=self.number)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert not self.stopped
        self.served.append(request)
        count = request.sampling.max_new_tokens
        try:
            await self.world.clock.sleep(count)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        assert not self.stopped, "a request of a replica that was stopped"
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tuple(range(count)),
            log_probs=(-1.0,) * count,
            weight_versions=(self.version,) * count,
            finish_reason="length",
        )

    async def health(self) -> HealthReport:
        running = len(self.served) - len(self.aborted)
        return HealthReport(healthy=not self.stopped, running=running, weight_version=self.version)

    async def stop(self) -> None:
        self.stopped = True
        self.world.note(f"{self.number} stops")


class World:
    """A fleet of two agent workers' routers, an engine that is at version 3, and a lease on it."""

    def __init__(self, *, takes_turns: bool = False) -> None:
        self.clock = VirtualClock()
        self.notes: list[str] = []
        self.room = 9
        self.servers: dict[int, Server] = {}
        self.routers: list[ReplicaRouter] = []
        self.failing: Callable[[int], None] = lambda number: None
        self.free = asyncio.Event()  # the engine does not train
        self.free.set()
        self.takes_turns = takes_turns
        self.replicas = Replicas(self, self.clock, name="fake", start_seconds=60.0, drain_seconds=DRAIN)

    def note(self, what: str) -> None:
        self.notes.append(what)

    # -- the fleet

    async def add(self, number: int) -> BaseRolloutServer:
        if len(self.servers) >= self.room:
            raise RunError("the cluster has no room", code="cluster.unavailable")
        self.servers[number] = Server(self, number)
        return self.servers[number]  # type: ignore[return-value]

    async def remove(self, number: int) -> None:
        assert self.servers.pop(number).stopped
        self.note(f"{number} is gone")

    async def route(self, replicas: Mapping[int, BaseRolloutServer], seconds: float) -> int:
        self.note(f"routes {sorted(replicas)}")
        return sum(await asyncio.gather(*(router.reroute(replicas, seconds) for router in self.routers)))

    # -- the run

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        await self.free.wait()
        self.note("held")
        yield
        self.note("free")

    async def join(self, replica: Replica) -> None:
        await self.clock.sleep(TRANSFER)
        self.failing(replica.info.replica)
        self.note(f"{replica.info.replica} has weights")
        replica.server.version = 3  # type: ignore[attr-defined]

    def run(self, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            first = await self.add(0)
            await self.replicas.start([first])
            self.servers[0].version = 3
            self.replicas.connect(
                Joining(
                    hold=self.hold,
                    join=self.join,
                    catch_up=self.join,
                    bring_up=lambda server: self.join(Replica(server, ServerInfo(replica=0))),
                    takes_turns=self.takes_turns,
                )
            )
            self.routers += [ReplicaRouter({0: first}, self.clock) for _ in range(2)]
            self.notes.clear()
            await life()
            await self.replicas.close()

        self.clock.run(whole())

    def generate(self, count: int, tokens: int = 4, name: str = "") -> list[asyncio.Task[GenerateResult]]:
        """Requests, in turn by each agent worker."""
        sampling = SamplingParams(max_new_tokens=tokens, seed=7)
        requests = [GenerateRequest(request_id=f"{name}{n}", prompt_ids=(0,), sampling=sampling) for n in range(count)]
        return [
            asyncio.ensure_future(self.routers[index % 2].generate(request)) for index, request in enumerate(requests)
        ]

    @property
    def members(self) -> list[int]:
        return [replica.info.replica for replica in self.replicas.members]


def test_one_that_is_added_has_the_engines_weights_before_its_first_request() -> None:
    world = World()

    async def life() -> None:
        world.free.clear()
        growing = asyncio.ensure_future(world.replicas.scale(2))
        await world.clock.sleep(20.0)
        early = world.generate(4)
        await asyncio.gather(*early)
        assert ([0], ["1 starts"]) == (world.members, world.notes)
        assert ["serving", "starting"] == [state.state for state in await world.replicas.states()]
        world.free.set()
        states = await growing
        assert [(0, "serving", 3), (1, "serving", 3)] == [(s.replica, s.state, s.weight_version) for s in states]
        await asyncio.gather(*world.generate(8))
        assert (8, 4) == (len(world.servers[0].served), len(world.servers[1].served))

    world.run(life)
    assert ["1 starts", "held", "1 has weights", "routes [0, 1]", "free"] == world.notes[:5]


def test_one_that_takes_turns_with_the_engine_is_started_when_the_device_is_free() -> None:
    world = World(takes_turns=True)
    world.run(lambda: _discard(world.replicas.scale(2)))
    assert ["held", "1 starts", "1 has weights", "routes [0, 1]", "free"] == world.notes[:5]


async def _discard(work: Coroutine[Any, Any, Any]) -> None:
    await work


def test_several_start_side_by_side_and_get_weights_one_after_the_other() -> None:
    world = World()

    async def life() -> None:
        began = world.clock.time()
        await world.replicas.scale(4)
        assert START + 3 * TRANSFER == world.clock.time() - began
        assert [0, 1, 2, 3] == world.members

    world.run(life)


def test_one_that_is_removed_ends_its_requests_first_and_gets_weights_up_to_then() -> None:
    world = World()

    async def life() -> None:
        await world.replicas.scale(2)
        running = world.generate(4, tokens=8)
        await world.clock.sleep(2.0)
        leaving = world.servers[1]
        shrinking = asyncio.ensure_future(world.replicas.scale(1))
        await world.clock.sleep(2.0)
        assert ([0, 1], False) == (world.members, leaving.stopped)
        assert ["serving", "draining"] == [state.state for state in await world.replicas.states()]
        late = world.generate(4)
        assert [0] == [state.replica for state in await shrinking]
        await asyncio.gather(*running, *late)
        assert ([0], True, [], 2) == (world.members, leaving.stopped, leaving.aborted, len(leaving.served))

    world.run(life)
    assert ["routes [0]", "held", "free", "1 stops", "1 is gone"] == world.notes[5:10]


def test_requests_that_last_too_long_are_generated_again_elsewhere_with_their_whole_budget() -> None:
    """With the same seed: none is lost, and none is another sample."""
    world = World()

    async def life() -> None:
        await world.replicas.scale(2)
        running = world.generate(4, tokens=100)
        await world.clock.sleep(2.0)
        leaving, began = world.servers[1], world.clock.time()
        await world.replicas.scale(1)
        assert DRAIN == world.clock.time() - began
        assert 2 == len(leaving.aborted)
        results = await asyncio.gather(*running)
        assert [tuple(range(100))] * 4 == [result.token_ids for result in results]
        again = [call for call in world.servers[0].served if call.request_id in leaving.aborted]
        assert leaving.served == again

    world.run(life)


def test_somebody_who_gives_up_is_not_served_again() -> None:
    world = World()

    async def life() -> None:
        await world.replicas.scale(2)
        running = world.generate(4, tokens=100)
        await world.clock.sleep(2.0)
        shrinking = asyncio.ensure_future(world.replicas.scale(1))
        await world.clock.sleep(2.0)
        for task in running:
            task.cancel()
        assert [True] * 4 == [
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*running, return_exceptions=True)
        ]
        await shrinking
        assert 2 == len(world.servers[0].served)

    world.run(life)


def test_turns_of_a_run_leave_a_replica_that_was_removed() -> None:
    world = World()

    async def life() -> None:
        await world.replicas.scale(2)
        busy = world.generate(1, tokens=8)
        await asyncio.sleep(0)
        generate = world.routers[0].of_one_run()
        request = GenerateRequest(request_id="turn", prompt_ids=(0,), sampling=SamplingParams(max_new_tokens=4))
        await generate(request)
        assert [request] == world.servers[1].served
        await world.replicas.scale(1)
        await generate(request)
        assert request in world.servers[0].served
        await asyncio.gather(*busy)

    world.run(life)


@pytest.mark.parametrize("where", ["room", "weights"])
def test_one_that_cannot_be_added_leaves_nothing_and_the_run_as_it_was(where: str) -> None:
    world = World()

    def fail(number: int) -> None:
        if number == 2:
            raise WeightsError("the receipt of replica 2 does not cover its workers")

    async def life() -> None:
        if where == "room":
            world.room = 2
        else:
            world.failing = fail
        with pytest.raises((RunError, WeightsError), match=r"no room|replica 2"):
            await world.replicas.scale(3)
        assert ([0, 1], {0, 1}) == (world.members, set(world.servers))
        assert ["serving"] * 2 == [state.state for state in await world.replicas.states()]
        world.room, world.failing = 9, lambda number: None
        await world.replicas.scale(3)
        assert [0, 1, 2] == world.members
        await asyncio.gather(*world.generate(6))

    world.run(life)


def test_requests_for_more_and_fewer_are_done_in_turn() -> None:
    world = World()

    async def life() -> None:
        found = await asyncio.gather(*(world.replicas.scale(count) for count in (3, 1, 2)))
        assert [3, 1, 2] == [len(states) for states in found]
        assert [0, 1] == world.members

    world.run(life)


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_keeps_a_replica(count: int) -> None:
    world = World()

    async def life() -> None:
        with pytest.raises(ConfigError) as caught:
            await world.replicas.scale(count)
        assert ("config.invalid-value", count) == (caught.value.code, caught.value.found)

    world.run(life)
    assert ["0 stops"] == world.notes


def test_one_that_joins_and_dies_is_made_anew_with_the_engines_weights() -> None:
    """A server with a process of its own, in a run of one process."""
    world, lives = World(), list[Mortal]()

    class Second(Mortal):
        async def start(self) -> ServerInfo:
            await super().start()
            return ServerInfo(replica=1)

    def make() -> Mortal:
        lives.append(Second(world, len(lives)))  # type: ignore[arg-type]
        return lives[-1]

    async def add(number: int) -> BaseRolloutServer:
        return LastingServer(make, restarts=3, start_seconds=60.0)

    async def remove(number: int) -> None:
        world.note(f"{number} is gone")

    async def life() -> None:
        world.add, world.remove = add, remove  # type: ignore[method-assign]
        await world.replicas.scale(2)
        running = world.generate(4)
        await world.clock.sleep(1.5)
        lives[0].die()
        await world.clock.sleep(5.0)
        assert ["serving", "restarting"] == [state.state for state in await world.replicas.states()]
        await asyncio.gather(*running)
        assert [(1, 1)] == [(state.replica, state.restarts) for state in await world.replicas.states()][1:]
        await world.replicas.scale(1)

    world.run(life)
    assert 2 == world.notes.count("1 has weights")
    assert [True, True] == [server.stopped for server in lives]
    assert "1 is gone" in world.notes


def test_the_end_of_a_run_stops_one_that_is_on_its_way() -> None:
    world = World()
    made: list[Server] = []

    async def life() -> None:
        growing = asyncio.ensure_future(world.replicas.scale(2))
        await world.clock.sleep(START / 2)
        made.append(world.servers[1])
        growing.cancel()
        await asyncio.gather(growing, return_exceptions=True)
        assert {0} == set(world.servers)

    world.run(life)
    assert made[0].stopped
