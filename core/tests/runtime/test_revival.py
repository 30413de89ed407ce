"""Replicas that die and are made anew, on virtual time: requests, streams, states, weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    PauseRequest,
    PauseResult,
    ResumeRequest,
    ResumeResult,
    RolloutContext,
    SamplingParams,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WeightReceipt,
)
from jackfield.clock import VirtualClock
from jackfield.errors import RolloutError, WeightsError
from jackfield.runtime.revival import LastingServer, LastingWeights
from jackfield.runtime.router import ReplicaRouter
from jackfield.weights import Replica


class Mortal(BaseRolloutServer):
    """Counts upwards from the prompt's last token, one token a second, and dies when it is told to."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(None, RolloutContext(model=ModelSpec(path="m"), clock=world.clock))
        self.world = world
        self.number = number
        self.dead = asyncio.Event()
        self.calls: list[Any] = []
        self.stopped = False

    def die(self) -> None:
        self.dead.set()

    def require(self) -> None:
        if self.dead.is_set():
            raise RolloutError("its process has ended", code="rollout.stopped", found="SIGKILL")

    async def start(self) -> ServerInfo:
        await self.world.clock.sleep(10.0)
        return ServerInfo(replica=0)

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:  # type: ignore[override]
        self.calls.append(request)
        if request.sampling.temperature == 99.0:
            raise RolloutError("no", code="rollout.request")
        count = request.sampling.max_new_tokens
        for index in range(count):
            self.require()
            await self.world.clock.sleep(1.0)
            self.require()
            yield GenerateChunk(
                request_id=request.request_id,
                token_ids=(request.prompt_ids[-1] + index + 1,),
                log_probs=(-1.0,),
                weight_versions=(self.number,),
                finish_reason="length" if index == count - 1 else None,
            )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        chunks = [chunk async for chunk in self.generate_stream(request)]
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
            weight_versions=tuple(version for chunk in chunks for version in chunk.weight_versions),
            finish_reason="length",
        )

    async def note(self, request: Any, result: Any) -> Any:
        self.require()
        self.calls.append(request)
        return result

    async def abort(self, request: AbortRequest) -> AbortResult:
        return await self.note(request, AbortResult(request_ids=()))  # type: ignore[no-any-return]

    async def pause(self, request: PauseRequest) -> PauseResult:
        return await self.note(request, PauseResult())  # type: ignore[no-any-return]

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        return await self.note(request, ResumeResult())  # type: ignore[no-any-return]

    async def sleep(self, request: SleepRequest) -> SleepResult:
        return await self.note(request, SleepResult())  # type: ignore[no-any-return]

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        return await self.note(request, WakeUpResult())  # type: ignore[no-any-return]

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        self.require()
        return WeightReceipt(version=request.version, replica=0, workers=())

    async def health(self) -> HealthReport:
        return HealthReport(healthy=not self.dead.is_set(), detail="SIGKILL")

    async def stop(self) -> None:
        self.stopped = True


class World:
    """A clock, and all servers that were made."""

    def __init__(self, restarts: int = 3) -> None:
        self.clock = VirtualClock()
        self.made: list[Mortal] = []
        self.caught_up: list[int] = []
        self.server = LastingServer(self.make, restarts=restarts, start_seconds=60.0)
        self.server.catch_up = self.catch_up

    def make(self) -> Mortal:
        self.made.append(Mortal(self, len(self.made)))
        return self.made[-1]

    async def catch_up(self, server: BaseRolloutServer, info: ServerInfo) -> None:
        self.caught_up.append(server.number)  # type: ignore[attr-defined]

    def run(self, life: Coroutine[Any, Any, None]) -> None:
        async def whole() -> None:
            await self.server.start()
            await life
            await self.server.stop()

        self.clock.run(whole())


def request(count: int = 4, name: str = "one", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=(0,), sampling=SamplingParams(max_new_tokens=count, seed=7, **sampling)
    )


def test_requests_that_died_are_generated_again_by_one_new_replica() -> None:
    world = World()

    async def life() -> None:
        running = [asyncio.create_task(world.server.generate(request(name=f"{n}"))) for n in range(3)]
        await world.clock.sleep(2.5)
        world.made[0].die()
        results = await asyncio.gather(*running)
        assert [(1, 2, 3, 4)] * 3 == [result.token_ids for result in results]
        assert {1} == {version for result in results for version in result.weight_versions}

    world.run(life())
    assert (2, [1], 1) == (len(world.made), world.caught_up, world.server.revived)
    assert world.made[0].stopped


def test_a_stream_goes_on_behind_what_its_reader_has_within_its_budget() -> None:
    world = World()

    async def life() -> None:
        tokens: list[int] = []
        reasons = []
        async for chunk in world.server.generate_stream(request(6)):
            tokens += chunk.token_ids
            reasons.append(chunk.finish_reason)
            if tokens in ([1, 2], [1, 2, 3, 4, 5]):
                world.made[-1].die()
        assert [1, 2, 3, 4, 5, 6] == tokens
        assert "length" == reasons[-1]

    world.run(life())
    [second], [third] = world.made[1].calls, world.made[2].calls
    assert ((0, 1, 2), 4) == (second.prompt_ids, second.sampling.max_new_tokens)
    assert ((0, 1, 2, 3, 4, 5), 1) == (third.prompt_ids, third.sampling.max_new_tokens)
    assert 3 == len({7, second.sampling.seed, third.sampling.seed})  # no random number is used twice


def test_a_request_that_is_refused_or_cancelled_kills_nobody() -> None:
    world = World()

    async def life() -> None:
        with pytest.raises(RolloutError) as caught:
            await world.server.generate(request(temperature=99.0))
        assert "rollout.request" == caught.value.code
        running = asyncio.create_task(world.server.generate(request()))
        await world.clock.sleep(1.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    world.run(life())
    assert 1 == len(world.made)


def test_a_caller_that_leaves_does_not_end_the_revival_of_others() -> None:
    world = World()

    async def life() -> None:
        first, second = (asyncio.create_task(world.server.generate(request(name=name))) for name in "ab")
        await world.clock.sleep(1.5)
        world.made[0].die()
        await world.clock.sleep(5.0)
        assert not world.server.available
        assert not (await world.server.health()).healthy
        first.cancel()
        assert (1, 2, 3, 4) == (await second).token_ids
        assert world.server.available

    world.run(life())
    assert 2 == len(world.made)


def test_a_new_replica_is_in_the_state_of_the_one_that_died() -> None:
    world = World()

    async def life() -> None:
        await world.server.pause(PauseRequest(mode="abort"))
        await world.server.sleep(SleepRequest(level=2))
        world.made[0].die()
        await world.server.abort(AbortRequest())
        await world.server.wake_up(WakeUpRequest())
        await world.server.resume(ResumeRequest())
        world.made[1].die()
        await world.server.abort(AbortRequest())

    world.run(life())
    kinds = [[type(call).__name__ for call in server.calls] for server in world.made]
    assert ["PauseRequest", "SleepRequest"] == kinds[0]
    assert ["PauseRequest", "SleepRequest", "AbortRequest", "WakeUpRequest", "ResumeRequest"] == kinds[1]
    assert "keep" == world.made[1].calls[0].mode  # nothing runs that could be aborted
    assert ["AbortRequest"] == kinds[2]


def test_deaths_end_somewhere() -> None:
    world = World(restarts=2)

    async def life() -> None:
        for _ in range(2):
            world.made[-1].die()
            await world.server.abort(AbortRequest())
        world.made[-1].die()
        with pytest.raises(RolloutError, match="died again after 2 restarts") as caught:
            await world.server.generate(request())
        assert ("rollout.stopped", "replica 0") == (caught.value.code, caught.value.where)

    world.run(life())
    assert 3 == len(world.made)


def test_stopping_ends_a_revival() -> None:
    world = World()

    async def life() -> None:
        running = asyncio.create_task(world.server.generate(request()))
        await world.clock.sleep(1.0)
        world.made[0].die()
        await world.clock.sleep(5.0)
        await world.server.stop()
        with pytest.raises((asyncio.CancelledError, RolloutError)):
            await running

    world.run(life())
    assert world.made[-1].stopped


def test_the_router_prefers_replicas_that_serve() -> None:
    world, other = World(), World()
    other.clock = other.made[0].world.clock = world.clock

    async def life() -> None:
        router = ReplicaRouter({0: world.server, 1: other.server}, world.clock)
        world.made[0].die()
        first = asyncio.create_task(router.generate(request(name="first")))
        await world.clock.sleep(1.0)
        for name in "abc":
            await router.generate(request(name=name))
        await first

    world.run(life())
    assert 3 == len(other.made[0].calls)
    assert 1 == len(world.made[1].calls)


def test_a_run_leaves_a_replica_that_is_made_anew() -> None:
    world, other = World(), World()
    other.clock = other.made[0].world.clock = world.clock

    async def life() -> None:
        router = ReplicaRouter({0: world.server, 1: other.server}, world.clock)
        generate = router.of_one_run()
        await generate(request(name="first"))
        world.made[0].die()
        lost = asyncio.create_task(router.generate(request(name="lost")))
        await world.clock.sleep(1.0)
        await generate(request(name="second"))
        await lost
        await generate(request(name="third"))

    world.run(life())
    assert ["first"] == [call.request_id for call in world.made[0].calls if call.request_id != "lost"]
    assert ["second", "third"] == [call.request_id for call in other.made[0].calls]


class Weights:
    """A synchronisation in which a replica dies, or that fails by itself."""

    def __init__(self, world: World, deaths: int, fails: bool = False) -> None:
        self.world, self.deaths, self.fails, self.versions = world, deaths, fails, list[int]()

    async def sync(self, version: int) -> Any:
        self.versions.append(version)
        if self.deaths:
            self.deaths -= 1
            self.world.made[-1].die()
        if self.world.made[-1].dead.is_set() or self.fails:
            raise WeightsError("the transfer broke off")
        return version


def test_a_synchronisation_in_which_a_replica_dies_is_made_again() -> None:
    world = World()
    weights = Weights(world, deaths=2)

    async def life() -> None:
        assert 5 == await LastingWeights(weights, [Replica(world.server, ServerInfo(replica=0))]).sync(5)  # type: ignore[comparison-overlap]

    world.run(life())
    assert [5, 5, 5] == weights.versions
    assert [] == world.caught_up  # the update brings what is needed


def test_a_synchronisation_that_fails_by_itself_is_told_at_once() -> None:
    world = World()
    weights = Weights(world, deaths=0, fails=True)

    async def life() -> None:
        with pytest.raises(WeightsError) as caught:
            await LastingWeights(weights, [Replica(world.server, ServerInfo(replica=0))]).sync(5)
        assert "weights.transfer" == caught.value.code

    world.run(life())
    assert [5] == weights.versions
