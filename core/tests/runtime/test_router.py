"""The router: who serves a request, and how a replica that died is told from a request that failed."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from jackfield.abc.rollout import GenerateRequest, HealthReport
from jackfield.clock import VirtualClock
from jackfield.errors import JackfieldError, RolloutError
from jackfield.runtime.router import ReplicaRouter

REQUEST = GenerateRequest(request_id="one", prompt_ids=(1,))


class FakeReplica:
    """Serves, or raises; then tells its health, or not."""

    def __init__(self, clock: VirtualClock, failure: Exception | None = None, health: Any = None) -> None:
        self.clock, self.failure, self.state, self.served = clock, failure, health, 0

    async def generate(self, request: GenerateRequest) -> Any:
        self.served += 1
        await self.clock.sleep(1.0)
        if self.failure is not None:
            raise self.failure

    async def health(self) -> HealthReport:
        if isinstance(self.state, Exception):
            raise self.state
        if self.state is None:
            await asyncio.Event().wait()
        return self.state  # type: ignore[no-any-return]


def generate(clock: VirtualClock, *replicas: FakeReplica, requests: int = 1) -> None:
    async def all_of_them() -> None:
        router = ReplicaRouter(dict(enumerate(replicas)), clock)  # type: ignore[arg-type]
        await asyncio.gather(*(router.generate(REQUEST) for _ in range(requests)))

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
        router = ReplicaRouter(dict(enumerate(replicas)), clock)  # type: ignore[arg-type]
        first, second = router.of_one_run(), router.of_one_run()
        await asyncio.gather(first(REQUEST), second(REQUEST))
        for _ in range(3):
            await second(REQUEST)

    clock.run(turns())
    assert [1, 4] == [replica.served for replica in replicas]


@pytest.mark.parametrize(
    ("health", "state"),
    [
        (HealthReport(healthy=False, detail="exit code 9"), "exit code 9"),
        (ConnectionRefusedError("port 80"), "ConnectionRefusedError: port 80"),
        (None, "waited 10 s for replica 0 to tell its health"),
    ],
    ids=["says so", "raises", "is silent"],
)
def test_a_replica_that_is_not_well_after_a_failure_has_died(health: Any, state: str) -> None:
    clock = VirtualClock()
    with pytest.raises(RolloutError) as caught:
        generate(clock, FakeReplica(clock, ConnectionResetError("by peer"), health))
    assert ("rollout.stopped", "replica 0") == (caught.value.code, caught.value.where)
    assert "ConnectionResetError: by peer" in str(caught.value)
    assert state in str(caught.value)


@pytest.mark.parametrize(
    "failure", [RolloutError("no room"), ValueError("no room")], ids=lambda error: str(type(error))
)
def test_a_healthy_replicas_failure_is_the_requests(failure: Exception) -> None:
    clock = VirtualClock()
    with pytest.raises(type(failure)) as caught:
        generate(clock, FakeReplica(clock, failure, HealthReport(healthy=True)))
    assert failure is caught.value


def test_a_refusal_is_no_reason_to_ask_for_health() -> None:
    clock = VirtualClock()
    with pytest.raises(JackfieldError) as caught:
        generate(clock, FakeReplica(clock, RolloutError("no", code="rollout.request"), AssertionError("asked")))
    assert "rollout.request" == caught.value.code


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
    [(0.0, 4, "the update failed"), (1000.0, 0, "waited 600 s for replica 0 to get weights.*: the update failed")],
    ids=["whose weights are too old", "that gets none"],
)
def test_a_replica_without_weights_refuses_in_the_end(after: float, minimum: int, error: str) -> None:
    clock = VirtualClock()

    async def refused() -> None:
        router = ReplicaRouter({0: Updated(clock, after)}, clock)  # type: ignore[dict-item]
        with pytest.raises(JackfieldError, match=error):
            await router.generate(attrs.evolve(REQUEST, minimum_weight_version=minimum))

    clock.run(refused())
