"""The ends of a transfer, run together: the error names the end that failed first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError

GRACE_SECONDS = 10.0  #: for a cancelled end to finish
_CAUSE_SECONDS = 1.0  #: after a transfer broke off, for the end that broke it off to fail

Task = asyncio.Task[Any]


async def run_together(
    ends: Mapping[str, Coroutine[Any, Any, Any]], clock: Clock, seconds: float, what: str
) -> list[Any]:
    """Run all ends, by name, and return their results. A failure or the deadline cancels the others.

    Raises:
        WeightsError: names the end that failed first.
        DeadlineExceeded: names the ends that have not finished.
    """
    tasks = {asyncio.ensure_future(end): name for name, end in ends.items()}
    ended: list[Task] = []  # in order: the first failure is the cause, the others are consequences
    for task in tasks:
        task.add_done_callback(ended.append)
    try:
        await clock.wait_for(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION), seconds, what)
    except DeadlineExceeded:
        late = ", ".join(name for task, name in tasks.items() if not task.done())
        message = f"waited {seconds:.6g} s for {what}; not finished: {late}{await _cancel(tasks, clock)}"
        fix = "look at why they did not answer, or raise the deadline of the sync"
        raise DeadlineExceeded(message, fix=fix) from None
    except BaseException:
        await _cancel(tasks, clock)
        raise
    failed = [task for task in ended if _failed(task)]
    if not failed:
        return [task.result() for task in tasks]
    cause = await cause_of(failed, ended, tasks, clock)
    stuck = await _cancel(tasks, clock)
    error = None if cause.cancelled() else cause.exception()
    raise _failure(tasks[cause], error, what, stuck) from error


def _failed(task: Task) -> bool:
    return task.cancelled() or task.exception() is not None


async def cause_of(failed: Sequence[Task], ended: Sequence[Task], tasks: Mapping[Task, str], clock: Clock) -> Task:
    """Return the end that failed by itself. A peer may notice a break before the end that broke it off has failed."""

    def broken_off(task: Task) -> bool:
        error = None if task.cancelled() else task.exception()
        return isinstance(error, WeightsError) and error.code == "weights.transfer"

    running = [task for task in tasks if not task.done()]
    if running and all(map(broken_off, failed)):
        with suppress(DeadlineExceeded):
            await clock.wait_for(asyncio.wait(running), _CAUSE_SECONDS, "the end that broke off")
    late = [task for task in tasks if task.done() and task not in ended]  # so lately that no callback has run yet
    candidates = [task for task in (*ended, *late) if _failed(task)]
    return next((task for task in candidates if not broken_off(task)), candidates[0])


async def _cancel(tasks: Mapping[Task, str], clock: Clock) -> str:
    """Cancel the ends that still run, and name those that ignore it."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        with suppress(DeadlineExceeded):
            await clock.wait_for(asyncio.wait(running), GRACE_SECONDS, "cancelled ends")
    stuck = ", ".join(tasks[task] for task in running if not task.done())
    for task in running:
        if task.done() and not task.cancelled():
            task.exception()  # a consequence, or the cause that is raised
    return f" (and {stuck} cannot be cancelled)" if stuck else ""


def _failure(name: str, error: BaseException | None, what: str, stuck: str) -> JackfieldError:
    code = error.code if isinstance(error, WeightsError | DeadlineExceeded) else "weights.transfer"
    text = "was cancelled" if error is None else error.message if isinstance(error, JackfieldError) else repr(error)
    kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else WeightsError
    details = {key: getattr(error, key, None) for key in ("expected", "found", "fix")}
    return kind(f"{name} failed while {what} was synchronised: {text}{stuck}", code=code, where=name, **details)
