"""The router: which replica serves a request, and what becomes of it when that replica dies."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from jackfield.abc.rollout import GenerateRequest, GenerateResult, HealthReport
from jackfield.errors import JackfieldError, RolloutError, WorkerLost
from jackfield.routing import Replica, Router
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

REQUEST = GenerateRequest(request_id="one", prompt_ids=(1,))


class FakeReplica:
    """Serves, or raises."""

    def __init__(self, clock: VirtualClock, failure: Exception | None = None) -> None:
        self.clock, self.failure, self.served = clock, failure, 0

    async def generate(self, request: GenerateRequest) -> Any:
        self.served += 1
        await self.clock.sleep(1.0)
        if self.failure is not None:
            raise self.failure
        tokens: Any = {"token_ids": (1,), "log_probs": (-1.0,), "weight_versions": (0,)}
        return GenerateResult(request_id=request.request_id, finish_reason="stop", **tokens)

    async def health(self) -> HealthReport:
        return HealthReport(healthy=True)


async def route(router: Router, clock: VirtualClock, *servers: FakeReplica) -> int:
    replicas = [Replica(each, number=n, clock=clock) for n, each in enumerate(servers)]  # type: ignore[arg-type]
    return await router.route(dict(enumerate(replicas)), 0.0)


async def routed(clock: VirtualClock, *servers: FakeReplica) -> Router:
    router = Router(clock)
    await route(router, clock, *servers)
    return router


def generate(clock: VirtualClock, *replicas: FakeReplica, requests: int = 1) -> None:
    async def all_of_them() -> None:
        router = await routed(clock, *replicas)
        await asyncio.gather(*(router.of_one_rollout()(REQUEST) for _ in range(requests)))

    clock.run(all_of_them())


def test_requests_go_to_the_least_loaded_replica() -> None:
    clock = VirtualClock()
    replicas = [FakeReplica(clock), FakeReplica(clock)]
    generate(clock, *replicas, requests=6)
    assert [3, 3] == [replica.served for replica in replicas]


def test_turns_of_one_run_go_where_its_first_went() -> None:
    clock = VirtualClock()
    replicas = [FakeReplica(clock), FakeReplica(clock)]

    async def turns() -> None:
        router = await routed(clock, *replicas)
        first, second = router.of_one_rollout(), router.of_one_rollout()
        await asyncio.gather(first(REQUEST), second(REQUEST))
        for _ in range(3):
            await second(REQUEST)

    clock.run(turns())
    assert [1, 4] == [replica.served for replica in replicas]


@pytest.mark.parametrize("failure", [RolloutError("no room"), ValueError("no room")], ids=["ours", "another"])
def test_a_healthy_replicas_failure_is_the_requests(failure: Exception) -> None:
    clock = VirtualClock()
    with pytest.raises(type(failure)) as caught:
        generate(clock, FakeReplica(clock, failure))
    assert failure is caught.value


@pytest.mark.parametrize("error", [RolloutError("gone", code="rollout.stopped"), WorkerLost("gone")])
def test_a_request_of_a_replica_that_dies_goes_to_another(error: JackfieldError) -> None:
    clock = VirtualClock()
    replicas = [FakeReplica(clock, error), FakeReplica(clock)]
    generate(clock, *replicas, requests=4)
    assert [2, 4] == [replica.served for replica in replicas]


def test_requests_wait_for_a_replica_that_serves() -> None:
    clock = VirtualClock()
    first, second = FakeReplica(clock, WorkerLost("gone")), FakeReplica(clock)

    async def main() -> None:
        router = await routed(clock, first)
        waiting = asyncio.gather(*(router.of_one_rollout()(REQUEST) for _ in range(2)))
        await clock.sleep(50.0)
        assert not waiting.done()
        assert 0 == await route(router, clock, second)
        await waiting

    clock.run(main())
    assert [2, 2] == [first.served, second.served]


class Updated(FakeReplica):
    """Fails its requests with an update that fails; another update brings version 3, after a while or never."""

    def __init__(self, clock: VirtualClock, after: float) -> None:
        super().__init__(clock, RolloutError("the update failed", code="rollout.stale"))
        self.after = after

    async def health(self) -> HealthReport:
        if self.clock.time() < self.after:
            return HealthReport(healthy=False, weight_version=2, detail="the update failed")
        self.failure = None
        return HealthReport(healthy=True, weight_version=3)


def test_a_request_that_fails_with_an_update_is_generated_after_the_next() -> None:
    clock = VirtualClock()
    replica = Updated(clock, after=20.0)
    generate(clock, replica)
    assert 2 == replica.served
    assert clock.time() == pytest.approx(21.0, abs=0.2)


@pytest.mark.parametrize(
    ("after", "minimum", "error"),
    [(0.0, 4, "rollout.stale"), (1000.0, 0, "deadline")],
    ids=["whose weights are too old", "that gets none"],
)
def test_a_replica_without_weights_refuses_in_the_end(after: float, minimum: int, error: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        router = await routed(clock, Updated(clock, after))
        with refused(error):
            await router.of_one_rollout()(attrs.evolve(REQUEST, minimum_weight_version=minimum))

    clock.run(main())
