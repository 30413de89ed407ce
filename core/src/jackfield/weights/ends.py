"""All ends of a transfer at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from jackfield.clock import Clock, too_late
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError

GRACE_SECONDS = 10.0  #: for a cancelled end to finish
_CAUSE_SECONDS = 1.0  #: to wait for the failure of the end that broke the transfer, if another end fails first


async def run_together(
    ends: Mapping[str, Coroutine[Any, Any, Any]], clock: Clock, seconds: float, what: str
) -> list[Any]:
    """Run all ends of a transfer by name; a failure or the deadline cancels the others.

    The ``WeightsError`` names the end that failed first, though the end that caused it may fail later;
    ``DeadlineExceeded`` names the unfinished ends.
    """
    failures: dict[str, BaseException] = {}  #: in order: the first is the cause, the others are consequences

    async def run(name: str, end: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await end
        except BaseException as error:
            if isinstance(error, WeightsError) and error.code == "weights.transfer":
                await clock.sleep(_CAUSE_SECONDS)
            failures[name] = error
            raise

    tasks, first = {asyncio.ensure_future(run(name, end)): name for name, end in ends.items()}, None
    try:
        _, late = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        first = next(iter(failures.items()), None)
    finally:
        for task in tasks:
            task.cancel()
        ended, deaf = await asyncio.wait(tasks, timeout=GRACE_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # a consequence, or the cause that is raised
    stuck = f" (and {', '.join(map(tasks.__getitem__, deaf))} cannot be cancelled)" if deaf else ""
    if first is None and late:
        names = ", ".join(name for task, name in tasks.items() if task in late)
        raise too_late(seconds, f"{what}; not finished: {names}{stuck}")
    if first is None:
        return [task.result() for task in tasks]
    name, error = first
    code = error.code if isinstance(error, WeightsError | DeadlineExceeded) else "weights.transfer"
    text = error.message if isinstance(error, JackfieldError) else repr(error)
    kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else WeightsError
    details = {key: getattr(error, key, None) for key in ("expected", "found", "fix")}
    message = f"{name} failed while {what} was synchronised: {text}{stuck}"
    raise kind(message, code=code, where=name, **details) from error
