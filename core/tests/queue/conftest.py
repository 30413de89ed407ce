"""A started queue over the memory backend, on virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jackfield.queue.transfer_queue import TransferQueue
from jackfield_virtual_clock import VirtualClock


@pytest.fixture
def run() -> Callable[..., None]:
    """``run(test, **options)``: run an asynchronous test with a started queue, on virtual time."""

    def start(test: Callable[[Any], Awaitable[None]], backend: Any = None, **options: Any) -> None:
        from jackfield_queue_bench import Bench, Memory

        clock = VirtualClock()

        async def main() -> None:
            queue = TransferQueue(backend or Memory(), clock, **options)
            await queue.start()
            try:
                await test(Bench(queue, clock))
            finally:
                await queue.close()

        clock.run(main())

    return start
