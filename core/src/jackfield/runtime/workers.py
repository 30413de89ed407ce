"""Workers that are interchangeable: which of them does what, and what happens when one dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import xxhash

from jackfield.errors import WorkerLost

__all__ = ["ATTEMPTS", "Workers", "resubmitted"]

T = TypeVar("T")

ATTEMPTS = 3  #: times that work is given to a worker, when workers die


class Workers(Generic[T]):
    """Stateless workers, wherever they live. What belongs together goes to one of them, by a text that names it."""

    def __init__(self, workers: Sequence[T]) -> None:
        self._workers = list(workers)

    def of(self, subject: str) -> T:
        """The worker for a subject (a group, a run): always the same one."""
        return self._workers[xxhash.xxh3_64_intdigest(subject.encode()) % len(self._workers)]


async def resubmitted(work: Callable[[], Awaitable[T]], give_up: Callable[[WorkerLost], T] | None = None) -> T:
    """Do work that a dead worker has lost once more, with the worker that was started in its place.

    Args:
        work: from its beginning.
        give_up: what comes of it when that does not help; None: the error.

    Raises:
        WorkerLost: of the last attempt, without ``give_up``.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(WorkerLost):
            return await work()
    try:
        return await work()
    except WorkerLost as error:
        if give_up is None:
            raise
        return give_up(error)
