"""The names of the samples that an engine computes, for its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_names: ContextVar[Sequence[str]] = ContextVar("jackfield_sample_names", default=())


@contextmanager
def naming_samples(names: Sequence[str]) -> Iterator[None]:
    """Set the names of a batch's rows inside the block, in this context and the threads that it starts."""
    token = _names.set(names)
    try:
        yield
    finally:
        _names.reset(token)


def sample_name(row: int) -> str:
    """Return the name of a row of the batch: ``sample KEY``, or ``row N`` where the caller has set no names."""
    names = _names.get()
    return names[row] if row < len(names) else f"row {row}"
