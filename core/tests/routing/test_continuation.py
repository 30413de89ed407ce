"""The router: interrupted requests continue with their tokens, and replicas with new weights are chosen and spared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import attrs
import numpy as np
import pytest

from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    SamplingParams,
)
from jackfield.errors import RolloutError, WorkerLost
from jackfield.routing import Replica, Router
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

REQUEST = GenerateRequest(request_id="one", prompt_ids=(0,), sampling=SamplingParams(max_new_tokens=10, seed=7))


class Server:
    """Generates a token a second: its place in prompt and response, 0 for the prompt of one token."""

    def __init__(self, clock: VirtualClock, version: int = 0) -> None:
        self.clock, self.version, self.asked = clock, version, list[GenerateRequest]()
        self.reason: Any = "length"  #: the reason that ends requests early, at their next token
        self.failure: Exception | None = None
        self.routes = False  #: whether results have the experts of each token

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        chunks = [chunk async for chunk in self.generate_stream(request)]
        names = ("token_ids", "log_probs", "weight_versions")
        values: Any = {name: tuple(one for each in chunks for one in getattr(each, name)) for name in names}
        if self.routes:  # the number of a token's expert is the version
            count = len(request.prompt_ids) + len(values["token_ids"]) - 1
            values["routed_experts"] = np.full((count, 1, 1), self.version, dtype=np.int16)
        return GenerateResult(request_id=request.request_id, finish_reason=self.reason, **values)

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        if (request.minimum_weight_version or 0) > self.version:
            raise RolloutError("it needs newer weights", code="rollout.stale")
        first, count = len(request.prompt_ids), 0
        while count < request.sampling.max_new_tokens and (self.reason == "length" or not count):
            await self.clock.sleep(1.0)
            if self.failure is not None:
                raise self.failure
            values: Any = {"token_ids": (first + count,), "log_probs": (-float(first + count),)}
            yield GenerateChunk(request_id=request.request_id, weight_versions=(self.version,), **values)
            count += 1
        nothing: Any = dict.fromkeys(("token_ids", "log_probs", "weight_versions"), ())
        yield GenerateChunk(request_id=request.request_id, finish_reason=self.reason, **nothing)

    async def abort(self, request: AbortRequest) -> AbortResult:
        assert ("one",) == request.request_ids
        self.reason = "abort"
        return AbortResult(request_ids=request.request_ids)

    async def health(self) -> HealthReport:
        return HealthReport(healthy=True, weight_version=self.version)


def check(result: GenerateResult, *versions: int, reason: str = "length") -> None:
    """Check that a result is that of one request whose tokens have these versions."""
    ids = tuple(range(1, len(versions) + 1))
    assert (ids, versions, reason) == (result.token_ids, result.weight_versions, result.finish_reason)
    assert tuple(-float(token) for token in ids) == result.log_probs


class World:
    """A router and servers on virtual time; a token is decoded to a letter."""

    def __init__(self, *versions: int) -> None:
        self.clock = VirtualClock()
        self.servers = [Server(self.clock, version) for version in versions or (0,)]
        self.router = Router(self.clock, lambda ids: "".join(chr(ord("a") + token) for token in ids))
        self.replicas: dict[int, Any] = {
            number: Replica(server, number=number, clock=self.clock)  # type: ignore[arg-type]
            for number, server in enumerate(self.servers)
        }

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            await self.router.route(self.replicas, 0.0)
            await test()

        self.clock.run(main())

    def ask(self, request: GenerateRequest = REQUEST) -> asyncio.Task[GenerateResult]:
        return asyncio.ensure_future(self.router.of_one_rollout()(request))

    async def interrupt(self, seconds: float) -> None:
        """Abort what runs, after some time, and serve again with the next version."""
        await self.clock.sleep(seconds)
        self.servers[0].reason = "abort"
        await self.clock.sleep(1.0)
        self.servers[0].reason, self.servers[0].version = "length", self.servers[0].version + 1


def interrupted_twice() -> list[GenerateRequest]:
    world = World()

    async def test() -> None:
        result = world.ask()
        await world.interrupt(2.5)
        await world.interrupt(3.0)
        check(await result, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2)

    world.run(test)
    return world.servers[0].asked


def test_an_aborted_request_continues_with_its_tokens_and_the_rest_of_its_budget() -> None:
    """The agent gets one result; the seed of each part is its own, and the same in a repetition."""
    first, second, third = asked = interrupted_twice()
    assert first == REQUEST
    assert [(0,), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7)] == [each.prompt_ids for each in asked]
    assert [10, 7, 3] == [each.sampling.max_new_tokens for each in asked]
    assert 3 == len({each.sampling.seed for each in asked})
    assert {"one"} == {each.request_id for each in asked}
    assert asked == interrupted_twice()
    for part in (second, third):
        assert attrs.evolve(part.sampling, max_new_tokens=10, seed=7) == REQUEST.sampling


def test_tokens_keep_the_experts_of_the_part_that_has_seen_them_first() -> None:
    """The last token of a part is first seen by the next one. A result that is cut has no more experts than tokens."""
    world = World()
    world.servers[0].routes = True

    async def test() -> None:
        sampling = SamplingParams(max_new_tokens=10, stop=("de",))
        result = world.ask(attrs.evolve(REQUEST, sampling=sampling))
        await world.interrupt(2.5)
        found = await result
        check(found, 0, 0, 0, 1, reason="stop")
        assert found.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 1]

    world.run(test)


def test_a_request_without_a_seed_continues_without_one() -> None:
    world = World()

    async def test() -> None:
        result = world.ask(attrs.evolve(REQUEST, sampling=SamplingParams(max_new_tokens=5)))
        await world.interrupt(2.5)
        check(await result, 0, 0, 0, 1, 1)

    world.run(test)
    assert [None, None] == [each.sampling.seed for each in world.servers[0].asked]


def test_one_that_is_aborted_after_its_last_token_is_complete() -> None:
    world = World()

    async def test() -> None:
        result = world.ask(attrs.evolve(REQUEST, sampling=SamplingParams(max_new_tokens=3)))
        await world.clock.sleep(2.5)
        world.servers[0].reason = "abort"
        check(await result, 0, 0, 0)

    world.run(test)


@pytest.mark.parametrize(
    ("stop", "kept", "reason"),
    [(("de",), 4, "stop"), (("x", "cdef"), 5, "stop"), (("abc", "hij"), 10, "length")],
    ids=["in both parts", "the longer one", "in neither"],
)
def test_a_stop_text_that_is_in_both_parts_ends_a_response(stop: tuple[str, ...], kept: int, reason: str) -> None:
    """Servers see a part alone: tokens b, c and d, then e to k. What follows the text is dropped."""
    world = World()
    sampling = attrs.evolve(REQUEST.sampling, stop=stop)

    async def test() -> None:
        result = world.ask(attrs.evolve(REQUEST, sampling=sampling))
        await world.interrupt(2.5)
        check(await result, *((0,) * 3 + (1,) * 7)[:kept], reason=reason)

    world.run(test)


def test_requests_of_a_replica_that_is_removed_continue_elsewhere_with_their_tokens() -> None:
    world = World(3, 4)

    async def test() -> None:
        result = world.ask()
        await world.clock.sleep(0.5)
        del world.replicas[0]
        assert 1 == await world.router.route(world.replicas, 4.0)
        check(await result, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4)

    world.run(test)


def test_a_replica_may_be_removed_while_an_earlier_table_without_it_is_taken_over() -> None:
    """Two tables come at once: one because it has died, one because of the turns of an update."""
    world = World(3, 4)

    async def test() -> None:
        result = world.ask()
        await world.clock.sleep(0.5)
        del world.replicas[0]
        routing = (world.router.route(world.replicas, 0.0), world.router.route(world.replicas, 60.0, [1]))
        assert [1, 0] == await asyncio.gather(*routing)
        check(await result, *(4,) * 10)

    world.run(test)


def test_a_removed_replica_that_does_not_answer_loses_its_part() -> None:
    world = World(3, 4)

    async def silent(request: AbortRequest) -> AbortResult:
        await asyncio.Event().wait()
        raise AssertionError

    async def test() -> None:
        world.servers[0].abort = silent  # type: ignore[method-assign]
        result = world.ask(attrs.evolve(REQUEST, sampling=SamplingParams(max_new_tokens=90)))
        await world.clock.sleep(0.5)
        del world.replicas[0]
        assert 1 == await world.router.route(world.replicas, 4.0)
        assert world.clock.time() < 20.0
        check(await result, *(4,) * 90)

    world.run(test)


def test_a_request_whose_replica_dies_keeps_its_complete_parts() -> None:
    world = World(0, 5)

    async def test() -> None:
        result = world.ask()
        await world.interrupt(2.5)
        world.servers[0].failure = WorkerLost("gone")
        check(await result, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5)

    world.run(test)


def stream(*versions: int, dies: int | None = None) -> tuple[World, GenerateResult, list[int]]:
    """Stream the request from replicas of these versions, the first of which dies after some tokens."""
    world, heard = World(*versions), list[int]()

    def hear(chunk: GenerateChunk) -> None:
        heard.extend(chunk.token_ids)
        if dies is not None and len(heard) >= dies:
            world.servers[0].failure = WorkerLost("gone")

    async def test() -> None:
        results.append(await world.router.of_one_rollout()(REQUEST, hear))

    results = list[GenerateResult]()
    world.run(test)
    return world, results[0], heard


def test_a_request_is_heard_while_it_is_generated() -> None:
    """Each token is heard once, and those that a replica has said before it died are kept."""
    _, whole, heard = stream(0)
    check(whole, *(0,) * 10)
    assert heard == list(whole.token_ids)
    world, whole, heard = stream(0, 5, dies=4)
    check(whole, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5)
    assert heard == list(whole.token_ids)
    assert [(0,), (0, 1, 2, 3, 4)] == [each.prompt_ids for server in world.servers for each in server.asked]


def test_a_replica_that_dies_after_the_last_token_has_completed_its_request() -> None:
    world, whole, heard = stream(0, 5, dies=10)
    check(whole, *(0,) * 10)
    assert (10, 0) == (len(heard), len(world.servers[1].asked))


def test_a_request_that_is_heard_goes_on_after_an_interruption() -> None:
    world, heard = World(), list[int]()

    async def test() -> None:
        hear: Any = lambda chunk: heard.extend(chunk.token_ids)  # noqa: E731
        result = asyncio.ensure_future(world.router.of_one_rollout()(REQUEST, hear))
        await world.interrupt(2.5)
        check(await result, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1)

    world.run(test)
    assert list(range(1, 11)) == heard


def test_replicas_with_an_update_get_no_new_requests_while_another_serves() -> None:
    """Requests that run there stay; the next turn of their rollout goes elsewhere, and waits for nothing."""
    world = World(0, 0, 0)

    async def test() -> None:
        turns = world.router.of_one_rollout()
        running = asyncio.ensure_future(turns(REQUEST))
        await world.clock.sleep(0.5)
        assert 0 == await world.router.route(world.replicas, 60.0, [0, 1])
        await asyncio.gather(*(world.ask() for _ in range(4)))
        await running
        await turns(REQUEST)
        assert [1, 0, 5] == [len(each.asked) for each in world.servers]
        await world.router.route(world.replicas, 60.0, [0, 1, 2])
        await asyncio.gather(*(world.ask() for _ in range(3)))
        assert [2, 1, 6] == [len(each.asked) for each in world.servers]

    world.run(test)


def test_a_request_that_needs_new_weights_goes_to_a_replica_that_has_them() -> None:
    world = World(3, 3, 4)

    async def test() -> None:
        check(await world.ask(attrs.evolve(REQUEST, minimum_weight_version=4)), *(4,) * 10)
        with refused("rollout.stale"):
            await world.ask(attrs.evolve(REQUEST, minimum_weight_version=5))

    world.run(test)
