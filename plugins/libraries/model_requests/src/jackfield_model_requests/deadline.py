"""Work on several rows of which what has ended at a deadline counts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WorkerLost

T = TypeVar("T")

_SHARE = 0.95  #: of the deadline of a request; the rest is left to cancel, and to answer


async def until_deadline(
    work: Mapping[str, Coroutine[Any, Any, T]], clock: Clock, seconds: float, who: str
) -> dict[str, T | Exception]:
    """Return by key what work has given, or the exception with which it failed; ``DeadlineExceeded`` if it is late.

    ``seconds`` is the deadline of the request that the work is of, of which a twentieth is left. ``who`` is waited for.
    ``WorkerLost`` is raised. A cancelled call cancels all work.
    """
    tasks, late = {key: asyncio.ensure_future(each) for key, each in work.items()}, None
    try:
        if tasks:
            await clock.wait_for(asyncio.wait(tasks.values()), _SHARE * seconds, who)
    except DeadlineExceeded as error:
        late = error
    finally:
        running = [task for task in tasks.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {key: _ended(task, late) for key, task in tasks.items()}


def _ended(task: asyncio.Task[T], late: DeadlineExceeded | None) -> T | Exception:
    if task.cancelled():
        return late or DeadlineExceeded("work was cancelled")
    error = task.exception()
    if isinstance(error, WorkerLost) or (error is not None and not isinstance(error, Exception)):
        raise error
    return task.result() if error is None else error
