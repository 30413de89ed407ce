"""Samplers: which of the ready rows a consumer gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from jackfield.errors import QueueError

__all__ = ["SAMPLERS", "ReadyRows", "Sampler", "Sequential", "make_sampler", "register_sampler"]


class ReadyRows(Protocol):
    """What a sampler sees: the rows that one consumer could have now, in the order in which they became ready."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]:
        """Keys."""
        ...

    def tags(self, key: str) -> Mapping[str, Any]:
        """The tags of a row."""
        ...


class Sampler(Protocol):
    """Chooses rows. It may keep state from call to call, and may choose none: then the consumer waits for more."""

    def sample(self, ready: ReadyRows, max_rows: int | None) -> Sequence[str]:
        """Distinct keys out of ``ready``, ``max_rows`` at most (None: any number)."""
        ...


class Sequential:
    """First ready, first served."""

    def sample(self, ready: ReadyRows, max_rows: int | None) -> Sequence[str]:
        """The first ``max_rows`` rows."""
        return list(islice(ready, max_rows))


#: Samplers by the name that configurations use.
SAMPLERS: dict[str, Callable[..., Sampler]] = {"sequential": Sequential}


def register_sampler(name: str, make: Callable[..., Sampler]) -> None:
    """Offer a sampler under ``name``.

    Raises:
        QueueError: ``queue.invalid`` where the name is taken by another one.
    """
    if SAMPLERS.setdefault(name, make) is not make:
        raise QueueError(f"there is a sampler named {name!r} already", where=name, fix="choose another name")


def make_sampler(name: str, **options: Any) -> Sampler:
    """A sampler by name.

    Raises:
        QueueError: ``queue.invalid`` for an unknown name.
    """
    if name not in SAMPLERS:
        raise QueueError(f"no sampler is named {name!r}", expected=f"one of {', '.join(sorted(SAMPLERS))}", found=name)
    return SAMPLERS[name](**options)
