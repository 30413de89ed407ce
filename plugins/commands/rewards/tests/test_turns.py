"""Turns of several runs at one reward."""

from __future__ import annotations

import asyncio

from jackfield_rewards.turns import FairTurns
from jackfield_testing import in_loop


async def turns_of(turns: FairTurns, asked: list[tuple[str, int]], cancelled: tuple[int, ...] = ()) -> list[str]:
    """Have requests of (run, priority) wait while all turns are taken; return the order in which they get theirs."""
    order: list[str] = []

    async def take(run: str, priority: int) -> None:
        async with turns.turn(run, priority):
            order.append(f"{run}{priority}")
            await asyncio.sleep(0)

    async with turns.turn("first", 0):
        tasks = [asyncio.ensure_future(take(*each)) for each in asked]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    return order


@in_loop
async def test_runs_take_turns_and_the_oldest_batch_of_a_run_comes_first() -> None:
    """A run with many samples, or with batches of low numbers, does not hold back another one."""
    asked = [("a", 3), ("a", 1), ("a", 2), ("a", 4), ("b", 700), ("b", 600), ("c", 0)]
    turns = FairTurns(1)
    assert await turns_of(turns, asked) == ["a1", "b600", "c0", "a2", "b700", "a3", "a4"]
    assert (turns.in_progress, turns.waiting) == (0, {})


@in_loop
async def test_a_request_that_is_given_up_takes_no_turn() -> None:
    turns = FairTurns(1)
    assert await turns_of(turns, [("a", 1), ("a", 2), ("b", 1), ("b", 2)], cancelled=(0, 2, 3)) == ["a2"]
    assert (turns.in_progress, turns.waiting) == (0, {})


@in_loop
async def test_a_turn_that_is_given_up_when_it_is_granted_goes_to_the_next() -> None:
    turns, order = FairTurns(1), list[str]()

    async def take(run: str) -> None:
        async with turns.turn(run, 0):
            order.append(run)

    async with turns.turn("first", 0):
        tasks = [asyncio.ensure_future(take(run)) for run in ("a", "b")]
        await asyncio.sleep(0)
    tasks[0].cancel()  # its turn was granted, and it has not run since
    await asyncio.wait(tasks)
    assert (order, turns.in_progress, turns.waiting) == (["b"], 0, {})


@in_loop
async def test_no_more_than_so_many_at_a_time() -> None:
    turns, most = FairTurns(3), 0

    async def take(number: int) -> None:
        nonlocal most
        async with turns.turn(f"run {number % 2}", number):
            most = max(most, turns.in_progress)
            await asyncio.sleep(0)

    await asyncio.gather(*map(take, range(50)))
    assert (most, turns.in_progress) == (3, 0)
