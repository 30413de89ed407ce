"""Which replicas of this process generate now. An engine beside them may use their processors meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_replicas: set[object] = set()


@contextmanager
def generating(replica: object) -> Iterator[None]:
    """Count ``replica`` as one that generates inside the block. It may be left on any thread."""
    _replicas.add(replica)
    try:
        yield
    finally:
        _replicas.discard(replica)


def is_idle() -> bool:
    """Return whether no replica of this process generates now. May be called on any thread."""
    return not _replicas
