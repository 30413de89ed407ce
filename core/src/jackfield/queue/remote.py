"""The queue whose controller lives in another process: the same interface, each method a call of it there.

Values go between this process and the backend; the controller hears of keys, columns, sizes and tags alone.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.queue.connection import Connection
from jackfield.queue.protocol import ControllerAddress, method
from jackfield.queue.transfer_queue import TransferQueue

__all__ = ["RemoteQueue"]

P = ParamSpec("P")
T = TypeVar("T")

Method = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
Iteration = Callable[Concatenate[Any, P], AsyncIterator[T]]
Context = Callable[Concatenate[Any, P], AbstractAsyncContextManager[T]]


def _called(function: Method[P, T]) -> Method[P, T]:
    """The same method, at the controller."""
    name = function.__name__

    @functools.wraps(function)
    async def call(self: RemoteQueue, *arguments: P.args, **keywords: P.kwargs) -> Any:
        return await self.connection.call(name, _named(name, self, *arguments, **keywords))

    del call.__isabstractmethod__  # type: ignore[attr-defined]
    return cast(Method[P, T], call)


def _iterated(function: Iteration[P, T]) -> Iteration[P, T]:
    """The same iteration, item by item as they are asked for."""
    name = function.__name__

    @functools.wraps(function)
    def iterate(self: RemoteQueue, *arguments: P.args, **keywords: P.kwargs) -> AsyncIterator[T]:
        return self.connection.iterate(name, _named(name, self, *arguments, **keywords))

    del iterate.__isabstractmethod__  # type: ignore[attr-defined]
    return cast(Iteration[P, T], iterate)


def _entered(function: Context[P, T]) -> Context[P, T]:
    """The same context: entered and left there. A set that it gives is, when it was left, what it is there then."""
    name = function.__name__

    @functools.wraps(function)
    @asynccontextmanager
    async def enter(self: RemoteQueue, *arguments: P.args, **keywords: P.kwargs) -> AsyncIterator[T]:
        async with self.connection.entered(name, _named(name, self, *arguments, **keywords)) as (value, left):
            yield value
        if isinstance(value, set):
            value.intersection_update(left.result())

    del enter.__isabstractmethod__  # type: ignore[attr-defined]
    return cast(Context[P, T], enter)


def _named(name: str, *arguments: Any, **keywords: Any) -> dict[str, Any]:
    bound = method(name).signature.bind(*arguments, **keywords).arguments
    return {parameter: value for parameter, value in bound.items() if parameter != "self"}


class RemoteQueue(TransferQueue):
    """A client. What a caller cancels ends there, too, and what it had got meanwhile is given back.

    A controller that dies, or takes this process for dead, ends every call with ``queue.session``.
    """

    def __init__(self, address: ControllerAddress, backend: TransferQueueBackend, clock: Clock, name: str) -> None:
        """
        Args:
            address: of the controller.
            backend: where this process writes and reads values: the controller's own, or a client of the same store.
            clock: through which every wait goes.
            name: of this process, as errors call it.
        """
        self.backend = backend
        self.clock = clock
        self.connection = Connection(address, clock, name)

    async def start(self) -> None:
        """Connect.

        Raises:
            QueueError: ``queue.session``: nobody answers.
        """
        await self.backend.start()
        await self.connection.open()

    async def close(self) -> None:
        """Say goodbye. Idempotent."""
        await self.connection.close(early=not self.done)
        await self.backend.close()

    # -- producers

    claim_ticket = _called(TransferQueue.claim_ticket)
    wait_ticket = _called(TransferQueue.wait_ticket)
    vacancies = _called(TransferQueue.vacancies)
    release_tickets = _called(TransferQueue.release_tickets)
    wait_offer = _called(TransferQueue.wait_offer)
    slots = _iterated(TransferQueue.slots)
    open_group = _called(TransferQueue.open_group)
    drop_group = _called(TransferQueue.drop_group)
    group = _called(TransferQueue.group)
    wait_group_settled = _called(TransferQueue.wait_group_settled)
    settled_groups = _iterated(TransferQueue.settled_groups)
    ending_run = _entered(TransferQueue.ending_run)
    remember_lineage = _called(TransferQueue.remember_lineage)
    fail_run = _called(TransferQueue.fail_run)
    adding = _entered(TransferQueue.adding)
    announce = _called(TransferQueue.announce)
    fail_lost = _called(TransferQueue.fail_lost)
    fail_rows = _called(TransferQueue.fail_rows)

    # -- consumers

    register_consumer = _called(TransferQueue.register_consumer)
    lease = _called(TransferQueue.lease)
    lease_groups = _called(TransferQueue.lease_groups)
    sample_groups = _called(TransferQueue.sample_groups)
    renew = _called(TransferQueue.renew)
    release = _called(TransferQueue.release)
    take_over = _called(TransferQueue.take_over)
    ack = _called(TransferQueue.ack)
    commit = _called(TransferQueue.commit)
    rollback = _called(TransferQueue.rollback)

    # -- what is going on

    drain_failures = _called(TransferQueue.drain_failures)
    stats = _called(TransferQueue.stats)
    post = _called(TransferQueue.post)
    wait_notice = _called(TransferQueue.wait_notice)

    # -- keeping

    checkpoint = _called(TransferQueue.checkpoint)
    clear = _called(TransferQueue.clear)
    restore = _called(TransferQueue.restore)
    recover = _called(TransferQueue.recover)
    flush = _called(TransferQueue.flush)
