"""Tests of the device lease on virtual time: one role at a time, in order, with hand-overs."""

from __future__ import annotations

import asyncio

import pytest

from jackfield.cluster.pool import DeviceLease
from jackfield.errors import DeadlineExceeded
from jackfield.simulation import VirtualClock


def test_roles_take_turns_and_hand_over_once() -> None:
    clock = VirtualClock()
    log: list[str] = []

    async def hand_over(before: str | None, role: str) -> None:
        log.append(f"{before} to {role}")

    async def work(lease: DeviceLease, role: str, name: str, seconds: float) -> None:
        async with lease.hold(role):
            log.append(f"{name}+")
            await clock.sleep(seconds)
            log.append(f"{name}-")

    async def main() -> None:
        lease = DeviceLease(clock, 100, hand_over)
        await asyncio.gather(
            work(lease, "rollout", "a", 3),
            work(lease, "rollout", "b", 5),
            work(lease, "train", "c", 2),
            work(lease, "rollout", "d", 1),
        )

    clock.run(main())
    rollouts = ["None to rollout", "a+", "b+", "a-", "b-"]
    assert [*rollouts, "rollout to train", "c+", "c-", "train to rollout", "d+", "d-"] == log


def test_a_wait_ends_at_its_deadline_and_names_the_holder() -> None:
    clock = VirtualClock()

    async def main() -> str:
        lease = DeviceLease(clock, 10)
        async with lease.hold("rollout"):
            with pytest.raises(DeadlineExceeded) as caught:
                async with lease.hold("train"):
                    pass
        async with lease.hold("train"):  # the failed request has left no trace
            return str(caught.value)

    message = clock.run(main())
    assert "for train, while rollout holds them" in message


def test_a_cancelled_wait_lets_the_next_in() -> None:
    clock = VirtualClock()

    async def main() -> list[str]:
        lease, log = DeviceLease(clock, 100), []

        async def hold(role: str) -> None:
            async with lease.hold(role):
                log.append(role)

        async with lease.hold("rollout"):
            waiting = asyncio.ensure_future(hold("train"))
            await asyncio.sleep(0)
            behind = asyncio.ensure_future(hold("rollout"))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await behind  # joins the current holder now
        assert waiting.cancelled()
        return log

    assert ["rollout"] == clock.run(main())


def test_whoever_is_waited_for_by_a_holder_comes_in_before_others() -> None:
    clock = VirtualClock()
    log: list[str] = []

    async def main() -> None:
        lease = DeviceLease(clock, 100)
        joined = asyncio.Event()

        async def train() -> None:
            async with lease.hold("train"):
                log.append("train")

        async def join() -> None:
            async with lease.hold("rollout", joins=True):
                log.append("joined")
                joined.set()

        async with lease.hold("rollout"):
            training = asyncio.create_task(train())
            await clock.sleep(1.0)
            joining = asyncio.create_task(join())
            await joined.wait()
        await asyncio.gather(training, joining)
        async with lease.hold("train"):  # for another role, it waits for its turn like any request
            joining = asyncio.create_task(join())
            await clock.sleep(1.0)
            log.append("trained")
        await joining

    clock.run(main())
    assert ["joined", "train", "trained", "joined"] == log
