"""A started queue over the memory backend, on virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def run() -> Callable[..., None]:
    """``run(test, **options)``: run an asynchronous test with a started queue, on virtual time."""
    from jackfield_queue_bench import with_queue

    return with_queue
