"""Every wait has a deadline, which names who was waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from jackfield.clock import Clock
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

Wrap = Callable[["asyncio.Future[int]"], Awaitable[int]]


async def inner(future: asyncio.Future[int]) -> int:
    return await future


#: Futures have a shorter way of their own.
WAYS = [
    pytest.param(lambda future: future, id="future"),
    pytest.param(inner, id="coroutine"),
    pytest.param(lambda future: asyncio.ensure_future(inner(future)), id="task"),
]


@pytest.mark.parametrize("wrap", WAYS)
@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_the_deadline_names_who_was_waited_for(wrap: Wrap, seconds: float) -> None:
    async def main() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with refused("deadline", "the other one") as caught:
            await clock.wait_for(wrap(future), seconds, "the other one")
        assert caught.value.fix is not None
        assert future.cancelled()
        assert clock.time() == seconds

    clock = VirtualClock()
    clock.run(main())


@pytest.mark.parametrize("wrap", WAYS)
def test_what_comes_in_time_comes_through(wrap: Wrap) -> None:
    """A result, also one that is there already; an error; and a timeout that is not this one."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for error in (None, ValueError("wrong"), TimeoutError("of its own")):
            for later in (False, True):
                future: asyncio.Future[int] = loop.create_future()
                end = partial(future.set_result, 7) if error is None else partial(future.set_exception, error)
                loop.call_later(5 * later, end)
                if not later:
                    await asyncio.sleep(0)
                waiting = clock.wait_for(wrap(future), 10, "it")
                if error is None:
                    assert 7 == await waiting
                else:
                    with pytest.raises(type(error), match=str(error)):
                        await waiting

    clock = VirtualClock()
    clock.run(main())


@pytest.mark.parametrize("wrap", WAYS)
def test_who_is_cancelled_while_waiting_is_cancelled(wrap: Wrap) -> None:
    """Also in the moment of the deadline."""

    async def main() -> None:
        for after in (1.0, 10.0):
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            waiting = asyncio.ensure_future(clock.wait_for(wrap(future), 10, "it"))
            await clock.sleep(after)
            waiting.cancel("by somebody")
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert future.cancelled()

    clock = VirtualClock()
    clock.run(main())


def test_a_future_that_somebody_else_cancels_is_no_deadline() -> None:
    async def main() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.cancel, "by its owner")
        with pytest.raises(asyncio.CancelledError, match="by its owner"):
            await Clock().wait_for(future, 10, "it")

    asyncio.run(main())
