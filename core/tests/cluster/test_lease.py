"""Tests of the device lease on virtual time: one role at a time, in order, with hand-overs."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.cluster.pool import DeviceLease
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock


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


class Device:
    """A device on which rollouts get on only while replicas run, and which takes a second for each hand-over."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.lease = DeviceLease(self.clock, 1000.0, self.hand_over)
        self.log: list[str] = []
        self.runs, self.training = asyncio.Event(), 0

    async def hand_over(self, before: str | None, role: str) -> None:
        assert not self.training, "a role gets the devices while the other one uses them"
        self.runs.clear()
        await self.clock.sleep(1.0)
        self.log.append(f"{before} to {role}")
        if role == "rollout":
            self.runs.set()

    async def roll_out(self, name: str, seconds: int, *, steps_aside: bool = True, joins: bool = False) -> None:
        async with self.lease.hold("rollout", steps_aside=steps_aside, joins=joins):
            self.log.append(f"{name}+")
            left = seconds
            while left:
                assert steps_aside or self.runs.is_set(), "one that does not step aside is interrupted"
                await self.runs.wait()
                await self.clock.sleep(1.0)
                left -= self.runs.is_set()
            self.log.append(f"{name}-")

    async def train(self, name: str, seconds: int, error: BaseException | None = None) -> float:
        """Return for how long it waited."""
        asked = self.clock.time()
        async with self.lease.hold("train"):
            waited = self.clock.time() - asked
            assert not self.runs.is_set(), "replicas run while the engine trains"
            self.training += 1
            self.log.append(f"{name}+")
            try:
                await self.clock.sleep(seconds)
                if error is not None:
                    raise error
            finally:
                self.training -= 1
                self.log.append(f"{name}-")
        return waited


def test_training_interrupts_those_that_step_aside_and_they_go_on_after_it() -> None:
    device = Device()

    async def main() -> float:
        rolling = [asyncio.create_task(device.roll_out(name, 50)) for name in "ab"]
        await device.clock.sleep(10.5)
        waited = await device.train("t", 5)
        assert device.runs.is_set(), "training ends with the devices handed back"
        assert not any(task.done() for task in rolling)
        await asyncio.gather(*rolling)
        assert 1.0 == await device.train("u", 5)
        assert not device.runs.is_set(), "there is no rollout to hand the devices back to"
        return waited

    assert 1.0 == device.clock.run(main())
    turn = ["rollout to train", "t+", "t-", "train to rollout"]
    assert (["None to rollout", "a+", "b+", *turn], ["a-", "b-"]) == (device.log[:7], sorted(device.log[7:9]))


def test_training_that_asks_while_rollouts_get_the_devices_waits_for_the_hand_overs_alone() -> None:
    device = Device()

    async def main() -> float:
        rolling = asyncio.create_task(device.roll_out("a", 50))
        await device.clock.sleep(0.5)
        waited = await device.train("t", 5)
        await rolling
        return waited

    assert 1.5 == device.clock.run(main())


LOST = QueueError("samples were lost", code="queue.lost")


@pytest.mark.parametrize("error", [LOST, ValueError(), asyncio.CancelledError()], ids=lambda each: type(each).__name__)
def test_training_that_fails_gives_the_devices_back_unless_the_run_ends(error: BaseException) -> None:
    """Lost samples are generated again; any other error is raised without a wait for a hand-over."""
    device = Device()

    async def main() -> bool:
        rolling = asyncio.create_task(device.roll_out("a", 20))
        await device.clock.sleep(5.5)
        with pytest.raises(type(error)):
            await device.train("t", 5, error)
        given_back = device.runs.is_set()
        rolling.cancel()
        return given_back

    assert (error is LOST) == device.clock.run(main())


def test_training_waits_for_those_that_do_not_step_aside_and_names_them() -> None:
    device = Device()
    device.lease = DeviceLease(device.clock, 10.0, device.hand_over)

    async def main() -> None:
        rolling = asyncio.gather(device.roll_out("a", 90), device.roll_out("b", 30, steps_aside=False))
        await device.clock.sleep(5.5)
        with refused("deadline", "for train, while rollout holds them"):
            await device.train("early", 5)
        await device.clock.sleep(10.0)
        assert await device.train("late", 5) > 1.0
        await rolling

    device.clock.run(main())
    assert device.log.index("b-") < device.log.index("late+") < device.log.index("a-")


def test_a_hand_over_that_takes_too_long_is_named() -> None:
    clock = VirtualClock()

    async def never(before: str | None, role: str) -> None:
        if role == "train":
            await asyncio.Event().wait()

    async def main() -> None:
        lease = DeviceLease(clock, 10.0, never)
        async with lease.hold("rollout", steps_aside=True):
            with refused("deadline", "the hand-over of devices from rollout to train"):
                async with lease.hold("train"):
                    pass

    clock.run(main())


PHASES = st.lists(
    st.tuples(
        st.integers(0, 40),  # when it asks
        st.sampled_from(["aside", "aside", "firm", "joins", "train", "train", "fails"]),
        st.integers(1, 12),  # for how long it uses the devices
        st.sampled_from([None, None, None, 3, 9]),  # when it is cancelled after that
    ),
    min_size=1,
    max_size=12,
)


@given(PHASES)
@settings(max_examples=300, deadline=None)
def test_nothing_waits_for_ever_whatever_asks_for_the_devices(phases: list[tuple[int, str, int, int | None]]) -> None:
    """Replicas never run while the engine trains, and at the end they run if a rollout is left."""
    device = Device()

    async def phase(name: str, asks: int, kind: str, seconds: int, ends: int | None) -> None:
        await device.clock.sleep(asks + 0.25)
        if kind in ("train", "fails"):
            working = asyncio.ensure_future(device.train(name, seconds, LOST if kind == "fails" else None))
        else:
            how = {"steps_aside": kind == "aside", "joins": kind == "joins"}
            working = asyncio.ensure_future(device.roll_out(name, seconds, **how))
        if ends is not None and kind == "aside":
            asyncio.get_running_loop().call_later(ends, working.cancel)
        (found,) = await asyncio.gather(working, return_exceptions=True)
        assert found is None or isinstance(found, float | QueueError | asyncio.CancelledError), found

    async def main() -> float:
        left = asyncio.create_task(device.roll_out("left", 10_000))
        await asyncio.gather(*(phase(f"{number}", *each) for number, each in enumerate(phases)))
        assert device.runs.is_set()
        assert not left.done()
        left.cancel()
        return device.clock.time()

    used = sum(seconds + 4 for _, _, seconds, _ in phases)  # with the hand-overs to and fro, and a second that was lost
    assert device.clock.run(main()) <= 50 + 2 * used
