"""Coroutine functions: many calls in flight in one process, each with its own deadline."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import threading
from pathlib import Path

import pytest

from jackfield.clock import Clock
from jackfield_pools import alive, pool
from jackfield_user_code import UserCodePool, WorkerResult

USER_CODE = """
import asyncio, os

here = most = 0
everyone = asyncio.Event()
cancelled = []

async def meet(total):
    global here, most
    here += 1
    most = max(most, here)
    if here == total:
        everyone.set()
    await everyone.wait()
    return os.getpid()

async def turn(last=False):
    global here, most
    here += 1
    most = max(most, here)
    for _ in range(20):
        await asyncio.sleep(0)
    here -= 1
    return most

async def act(deed, value=0):
    if deed == "tell":
        return [os.getpid(), cancelled]
    try:
        return await globals()[deed](value)
    except asyncio.CancelledError:
        cancelled.append(value)
        raise

async def answer(value):
    await asyncio.sleep(0)
    return value

async def wait(value):
    await asyncio.Event().wait()

async def release(value):
    everyone.set()

async def released(value):
    await everyone.wait()
    return value

async def later(value):
    await asyncio.sleep(0.7)
    return value

async def block(value):
    await asyncio.sleep(0)
    while True:
        pass

async def end(value):
    await asyncio.sleep(0)
    os._exit(3)

async def segfault(value):
    os.kill(os.getpid(), 11)

async def leave(value):
    raise SystemExit(4)

async def fork(value):
    await asyncio.sleep(0)
    return value if os.fork() else -1

async def cancel_itself(value):
    raise asyncio.CancelledError("by itself")

async def deaf(value):
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def end_unseen(value):
    asyncio.get_running_loop().call_soon(os._exit, 5)
    await asyncio.Event().wait()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "many.py"
    path.write_text(USER_CODE)
    return path


def statuses(results: list[WorkerResult]) -> list[tuple[str, object]]:
    return [(each.status, each.value) for each in results]


def test_thousands_of_calls_are_in_flight_in_one_process(file: Path) -> None:
    """Each call ends only when all of them have begun."""

    async def main() -> None:
        async with pool(file, "meet") as many:
            results = await asyncio.gather(*(many.call({"total": 10_000}, 60) for _ in range(10_000)))
            assert {("ok", many.pids[0])} == set(statuses(results))  # type: ignore[arg-type]
            assert 10_000 == many.capacity

    asyncio.run(main())


def test_no_more_are_in_flight_than_the_setting_says(file: Path) -> None:
    async def main() -> None:
        async with pool(file, "turn", in_flight=7) as few:
            results = await asyncio.gather(*(few.call({}, 60) for _ in range(50)))
            assert 7 == max(each.value for each in results)
        async with pool(file, "meet", in_flight=8, workers=2) as two:
            results = await asyncio.gather(*(two.call({"total": 8}, 60) for _ in range(16)))
            assert set(two.pids) == {each.value for each in results}
            assert (2, 16) == (len(two.pids), two.capacity)

    asyncio.run(main())


def test_each_call_has_its_own_deadline_and_is_cancelled_alone(file: Path) -> None:
    async def main() -> None:
        async with pool(file, "act") as many:
            [first, _] = (await many.call({"deed": "tell"}, 30)).value
            others = [asyncio.create_task(many.call({"deed": "released", "value": n}, 60)) for n in range(20)]
            leaving = asyncio.create_task(many.call({"deed": "wait", "value": "left"}, 60))
            late = await many.call({"deed": "wait", "value": "late"}, 0.2, name="sample 7")
            assert "timeout" == late.status
            assert "many.py:act to answer for sample 7" in str(late.error)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert [first, ["late", "left"]] == (await many.call({"deed": "tell"}, 30)).value
            assert not any(each.done() for each in others)
            await many.call({"deed": "release"}, 30)
            assert [("ok", n) for n in range(20)] == statuses(await asyncio.gather(*others))

    asyncio.run(main())


def test_who_blocks_the_event_loop_runs_out_of_time_and_the_others_are_made_again(file: Path) -> None:
    async def main() -> None:
        async with pool(file, "act") as many:
            await many.start()
            [first] = many.pids
            deeds = ["later", "block", "later", "later"]
            calls = [many.call({"deed": deed, "value": n}, 0.9) for n, deed in enumerate(deeds)]
            results = await asyncio.gather(*calls)
            assert [("ok", 0), ("timeout", None), ("ok", 2), ("ok", 3)] == statuses(results)
            assert "it blocked the event loop" in str(results[1].error)
            assert first not in many.pids
            assert not alive(first)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("deed", "status", "words"),
    [
        ("end", "died", "exit status 3"),
        ("segfault", "died", "SIGSEGV"),
        ("leave", "failed", "SystemExit: 4"),
        ("cancel_itself", "failed", "CancelledError: by itself"),
        ("missing", "failed", "KeyError: 'missing'"),
    ],
)
def test_a_call_that_fails_costs_itself(file: Path, deed: str, status: str, words: str) -> None:
    """Also if it takes the process with it: calls that it takes along are made again."""

    async def main() -> None:
        async with pool(file, "act") as many:
            deeds = ["later", deed, "later", deed, "answer"]
            results = await asyncio.gather(*(many.call({"deed": each, "value": n}, 30) for n, each in enumerate(deeds)))
            assert [("ok", 0), (status, None), ("ok", 2), (status, None), ("ok", 4)] == statuses(results)
            assert words in str(results[1].error)

    asyncio.run(main())


def test_a_call_that_is_made_again_gets_the_arguments_of_its_next_attempt(file: Path) -> None:
    """They are asked for once for each attempt after the first one."""

    async def main() -> None:
        asked: list[int] = []

        async def again() -> dict[str, object]:
            asked.append(1)
            return {"deed": "answer", "value": 7}

        async with pool(file, "act") as many:
            waiting = asyncio.create_task(many.call({"deed": "wait"}, 30, again=again))
            ended = await many.call({"deed": "end"}, 30)
            assert ("died", "ok", 7) == (ended.status, (await waiting).status, (await waiting).value)
            assert ("ok", 1) == ((await many.call({"deed": "answer", "value": 1}, 30, again=again)).status, len(asked))

    asyncio.run(main())


def test_calls_of_a_process_that_dies_for_an_unknown_reason_are_made_again_once(file: Path) -> None:
    async def main() -> None:
        async with pool(file, "act") as many:
            waiting = asyncio.create_task(many.call({"deed": "released", "value": 1}, 30))
            unseen = await many.call({"deed": "end_unseen"}, 30)
            assert "died" == unseen.status
            assert "exit status 5" in str(unseen.error)
            assert "died" == (await waiting).status, "it was there when both processes died"
            waiting = asyncio.create_task(many.call({"deed": "released", "value": 1}, 30))
            [pid, _] = (await many.call({"deed": "tell"}, 30)).value
            os.kill(pid, signal.SIGKILL)
            await many.call({"deed": "answer"}, 30)
            await many.call({"deed": "release"}, 30)
            assert ("ok", 1) == ((await waiting).status, (await waiting).value)

    asyncio.run(main())


def test_large_arguments_and_results_pass(file: Path) -> None:
    """Larger than the buffers of a socket, behind and before others."""

    async def main() -> None:
        async with pool(file, "act") as many:
            values = [0, "x" * 3_000_000, 1, "y" * 3_000_000, 2]
            results = await asyncio.gather(*(many.call({"deed": "answer", "value": each}, 60) for each in values))
            assert [("ok", each) for each in values] == statuses(results)

    asyncio.run(main())


def test_a_fork_in_a_coroutine_answers_nothing(file: Path) -> None:
    async def main() -> None:
        async with pool(file, "act") as many:
            results = await asyncio.gather(*(many.call({"deed": "fork", "value": n}, 30) for n in range(10)))
            assert [("ok", n) for n in range(10)] == statuses(results)

    asyncio.run(main())


def test_a_call_that_does_not_end_when_cancelled_loses_its_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield_user_code.workers._END_SECONDS", 0.2)

    async def main() -> None:
        async with pool(file, "act") as many:
            [first, _] = (await many.call({"deed": "tell"}, 30)).value
            other = asyncio.create_task(many.call({"deed": "later", "value": 1}, 30))
            assert "timeout" == (await many.call({"deed": "deaf"}, 0.1)).status
            result = await other
            assert ("ok", 1) == (result.status, result.value)
            assert first not in many.pids

    asyncio.run(main())


def test_a_pool_that_is_closed_fails_what_is_in_flight(file: Path) -> None:
    async def main() -> None:
        many = UserCodePool(f"{file}:act")
        await many.start()
        call = asyncio.create_task(many.call({"deed": "wait"}, 60))
        await many.call({"deed": "answer"}, 60)
        await many.close()
        assert "died" == (await call).status
        assert ("ok", 2) == (lambda it: (it.status, it.value))(await many.call({"deed": "answer", "value": 2}, 60))
        await many.close()

    asyncio.run(main())


def test_a_call_costs_little_however_many_are_in_flight(file: Path) -> None:
    """A call among 5,000 costs no more than one among 200; what the machine has to do besides, both have to bear."""

    async def main() -> None:
        async with pool(file, "act") as many:
            await many.start()

            async def per_call(count: int) -> float:
                began = Clock().time()
                await asyncio.gather(*(many.call({"deed": "answer", "value": n}, 60) for n in range(count)))
                return (Clock().time() - began) / count

            gc.collect()
            few, many_calls = [min([await per_call(count) for _ in range(3)]) for count in (200, 5000)]
            assert 4 * few > many_calls

    asyncio.run(main())


def test_a_caller_that_was_busy_does_not_take_its_process_for_blocked(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own event loop stood still while the process saw the cancellation."""
    monkeypatch.setattr("jackfield_user_code.workers._HEED_SECONDS", 0.05)

    async def main() -> None:
        async with pool(file, "act") as many:
            [first, _] = (await many.call({"deed": "tell"}, 30)).value
            call = asyncio.create_task(many.call({"deed": "wait", "value": 1}, 2.0))
            await many.call({"deed": "tell"}, 30)  # the one before it waits now
            process = many._slots[0].process
            assert process is not None
            while not process.heeded:
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # the cancellation is sent
            assert select.select([process._link._socket], [], [], 30)[0]  # the process has seen it
            threading.Event().wait(0.1)
            assert "timeout" == (await call).status
            assert [first, [1]] == (await many.call({"deed": "tell"}, 30)).value

    asyncio.run(main())
