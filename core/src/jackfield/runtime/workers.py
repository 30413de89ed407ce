"""Interchangeable workers: the assignment of work to them, and retries after one dies."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import attrs
import xxhash

from jackfield.errors import JackfieldError, QueueError, WorkerLost

T = TypeVar("T")

ATTEMPTS = 3  #: how often work is tried in total, if workers die


@attrs.frozen
class Workers(Generic[T]):
    """Stateless workers or their stubs. Work on one subject always goes to the same worker."""

    _workers: Sequence[T]

    def of(self, subject: str) -> T:
        """Return the worker of a subject (a group or a rollout), which is always the same."""
        return self._workers[xxhash.xxh3_64_intdigest(subject.encode()) % len(self._workers)]


async def resubmitted(
    work: Callable[[], Awaitable[T]],
    what: str,
    may_repeat: Callable[[JackfieldError], bool] = lambda error: isinstance(error, WorkerLost),
) -> T:
    """Run work, and again from its beginning if it is lost: :data:`ATTEMPTS` times in all.

    Args:
        work: Starts the work, on another worker if it chooses one.
        what: Result of the work for messages, such as a sample with its key.
        may_repeat: Returns whether an error means that the work was lost. The default: a worker died.
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
    """Return whether an error says that samples were lost with a storage unit."""
    return isinstance(error, QueueError) and error.code == "queue.lost"


def lost_keys(error: JackfieldError) -> tuple[str, ...]:
    """Return the keys of the lost samples that an error names."""
    return tuple(map(str, error.found)) if is_lost(error) and isinstance(error.found, list | tuple) else ()
