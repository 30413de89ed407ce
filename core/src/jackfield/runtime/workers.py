"""The agent and reward workers, the assignment of work to them, and retries after one dies.

The controller sees only keys, tags, sizes, statuses and errors. Tokens and rewards stay in the workers and the
queue's backend.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar, cast

import attrs

from jackfield.clock import Clock
from jackfield.errors import (
    JackfieldError,
    QueueError,
    WorkerLost,
)

S = TypeVar("S")
T = TypeVar("T")

ATTEMPTS = 3  #: how often work is tried in total, if workers die
_LIST = 512  #: size at which a list of results is reported


@attrs.frozen
class Workers(Generic[T]):
    """Stateless workers or their stubs. Work on one group always goes to the same worker."""

    _workers: Sequence[T]

    def of(self, index: int) -> T:
        """Return the worker of the groups with an index."""
        return self._workers[index % len(self._workers)]

    @property
    def all(self) -> Sequence[T]:
        """Return all workers, by number."""
        return self._workers

    def shares(self, work: Iterable[S], index: Callable[[S], int]) -> list[tuple[T, list[S]]]:
        """Return each worker's share of work on groups, of which ``index`` returns the index."""
        if len(self._workers) == 1:
            return [(self._workers[0], mine)] if (mine := list(work)) else []
        shares: dict[int, list[S]] = {}
        for each in work:
            shares.setdefault(index(each) % len(self._workers), []).append(each)
        return [(self._workers[number], share) for number, share in shares.items()]


def list_seconds(elapsed: float, share: float = 0.1) -> float:
    """Return how long the first result of a list waits for others, ``elapsed`` seconds after the beginning.

    The wait is a share of the age of the work, up to 2 s, so that stragglers of a long rollout share few lists.
    """
    return min(share * max(0.5, elapsed), 2.0)


async def together(
    work: Iterable[tuple[S, Coroutine[Any, Any, T]]],
    seconds: float | None = None,
    share: float = 0.1,
    every: float | None = None,
) -> AsyncIterator[list[tuple[S, asyncio.Task[T]]]]:
    """Run named work concurrently, and yield it in lists as it ends: what ends soon after the first one, up to a size.

    ``share`` is that of :func:`list_seconds`. What is still running after ``seconds``, or at the end, is cancelled. If
    nothing has ended ``every`` so many seconds, yield an empty list.
    """
    loop, ended, news = asyncio.get_running_loop(), list[asyncio.Task[T]](), asyncio.Event()
    began = loop.time()
    tasks = {loop.create_task(each): name for name, each in work}
    left = len(tasks)

    def note(task: asyncio.Task[T]) -> None:
        ended.append(task)
        if not task.cancelled():
            task.exception()  # or asyncio would log those that are not raised
        if len(ended) >= min(_LIST, left):
            news.set()
        elif len(ended) == 1:
            loop.call_later(list_seconds(loop.time() - began, share), news.set)

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    for task in tasks:
        task.add_done_callback(note)
    timer = None if seconds is None else loop.call_later(seconds, cancel)
    try:
        while left:
            tick = None if every is None else loop.call_later(every, news.set)
            await news.wait()
            if tick is not None:
                tick.cancel()
            news.clear()
            found, ended[:] = ended[:_LIST], ended[_LIST:]
            left -= len(found)
            if ended:
                news.set()
            if found or every is not None:
                yield [(tasks.pop(task), task) for task in found]
    finally:
        if timer is not None:
            timer.cancel()
        cancel()


async def handle_each(
    clock: Clock,
    items: AsyncIterator[T],
    seconds: float,
    missing: Callable[[], str],
    handle: Callable[[T], Awaitable[object]],
    *,
    each: bool = False,
) -> None:
    """Handle the items of an iteration, ``seconds`` in all or for ``each``; ``missing`` names what has not come."""
    until = clock.time() + seconds
    async with aclosing(cast(AsyncGenerator[T, None], items)):
        while (item := await clock.wait_for(anext(items, None), until - clock.time(), missing())) is not None:
            await handle(item)
            until = clock.time() + seconds if each else until


async def resubmitted(
    work: Callable[[], Awaitable[T]],
    what: str,
    may_repeat: Callable[[JackfieldError], bool] = lambda error: isinstance(error, WorkerLost),
) -> T:
    """Run work, and again from its beginning if ``may_repeat`` says that an error lost it: three times in all.

    By default a worker's death is such an error. ``what`` says for messages what is done: "a sample is read".
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await work()
        except JackfieldError as error:
            if not may_repeat(error):
                raise
            logging.getLogger("jackfield").warning("%s; %s again", one_line(error), what)
    return await work()


def one_line(error: JackfieldError, *, located: bool = True) -> str:
    """Describe an error in one line. Without its location, equal failures have equal texts."""
    where = f" ({error.where})" if located else ""
    found = "" if error.found is None else f", found {error.found}"
    return f"{error.message}{where}{found} [{error.code}]"


def is_lost(error: JackfieldError) -> bool:
    """Return whether an error says that samples were lost with a storage unit."""
    return isinstance(error, QueueError) and error.code == "queue.lost"
