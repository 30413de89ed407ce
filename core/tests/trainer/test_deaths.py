"""What a rollout or a score costs that kills the worker it runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest

from jackfield.errors import WorkerLost
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.rewards import RewardWorker
from jackfield.trainer.role import Schedule

from .simulation import Simulation, Worker

pytest.importorskip("torch")


@attrs.define(eq=False, slots=False)
class Deadly(Simulation):
    """A run in which some rollouts, by group and number, and the scores of some groups kill their worker."""

    killers: frozenset[object] = frozenset()
    deaths_seen: int = 0

    async def reach(self, worker: Worker) -> Worker:
        simulation = self

        def die_with(names: set[object]) -> None:
            if names & simulation.killers:
                simulation.deaths_seen += 1
                raise WorkerLost("worker 0 died")

        class Dying:
            def __getattr__(self, name: str) -> Any:
                return getattr(worker, name)

            async def run(self, jobs: Any) -> AsyncIterator[Any]:
                die_with({(str(job.group), number) for job in jobs for number in job.rollouts})
                async for reports in worker.run(jobs):  # type: ignore[attr-defined]
                    yield reports

            async def reward(self, partition: str, jobs: Any) -> AsyncIterator[Any]:
                die_with({key.rsplit("/", 2)[0] for job in jobs for key in job.keys})
                async for report in worker.reward(partition, jobs):  # type: ignore[attr-defined]
                    yield report

        return Dying() if isinstance(worker, AgentWorker | RewardWorker) else worker  # type: ignore[return-value]


def run(*killers: object, groups: int = 16) -> Deadly:
    schedule = Schedule(steps=2, sync_interval=1, sync_offset=0)
    return Deadly(schedule, groups=groups, killers=frozenset(killers)).run()  # type: ignore[return-value]


@pytest.mark.parametrize("killers", [[5], [0, 31]])
def test_a_rollout_that_kills_its_worker_fails_alone(killers: list[int]) -> None:
    """The first death may be an accident, so everything runs again; then halves find the culprit."""
    culprits = [(f"train/0/{number // 2}/0", number % 2) for number in killers]
    ended = run(*culprits)
    assert {f"{group}/{number}" for group, number in culprits} == set(ended.recorder.failed)
    assert all("worker 0 died" in reason for reason in ended.recorder.failed.values())
    assert [32, 32] == [len(batch) for batch, _ in ended.actor.updates]
    assert ended.deaths_seen <= 2 + 5 * len(killers)


def test_a_group_whose_scores_kill_their_worker_fails_alone() -> None:
    ended = run("train/0/3/0")
    assert {"train/0/3/0/0/0", "train/0/3/0/1/0"} == set(ended.recorder.failed)
    assert [32, 32] == [len(batch) for batch, _ in ended.actor.updates]
    assert ended.deaths_seen <= 2 + 4


def test_rollouts_that_all_kill_their_worker_end_soon() -> None:
    everything = {(f"train/0/{index}/0", number) for index in range(64) for number in range(2)}
    ended = run(*everything, groups=64)
    assert set(ended.recorder.failed) == {f"{group}/{number}" for group, number in everything}
    assert ended.deaths_seen <= 20


@attrs.define(eq=False, slots=False)
class Halfway(Simulation):
    """A run whose agent worker dies once, after it has reported the rollouts that ended first."""

    reported: set[int] = attrs.field(factory=set)  #: seeds of those

    async def reach(self, worker: Worker) -> Worker:
        simulation = self

        class Dying:
            def __getattr__(self, name: str) -> Any:
                return getattr(worker, name)

            async def run(self, jobs: Any) -> AsyncIterator[Any]:
                seeds = {(str(job.group), number): seed for job in jobs for number, seed in job.rollouts.items()}
                async for reports in worker.run(jobs):  # type: ignore[attr-defined]
                    yield reports
                    if len(jobs) == 16 and not simulation.reported:
                        simulation.reported = {seeds[report.group, report.rollout] for report in reports}
                        raise WorkerLost("worker 0 died")

        return Dying() if isinstance(worker, AgentWorker) else worker  # type: ignore[return-value]


def test_a_worker_that_dies_loses_no_rollout_that_it_has_reported() -> None:
    schedule = Schedule(steps=1, sync_interval=1, sync_offset=0)
    ended = Halfway(schedule, groups=16, rollout_seconds=lambda task, seed: 1.0 if seed % 2 else 30.0)
    ended.run()
    assert 0 < len(ended.reported) < 32
    assert all(seed % 2 for seed in ended.reported)
    runs = Counter(ended.seeds)
    assert {1} == {runs[seed] for seed in ended.reported}
    assert {2} == {count for seed, count in runs.items() if seed not in ended.reported}
    assert [32] == [len(batch) for batch, _ in ended.actor.updates]
