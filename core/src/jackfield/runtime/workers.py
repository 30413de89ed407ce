"""Workers that are interchangeable: which of them does what, and what happens when one dies."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import attrs
import xxhash

from jackfield.errors import JackfieldError, QueueError, WorkerLost

T = TypeVar("T")

ATTEMPTS = 3  #: times that work is given to a worker, when workers die


@attrs.frozen
class Workers(Generic[T]):
    """Stateless workers, wherever they live. What belongs together goes to one of them, by a text that names it."""

    _workers: Sequence[T]

    def of(self, subject: str) -> T:
        """Return the worker of a subject (a group, a rollout): always the same one."""
        return self._workers[xxhash.xxh3_64_intdigest(subject.encode()) % len(self._workers)]


def _is_dead(error: JackfieldError) -> bool:
    return isinstance(error, WorkerLost)


async def resubmitted(
    work: Callable[[], Awaitable[T]], what: str, may_repeat: Callable[[JackfieldError], bool] = _is_dead
) -> T:
    """Do work that was lost once more, from its beginning, up to :data:`ATTEMPTS` times.

    Args:
        work: Work to do; with another worker, where it chooses one.
        what: What it makes, for messages: a sample, with its key.
        may_repeat: Whether an error says that the work was lost: with a worker that died.

    Raises:
        JackfieldError: The error of the last attempt, or one that says something else.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await work()
        except JackfieldError as error:
            if not may_repeat(error):
                raise
            logging.getLogger("jackfield").warning("%s; %s is made again", one_line(error), what)
    return await work()


def one_line(error: JackfieldError) -> str:
    """Describe an error in one line of a log."""
    return f"{error.message} ({error.where}): {error.found}"


def is_lost(error: JackfieldError) -> bool:
    """Return whether samples went with a part of the queue's store."""
    return isinstance(error, QueueError) and error.code == "queue.lost"


def lost_keys(error: JackfieldError) -> tuple[str, ...]:
    """Return the samples that such an error names."""
    return tuple(map(str, error.found)) if is_lost(error) and isinstance(error.found, list | tuple) else ()
