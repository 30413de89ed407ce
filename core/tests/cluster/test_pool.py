"""Tests of the replica pool on virtual time: replicas join, leave, die and restart with the engine's weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
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
    WeightReceipt,
)
from jackfield.cluster.pool import ReplicaPool
from jackfield.config import make_config
from jackfield.errors import (
    ConfigError,
    JackfieldError,
    PluginError,
    RolloutError,
    RunError,
    WeightsError,
    WorkerLost,
)
from jackfield.routing import Replica, Router
from jackfield.weights import WeightsSynced
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

START, TRANSFER, DRAIN = 10.0, 5.0, 30.0


class Server:
    """A server that needs a second per token and starts with the weights of the model's folder."""

    def __init__(self, world: World, number: int) -> None:
        self.context = RolloutContext(model=ModelSpec(path="m"), replica=number, clock=world.clock)
        self.world, self.number, self.version = world, number, 0
        self.served: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.stopped = self.dead = self.stale = False
        self.error: Exception | None = None  # raised by each request

    async def start(self) -> ServerInfo:
        self.world.note(f"{self.number} starts")
        await self.world.clock.sleep(START)
        return ServerInfo(replica=self.number)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert not self.stopped
        if self.error is not None:
            raise self.error
        self.served.append(request)
        count = request.sampling.max_new_tokens
        try:
            await self.world.clock.sleep(count)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        assert not self.stopped, "a request of a replica that was stopped"
        if self.dead:
            raise RolloutError("its process has ended", code="rollout.stopped")
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tuple(range(count)),
            log_probs=(-1.0,) * count,
            weight_versions=(self.version,) * count,
            finish_reason="length",
        )

    async def health(self) -> HealthReport:
        running = len(self.served) - len(self.aborted)
        healthy = not (self.stopped or self.dead or self.stale)
        return HealthReport(healthy=healthy, running=running, weight_version=self.version)

    async def stop(self) -> None:
        self.stopped = True
        self.world.note(f"{self.number} stops")


class World:
    """Places with the routers of two agent workers, an engine at version 3, and its device lease."""

    def __init__(
        self, *, takes_turns: bool = False, place: Any = "process", restarts: int = 3, in_turns: bool = False
    ) -> None:
        self.clock = VirtualClock()
        self.notes: list[str] = []
        self.room = 9
        self.servers: dict[int, Server] = {}
        self.routers: list[Router] = []
        self.replicas: dict[int, Replica] = {}
        self.place, self.lives, self.syncs = place, list[Server](), list[int]()
        self.syncing: Callable[[int], Coroutine[Any, Any, None]] | None = None
        self.failing: Callable[[int], None] = lambda number: None
        self.refused = 0  # how many processes end before their server is made
        self.free = asyncio.Event()  # set while the engine does not train
        self.free.set()
        self.takes_turns = takes_turns
        settings: dict[str, Any] = {"model.path": "m", "deadlines.start": 60.0, "deadlines.drain": DRAIN}
        settings["weights.in_turns"] = in_turns
        pairs = [f"{name}={value}" for name, value in {**settings, "cluster.replica_restarts": restarts}.items()]
        self.pool = ReplicaPool(self, make_config({}, pairs), self.clock)

    def note(self, what: str) -> None:
        self.notes.append(what)

    # -- places

    async def start(self, replica: Replica) -> None:
        number = replica.number
        if len(self.servers.keys() | {number}) > self.room:
            raise RunError("the cluster has no room", code="cluster.unavailable")
        if self.refused:
            self.refused -= 1
            raise PluginError("the process has ended", code="plugin.interpreter")
        self.servers[number] = Server(self, number)
        self.lives.append(self.servers[number])
        replica.server, replica.place = self.servers[number], self.place  # type: ignore[assignment]
        self.replicas[number] = replica

    async def end(self, number: int) -> None:
        assert self.servers.pop(number).stopped
        self.note(f"{number} is gone")

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        self.note(f"routes {sorted(replicas)}" + (f" without {list(updating)}" if updating else ""))
        return sum(await asyncio.gather(*(router.route(replicas, seconds, updating) for router in self.routers)))

    # -- the run

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        await self.free.wait()
        self.note("held")
        yield
        self.note("free")

    async def load(self, replica: Replica) -> None:
        await self.clock.sleep(TRANSFER)
        self.failing(replica.info.replica)
        self.note(f"{replica.info.replica} has weights")
        replica.server.version = 3  # type: ignore[attr-defined]

    def run(self, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            self.routers += [Router(self.clock) for _ in range(2)]
            await self.pool.start(1)
            self.servers[0].version = 3
            self.pool.source = self
            self.keeping = asyncio.ensure_future(self.pool.keep())
            await asyncio.sleep(0)
            self.notes.clear()
            await life()
            self.keeping.cancel()
            await asyncio.gather(self.keeping, return_exceptions=True)
            await self.pool.close()

        self.clock.run(whole())

    def generate(self, count: int, tokens: int = 4, name: str = "") -> list[asyncio.Task[GenerateResult]]:
        """Start requests, which alternate between the agent workers."""
        sampling = SamplingParams(max_new_tokens=tokens, seed=7)
        requests = [GenerateRequest(request_id=f"{name}{n}", prompt_ids=(0,), sampling=sampling) for n in range(count)]
        turns = itertools.cycle(self.routers)
        return [asyncio.ensure_future(next(turns).of_one_rollout()(request)) for request in requests]  # type: ignore[arg-type]

    async def sync(self, version: int, replicas: Sequence[Replica], *, last: bool) -> WeightsSynced:
        self.syncs.append(version)
        if self.syncing is not None and replicas:
            await self.syncing(version)
        for replica in replicas:
            replica.server.version = version  # type: ignore[attr-defined]
        self.note(f"{[each.number for each in replicas]} have {version}{', the last' if last else ''}")
        receipts = tuple(WeightReceipt(version=version, replica=each.number, workers=()) for each in replicas)
        return WeightsSynced(version=version, seconds=1.0, sent_bytes=7, receipts=receipts)

    def die(self, number: int) -> None:
        """Let a replica's process end."""
        self.servers[number].dead = True
        if self.place == "cluster":
            self.replicas[number].lose(WorkerLost(f"rollout replica {number} died", where=f"rollout replica {number}"))
        else:
            self.replicas[number].lose(RolloutError("its process has ended", code="rollout.stopped", found="SIGKILL"))

    @property
    def members(self) -> list[int]:
        return [replica.info.replica for replica in self.pool.members]


def test_one_that_is_added_has_the_engines_weights_before_its_first_request() -> None:
    world = World()

    async def life() -> None:
        world.free.clear()
        growing = asyncio.ensure_future(world.pool.scale(2))
        await world.clock.sleep(20.0)
        early = world.generate(4)
        await asyncio.gather(*early)
        assert ([0], ["1 starts"]) == (world.members, world.notes)
        assert ["serving", "starting"] == [state.state for state in await world.pool.states()]
        world.free.set()
        states = await growing
        assert [(0, "serving", 3), (1, "serving", 3)] == [(s.replica, s.state, s.weight_version) for s in states]
        await asyncio.gather(*world.generate(8))
        assert (8, 4) == (len(world.servers[0].served), len(world.servers[1].served))

    world.run(life)
    assert ["1 starts", "held", "1 has weights", "routes [0, 1]", "free"] == world.notes[:5]


def test_one_that_takes_turns_with_the_engine_is_started_when_the_device_is_free() -> None:
    world = World(takes_turns=True)
    world.run(lambda: _discard(world.pool.scale(2)))
    assert ["held", "1 starts", "1 has weights", "routes [0, 1]", "free"] == world.notes[:5]


async def _discard(work: Coroutine[Any, Any, Any]) -> None:
    await work


def test_several_start_side_by_side_and_get_weights_one_after_the_other() -> None:
    world = World()

    async def life() -> None:
        began = world.clock.time()
        await world.pool.scale(4)
        assert START + 3 * TRANSFER == world.clock.time() - began
        assert [0, 1, 2, 3] == world.members

    world.run(life)


def test_one_that_is_removed_ends_its_requests_first_and_gets_weights_up_to_then() -> None:
    world = World()

    async def life() -> None:
        await world.pool.scale(2)
        running = world.generate(4, tokens=8)
        await world.clock.sleep(2.0)
        leaving = world.servers[1]
        shrinking = asyncio.ensure_future(world.pool.scale(1))
        await world.clock.sleep(2.0)
        assert ([0, 1], False) == (world.members, leaving.stopped)
        assert ["serving", "draining"] == [state.state for state in await world.pool.states()]
        late = world.generate(4)
        assert [0] == [state.replica for state in await shrinking]
        await asyncio.gather(*running, *late)
        assert ([0], True, [], 2) == (world.members, leaving.stopped, leaving.aborted, len(leaving.served))

    world.run(life)
    assert ["routes [0]", "held", "free", "1 stops", "1 is gone"] == world.notes[5:10]


def test_requests_that_last_too_long_are_generated_again_elsewhere_with_their_whole_budget() -> None:
    """They keep their seeds, so that no request is lost and no sample changes."""
    world = World()

    async def life() -> None:
        await world.pool.scale(2)
        running = world.generate(4, tokens=100)
        await world.clock.sleep(2.0)
        leaving, began = world.servers[1], world.clock.time()
        await world.pool.scale(1)
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
        await world.pool.scale(2)
        running = world.generate(4, tokens=100)
        await world.clock.sleep(2.0)
        shrinking = asyncio.ensure_future(world.pool.scale(1))
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
        await world.pool.scale(2)
        busy = world.generate(1, tokens=8)
        await asyncio.sleep(0)
        generate = world.routers[0].of_one_rollout()
        request = GenerateRequest(request_id="turn", prompt_ids=(0,), sampling=SamplingParams(max_new_tokens=4))
        await generate(request)
        assert [request] == world.servers[1].served
        await world.pool.scale(1)
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
        with refused(("cluster.unavailable", "weights.transfer")):
            await world.pool.scale(3)
        assert ([0, 1], {0, 1}) == (world.members, set(world.servers))
        assert ["serving"] * 2 == [state.state for state in await world.pool.states()]
        world.room, world.failing = 9, lambda number: None
        await world.pool.scale(3)
        assert [0, 1, 2] == world.members
        await asyncio.gather(*world.generate(6))

    world.run(life)


def test_requests_for_more_and_fewer_are_done_in_turn() -> None:
    world = World()

    async def life() -> None:
        found = await asyncio.gather(*(world.pool.scale(count) for count in (3, 1, 2)))
        assert [3, 1, 2] == [len(states) for states in found]
        assert [0, 1] == world.members

    world.run(life)


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_keeps_a_replica(count: int) -> None:
    world = World()

    async def life() -> None:
        with pytest.raises(ConfigError) as caught:
            await world.pool.scale(count)
        assert ("config.invalid-value", count) == (caught.value.code, caught.value.found)

    world.run(life)
    assert ["0 stops"] == world.notes


@pytest.mark.parametrize("takes_turns", [False, True], ids=["beside the engine", "in turns with it"])
def test_one_that_dies_serves_again_when_it_has_the_engines_weights(takes_turns: bool) -> None:
    """Its requests wait or go to another replica; none is lost, and none is served before it has the weights."""
    world = World(takes_turns=takes_turns)

    async def life() -> None:
        running = world.generate(3)
        await world.clock.sleep(1.5)
        world.free.clear()
        world.die(0)
        await world.clock.sleep(60.0)
        late = world.generate(1, name="late")
        assert ["restarting"] == [state.state for state in await world.pool.states()]
        assert all([] == each.served for each in world.lives[1:])
        world.free.set()
        results = await asyncio.gather(*running, *late)
        assert {(0, 1, 2, 3)} == {result.token_ids for result in results}
        assert {3} == {version for result in results for version in result.weight_versions}
        assert [("serving", 1)] == [(state.state, state.restarts) for state in await world.pool.states()]

    world.run(life)
    assert world.lives[0].stopped
    order = ["held", "0 starts"] if takes_turns else ["0 starts", "held"]
    assert ["routes []", "0 stops", *order, "0 has weights", "routes [0]", "free"] == world.notes[:7]


def test_requests_leave_one_that_dies_for_another() -> None:
    world = World()

    async def life() -> None:
        await world.pool.scale(2)
        generate = world.routers[0].of_one_rollout()
        request = GenerateRequest(request_id="turn", prompt_ids=(0,), sampling=SamplingParams(max_new_tokens=4))
        await generate(request)
        world.die(0)
        await generate(request)
        assert [request] == world.servers[1].served
        await world.clock.sleep(60.0)
        assert [0, 1] == world.members
        await generate(request)
        assert 2 == len(world.servers[1].served)

    world.run(life)


@pytest.mark.parametrize("moments", [(0.5, START / 2), (0.5, START + 1.0)], ids=["starts", "loads weights"])
def test_one_that_dies_again_before_it_serves_is_restarted_once_more(moments: tuple[float, ...]) -> None:
    world = World()

    def gone(number: int) -> None:
        if world.servers[number].dead:
            raise WeightsError("the transfer broke off")

    async def life() -> None:
        world.failing = gone
        for moment in moments:
            await world.clock.sleep(moment)
            world.die(0)
        await world.clock.sleep(60.0)
        assert [("serving", 2)] == [(state.state, state.restarts) for state in await world.pool.states()]
        await asyncio.gather(*world.generate(2))

    world.run(life)
    assert 3 == len(world.lives)


def test_one_whose_process_ends_before_it_has_a_server_is_restarted_once_more() -> None:
    world = World()

    async def life() -> None:
        world.refused = 1
        world.die(0)
        await world.clock.sleep(60.0)
        assert [("serving", 2)] == [(state.state, state.restarts) for state in await world.pool.states()]
        await asyncio.gather(*world.generate(2))

    world.run(life)
    assert 2 == len(world.lives)


@pytest.mark.parametrize(
    ("place", "code", "kind"),
    [("process", "rollout.stopped", RolloutError), ("cluster", "worker.died", WorkerLost)],
)
@pytest.mark.parametrize("restarts", [0, 2])
def test_one_that_dies_too_often_ends_the_run(place: str, code: str, kind: type[Exception], restarts: int) -> None:
    """In a cluster, the error lets the run recover."""
    world = World(place=place, restarts=restarts)

    async def life() -> None:
        for _ in range(restarts + 1):
            assert not world.keeping.done()
            world.die(0)
            await world.clock.sleep(60.0)
        with pytest.raises(ExceptionGroup) as caught:
            await world.keeping
        (error,) = caught.value.exceptions
        assert isinstance(error, kind)
        assert isinstance(error, JackfieldError)
        assert code == error.code
        assert "replica 0" in str(error.where)

    world.run(life)
    assert restarts + 1 == len(world.lives)


def test_a_request_that_fails_on_an_unhealthy_replica_says_that_it_has_died() -> None:
    """Its process is alive, but a component of it is not."""
    world = World()

    async def life() -> None:
        world.servers[0].dead, world.servers[0].error = True, ConnectionResetError("by peer")
        await asyncio.gather(*world.generate(2))

    world.run(life)
    assert (2, [0, 2]) == (len(world.lives), [len(each.served) for each in world.lives])


@pytest.mark.parametrize("error", [RolloutError("no", code="rollout.request"), ValueError("no room")])
def test_a_request_that_fails_on_a_healthy_replica_has_its_own_error(error: Exception) -> None:
    world = World()

    async def life() -> None:
        world.servers[0].error = error
        (found,) = await asyncio.gather(*world.generate(1), return_exceptions=True)
        assert error is found

    world.run(life)
    assert 1 == len(world.lives)


def test_a_server_of_this_process_that_dies_ends_the_run() -> None:
    world = World(place="here")

    async def life() -> None:
        world.servers[0].dead, world.servers[0].error = True, ConnectionResetError("by peer")
        waiting = world.generate(1)
        with pytest.raises(ExceptionGroup) as caught:
            await world.keeping
        (error,) = caught.value.exceptions
        assert isinstance(error, RolloutError)
        assert ("rollout.stopped", "replica 0") == (error.code, error.where)
        assert "ConnectionResetError: by peer" in str(error.found)
        waiting[0].cancel()

    world.run(life)


def test_a_synchronisation_is_repeated_without_those_that_die_in_it() -> None:
    world = World()

    async def fail(version: int) -> None:
        if len(world.syncs) == 1:
            await world.clock.sleep(1.0)
            world.die(1)
            raise WeightsError("the transfer broke off")

    async def life() -> None:
        await world.pool.scale(2)
        world.syncing = fail
        assert 7 == (await world.pool.sync(4, world.sync)).sent_bytes
        assert (4, [0]) == (world.servers[0].version, world.members)
        await world.clock.sleep(60.0)
        assert [0, 1] == world.members

    world.run(life)
    assert [4, 4] == world.syncs


def test_one_that_dies_in_a_transfer_is_the_only_one_that_is_restarted() -> None:
    """The others are not healthy until the transfer is repeated, which it is at once."""
    world = World()

    async def fail(version: int) -> None:
        if len(world.syncs) == 1:
            world.die(0)
            world.servers[1].stale = world.servers[2].stale = True
            raise WeightsError("the transfer broke off")
        world.servers[1].stale = world.servers[2].stale = False

    async def life() -> None:
        await world.pool.scale(3)
        world.syncing = fail
        report = await world.pool.sync(4, world.sync)
        assert [1, 2] == [receipt.replica for receipt in report.receipts]
        await world.clock.sleep(60.0)
        states = await world.pool.states()
        assert [("serving", 1), ("serving", 0), ("serving", 0)] == [(each.state, each.restarts) for each in states]

    world.run(life)


def test_a_synchronisation_in_which_the_only_replica_dies_ends_and_its_successor_loads_the_weights() -> None:
    world = World()

    async def fail(version: int) -> None:
        world.servers[0].dead = True  # this process has not noticed yet
        raise WeightsError("the transfer broke off")

    async def life() -> None:
        world.syncing = fail
        report = await world.pool.sync(4, world.sync)
        assert (4, []) == (report.version, world.pool.members)
        await world.clock.sleep(60.0)
        assert [0] == world.members

    world.run(life)
    assert "0 has weights" in world.notes


def test_a_synchronisation_that_fails_by_itself_is_not_repeated() -> None:
    world = World()

    async def fail(version: int) -> None:
        raise WeightsError("the transfer broke off")

    async def life() -> None:
        world.syncing = fail
        with pytest.raises(WeightsError) as caught:
            await world.pool.sync(5, world.sync)
        assert "weights.transfer" == caught.value.code

    world.run(life)
    assert ([5], 1) == (world.syncs, len(world.lives))


def test_those_that_die_are_left_out_of_a_hand_over() -> None:
    world = World()

    async def call(server: BaseRolloutServer) -> None:
        if server.dead:  # type: ignore[attr-defined]
            raise RolloutError("its process has ended", code="rollout.stopped")

    async def refuse(server: BaseRolloutServer) -> None:
        raise RolloutError("no")

    async def life() -> None:
        await world.pool.scale(2)
        world.servers[1].dead = True
        await world.pool.each("sleep", call)
        assert [0] == world.members
        with pytest.raises(RolloutError):
            await world.pool.each("sleep", refuse)

    world.run(life)


def test_one_that_joined_and_dies_can_be_removed_while_it_is_restarted() -> None:
    world = World()

    async def life() -> None:
        await world.pool.scale(2)
        world.die(1)
        await world.clock.sleep(5.0)
        assert ["serving", "restarting"] == [state.state for state in await world.pool.states()]
        await world.pool.scale(1)
        assert [0] == [state.replica for state in await world.pool.states()]
        await world.clock.sleep(60.0)
        assert ([0], {0}) == (world.members, set(world.servers))

    world.run(life)
    assert "1 is gone" in world.notes


def test_the_end_of_a_run_stops_one_that_is_on_its_way() -> None:
    world = World()
    made: list[Server] = []

    async def life() -> None:
        growing = asyncio.ensure_future(world.pool.scale(2))
        await world.clock.sleep(START / 2)
        made.append(world.servers[1])
        growing.cancel()
        await asyncio.gather(growing, return_exceptions=True)
        assert {0, 1} == set(world.servers), "it goes on although who asked for it has left"

    world.run(life)
    assert {0} == set(world.servers)
    assert made[0].stopped


def test_replicas_take_new_weights_in_turns_while_the_others_get_new_requests() -> None:
    world = World(in_turns=True)
    served: list[int] = []

    async def ask(version: int) -> None:
        """Ask while an update is under way."""
        for result in await asyncio.gather(*world.generate(4, tokens=1, name=f"{len(world.syncs)}-")):
            served.extend(result.weight_versions)

    async def life() -> None:
        await world.pool.scale(3)
        running = world.generate(3, tokens=20)
        await asyncio.sleep(0)
        world.notes.clear()
        world.syncing = ask
        report = await world.pool.sync(4, world.sync)
        assert [0, 1, 2] == [receipt.replica for receipt in report.receipts]
        assert (4, 2.0, 7) == (report.version, report.seconds, report.sent_bytes)
        assert not any(each.done() for each in running), "requests stay where they run"
        await asyncio.gather(*running)

    world.run(life)
    turn = ["routes [0, 1, 2] without [0, 2]", "[0, 2] have 4", "routes [0, 1, 2] without [1]", "[1] have 4, the last"]
    assert [*turn, "routes [0, 1, 2]"] == world.notes[:5]
    assert [3] * 4 + [4] * 4 == served, "a request goes to those whose turn it is not"


def test_one_that_dies_in_its_turn_is_left_out_and_the_next_turn_comes() -> None:
    world = World(in_turns=True)

    async def fail(version: int) -> None:
        if len(world.syncs) == 1:
            await world.clock.sleep(1.0)
            world.die(0)
            raise WeightsError("the transfer broke off")

    async def life() -> None:
        await world.pool.scale(3)
        world.syncing = fail
        report = await world.pool.sync(4, world.sync)
        assert [1, 2] == [receipt.replica for receipt in report.receipts]
        await world.clock.sleep(60.0)
        assert ([0, 1, 2], [3, 4, 4]) == (world.members, [world.servers[n].version for n in range(3)])

    world.run(life)
    assert ["[2] have 4", "[1] have 4, the last"] == [note for note in world.notes if "have 4" in note]


def test_all_get_new_requests_again_after_a_turn_that_fails() -> None:
    world = World(in_turns=True)

    async def fail(version: int) -> None:
        raise WeightsError("the transfer broke off")

    async def life() -> None:
        await world.pool.scale(2)
        world.syncing = fail
        with refused("weights.transfer"):
            await world.pool.sync(4, world.sync)
        assert ["routes [0, 1] without [0]", "routes [0, 1]"] == world.notes[-2:]

    world.run(life)


def test_a_single_replica_has_no_turns() -> None:
    world = World(in_turns=True)

    async def life() -> None:
        await world.pool.sync(4, world.sync)
        assert ["[0] have 4, the last"] == world.notes

    world.run(life)


def test_a_replica_that_is_late_in_a_hand_over_is_named() -> None:
    world = World()

    async def never(server: BaseRolloutServer) -> None:
        if server is world.servers[1]:
            await asyncio.Event().wait()

    async def life() -> None:
        await world.pool.scale(2)
        with refused("deadline", "for rollout replica 1 to interrupt its requests"):
            await world.pool.each("interrupt its requests", never)

    world.run(life)
