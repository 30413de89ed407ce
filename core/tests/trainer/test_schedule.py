"""Exhaustive tests of the staleness bound, and of waits on virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from jackfield.errors import DeadlineExceeded, RunError
from jackfield.trainer.role import Progress, Schedule
from jackfield.trainer.steps import further_groups
from jackfield_virtual_clock import VirtualClock


@pytest.mark.parametrize(("k", "o"), list(itertools.product((1, 2, 3, 5), (0, 1, 2))))
def test_every_batch_can_start_and_none_is_staler_than_the_bound(k: int, o: int) -> None:
    """An explorer that starts each batch as early as allowed meets the bound exactly and never starves."""
    schedule = Schedule(steps=40, sync_interval=k, sync_offset=o)
    version, started, staleness = 0, {}, []
    for step in range(schedule.steps):
        for batch in range(len(started), schedule.steps):
            if not schedule.may_start(batch, version):
                break
            started[batch] = version
        assert step in started, "the trainer would wait for a batch that may not start"
        staleness.append(schedule.check(step, started[step]))
        if schedule.syncs_after(step):
            version = step + 1
    assert k - 1 + o == max(staleness)
    assert k - 1 + o == schedule.staleness_bound


def test_a_batch_beyond_the_bound_is_refused() -> None:
    schedule = Schedule(steps=10, sync_interval=2, sync_offset=1)
    assert 2 == schedule.check(5, 3)
    with pytest.raises(RunError) as caught:
        schedule.check(5, 2)
    assert "schedule.staleness" == caught.value.code


def test_progress_wakes_waiters_and_names_them_at_the_deadline() -> None:
    clock = VirtualClock()

    async def main() -> tuple[int, str, float]:
        progress = Progress(clock)

        async def later() -> None:
            await clock.sleep(5)
            await progress.advance(3)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(later())
            reached = await progress.until(lambda value: value >= 2, 10, "the trainer")
        with pytest.raises(DeadlineExceeded) as caught:
            await progress.until(lambda value: value >= 4, 10, "the trainer")
        return reached, str(caught.value), clock.time()

    reached, message, now = clock.run(main())
    assert 3 == reached
    assert "the trainer" in message
    assert 15 == pytest.approx(now)


@pytest.mark.parametrize(
    ("every", "k", "expected"),
    [(1, 1, [1, 2, 3, 4, 5, 6]), (2, 1, [2, 4, 6]), (3, 2, [4, 6]), (1, 3, [3, 6]), (5, 2, [6]), (0, 1, [])],
)
def test_what_happens_every_so_many_steps_waits_for_the_next_synchronisation(
    every: int, k: int, expected: list[int]
) -> None:
    schedule = Schedule(steps=6, sync_interval=k)
    assert expected == [done for done in range(7) if schedule.is_due(every, done)]


@pytest.mark.parametrize(("ratio", "own", "expected"), [(0.5, 2, [1] * 8), (0.25, 2, [0, 1] * 4), (1.5, 1, [1, 2] * 4)])
def test_a_ratio_holds_over_the_steps(ratio: float, own: int, expected: list[int]) -> None:
    assert expected == [further_groups(ratio, step, own) for step in range(8)]
