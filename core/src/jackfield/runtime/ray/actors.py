"""An actor seen from the controller: Ray places it, and the RPC calls the worker in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RunError, WorkerLost
from jackfield.rpc import Address, Connection, Contract, Process, connect, stub
from jackfield.runtime.ray.host import MakeServices, Place

T = TypeVar("T")

_END_SECONDS = 15.0  #: for a worker to put its things away


class Actor:
    """One actor, which holds a :class:`~jackfield.runtime.ray.host.Host`, through all lives of its process."""

    def __init__(self, name: str, handle: Any, clock: Clock, start_seconds: float) -> None:
        """
        Args:
            name: of the worker in it.
            handle: Ray's.
            clock: through which every wait goes.
            start_seconds: for the process, and for the worker, to be there.
        """
        self.name, self.handle = name, handle
        self.address: Address | None = None  #: where the worker is served
        self.connection: Connection
        self._clock, self._start_seconds = clock, start_seconds
        self._reviving = asyncio.Lock()
        self._make, self._node, self._restarts = b"", "", False

    async def place(self) -> Place:
        """Return where the process lives; Ray may be starting it again."""
        reference = self.handle.place.options(max_task_retries=-1).remote()
        place: Place = await self._answer(reference, self._start_seconds, "to start")
        self._node = place.node
        return place

    async def make(self, make: MakeServices) -> Address:
        """Have the actor make its worker, connect to it, and return where it is served.

        Raises:
            JackfieldError: why it cannot.
        """
        from ray import cloudpickle

        self._make = cast(Any, cloudpickle).dumps(make)
        return await self._connect(self.handle.make)

    async def _connect(self, method: Any) -> Address:
        reference = method.remote(self._make)
        self.address = address = cast(Address, await self._answer(reference, self._start_seconds, "to be ready"))
        self.connection = await connect_worker(address, self.name, "the controller", self._clock, kills=True)
        self.connection.lost.add_done_callback(self._forget)
        return address

    def _forget(self, lost: asyncio.Future[str]) -> None:
        process, self.address = self.address and self.address.process, None
        if self._restarts:  # any other death is reported by what watches for it
            logging.getLogger("jackfield").warning("%s (%s) died: it %s", self.name, process, lost.result())

    def stub(self, service: str, contract: Contract, cls: type[T], seconds: float) -> T:
        """Return an object whose methods call a service of the worker, which is not made again when it dies."""
        return stub(self.connection, service, contract, cls, seconds)

    def restarting_stub(
        self,
        service: str,
        contract: Contract,
        cls: type[T],
        seconds: float,
        begin: Callable[[], Awaitable[object]] | None = None,
    ) -> T:
        """Return the same for a worker without state: a call that its death has ended raises once it is made again.

        Args:
            service: its name in the worker.
            contract: of the service.
            cls: what the object is to type checkers and readers.
            seconds: the longest that a call may take.
            begin: called each time that the worker was made again.
        """

        self._restarts = True

        async def call(method: str, *arguments: Any, **keywords: Any) -> Any:
            try:
                return await getattr(self.stub(service, contract, cls, seconds), method)(*arguments, **keywords)
            except WorkerLost:
                with suppress(WorkerLost):  # one that Ray has given up stays dead
                    await self._revive(begin)
                raise

        made = type(f"Restarting{cls.__name__}", (), {})()
        vars(made).update({method.name: partial(call, method.name) for method in contract})
        return cast(T, made)

    async def _revive(self, begin: Callable[[], Awaitable[object]] | None) -> None:
        async with self._reviving:
            if self.connection.lost.done():
                await self._kill_stopped()
                await self._connect(self.handle.make.options(max_task_retries=-1))
                if begin is not None:
                    await begin()

    async def empty(self) -> None:
        """Have the worker put its things away, so that the process can make another.

        Raises:
            WorkerLost: the process has ended.
        """
        self.address = None
        if hasattr(self, "connection"):
            self.connection.lost.remove_done_callback(self._forget)
            await self.connection.close()
        await self._answer(self.handle.end.remote(), _END_SECONDS, "to end")

    async def kill(self) -> None:
        """End the process."""
        import ray

        await self._kill_stopped()
        ray.kill(self.handle, no_restart=True)

    async def _kill_stopped(self) -> None:
        """Kill the process, on its node, if it cannot run: it does not hear when Ray asks it to end."""
        process = self.connection.process if hasattr(self, "connection") else None
        if process is None or process.is_near:
            _kill_if_stopped(process)
            return
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(self._node, soft=False)
        task = ray.remote(_kill_if_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        with suppress(RayError, DeadlineExceeded):  # the node is gone, and Ray knows it, or will
            await self._clock.wait_for(awaited(task.remote(process)), _END_SECONDS, f"{process} to be killed")

    async def _answer(self, reference: Any, seconds: float, what: str) -> Any:
        """Return what the actor's method returns.

        Raises:
            JackfieldError: what it raises; ``RunError`` naming the worker for any other exception; ``WorkerLost`` when
                the actor died; ``DeadlineExceeded``.
        """
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            return await self._clock.wait_for(awaited(reference), seconds, f"{self.name} {what}")
        except (asyncio.CancelledError, DeadlineExceeded):
            if ray.is_initialized():  # Ray would start a cluster in order to cancel
                with suppress(RayError):
                    ray.cancel(reference)
            raise
        except RayTaskError as error:
            if isinstance(error.cause, JackfieldError):
                raise error.cause from None
            raise RunError(
                f"{self.name} raised {type(error.cause).__name__}: {error.cause}",
                where=self.name,
                fix="the traceback is in error.txt",
            ) from error
        except RayActorError as error:
            raise _death(self.name, self.name, _reason(str(error))) from None


def _kill_if_stopped(process: Process | None) -> None:
    if process is not None and not process.can_run():
        process.kill()


async def connect_worker(address: Address, name: str, client: str, clock: Clock, *, kills: bool = False) -> Connection:
    """Connect to a worker; after its death calls raise ``WorkerLost``.

    Args:
        address: where it is served.
        name: of the worker.
        client: name of this process, for the worker.
        clock: through which every wait goes.
        kills: whether a worker that sends no heartbeats is killed: the controller does, and says why it died.
    """

    def lost(reason: str) -> JackfieldError:
        return _death(name, f"{name}, {address.process}", f"it {reason}")

    return await connect(address, client, clock, {}, lost_error=lost, kills=kills)


def _death(name: str, where: str, found: str) -> WorkerLost:
    fix = "look at the worker's log in Ray's session folder; lack of memory is the usual reason"
    return WorkerLost(f"{name} died", where=where, found=found, fix=fix)


async def awaited(reference: Any) -> Any:
    """Return what a reference of Ray becomes."""
    return await reference


def _reason(text: str) -> str:
    """The line of Ray's explanation that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "creation task" in text:
        return lines[-1][:300]
    telling = [line for line in lines if "exit" in line.lower() or "dead" in line.lower()]
    return (telling or lines or ["no reason is known"])[0][:300]
