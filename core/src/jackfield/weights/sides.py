"""The sides of a transfer, run to their end together: who failed first is the cause, and is named."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError

__all__ = ["GRACE_SECONDS", "cause_of", "run_all"]

GRACE_SECONDS = 10.0  #: for a cancelled side to end
_CAUSE_SECONDS = 1.0  #: after a transfer broke off, for the side that did it to say why


async def run_all(sides: Mapping[str, Coroutine[Any, Any, Any]], clock: Clock, seconds: float, what: str) -> list[Any]:
    """Run all sides to their end; when one fails or time runs out, end the others and say who it was."""
    tasks = {asyncio.ensure_future(side): name for name, side in sides.items()}
    ended: list[asyncio.Task[Any]] = []  # in order: what fails first is the cause, the rest are consequences
    for task in tasks:
        task.add_done_callback(ended.append)
    try:
        await clock.wait_for(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION), seconds, what)
    except DeadlineExceeded:
        late = [name for task, name in tasks.items() if not task.done()]
        stuck = await _cancel(tasks, clock)
        raise DeadlineExceeded(
            f"waited {seconds:.6g} s for {what}; not finished: {', '.join(late)}" + stuck,
            fix="look at why they did not answer, or raise the deadline of the sync",
        ) from None
    except BaseException:
        await _cancel(tasks, clock)
        raise
    failed = [task for task in ended if task.cancelled() or task.exception() is not None]
    if failed:
        cause = await cause_of(failed, ended, tasks, clock)
        stuck = await _cancel(tasks, clock)
        error = None if cause.cancelled() else cause.exception()
        raise _failure(tasks[cause], error, what, stuck) from error
    return [task.result() for task in tasks]


async def cause_of(
    failed: Sequence[asyncio.Task[Any]],
    ended: Sequence[asyncio.Task[Any]],
    tasks: Mapping[asyncio.Task[Any], str],
    clock: Clock,
) -> asyncio.Task[Any]:
    """The side that failed by itself. A peer may learn of a break before the side that broke it off has ended."""

    def broken_off(task: asyncio.Task[Any]) -> bool:
        error = None if task.cancelled() else task.exception()
        return isinstance(error, WeightsError) and error.code == "weights.transfer"

    running = [task for task in tasks if not task.done()]
    if running and all(map(broken_off, failed)):
        with suppress(DeadlineExceeded):
            await clock.wait_for(asyncio.wait(running), _CAUSE_SECONDS, "the side that broke off")
    late = [task for task in tasks if task.done() and task not in ended]  # so lately that no callback has run yet
    candidates = [task for task in (*ended, *late) if task.cancelled() or task.exception() is not None]
    return next((task for task in candidates if not broken_off(task)), candidates[0])


async def _cancel(tasks: Mapping[asyncio.Task[Any], str], clock: Clock) -> str:
    """End what still runs; names who does not end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        try:
            await clock.wait_for(asyncio.wait(running), GRACE_SECONDS, "cancelled sides")
        except DeadlineExceeded:
            return f" (and {', '.join(tasks[task] for task in running if not task.done())} cannot be cancelled)"
    for task in running:
        if not task.cancelled():
            task.exception()  # it is told below, if it came first; otherwise it is a consequence
    return ""


def _failure(name: str, error: BaseException | None, what: str, stuck: str) -> JackfieldError:
    code = error.code if isinstance(error, WeightsError | DeadlineExceeded) else "weights.transfer"
    text = "was cancelled" if error is None else error.message if isinstance(error, JackfieldError) else repr(error)
    kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else WeightsError
    details = {key: getattr(error, key, None) for key in ("expected", "found", "fix")}
    return kind(f"{name} failed while {what} was synchronised: {text}{stuck}", code=code, where=name, **details)
