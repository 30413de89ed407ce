"""What stands for a worker in other processes: its methods, called through its actor, with a deadline each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RunError, WorkerLost

__all__ = ["ENDS", "PROCESSES", "RemoteRank", "RemoteServer", "Stub", "answer"]

#: Of the workers that this process watches, by their names: where they live, and why it has ended them.
PROCESSES: dict[str, str] = {}
ENDS: dict[str, str] = {}

_LAST_SECONDS = 15.0  #: for a worker to put its things away at the end


class Stub:
    """Every attribute is a coroutine function: the method of that name of the worker in an actor.

    Cancelling a call cancels it there. A stub can be sent to other actors.

    Raises (all methods): what the worker's method raises, if it is one of Jackfield's errors; ``RunError`` naming the
    worker for any other exception; ``WorkerLost`` when the actor died; ``DeadlineExceeded``.
    """

    def __init__(self, actor: Any, name: str, seconds: float, prefix: str = "", *, make: bytes | None = None) -> None:
        """
        Args:
            actor: of a :class:`~jackfield.runtime.ray.host.Host`.
            name: of the worker, for messages.
            seconds: the longest that any call may take.
            prefix: of the methods' names there: a part of the worker (``sender.``).
            make: what makes the worker again where Ray starts its process again (as
                :meth:`~jackfield.runtime.ray.cluster.Cluster.make` returns it); ``WorkerLost`` is then raised once it
                is there.
        """
        self._actor = actor
        self._name = name
        self._seconds = seconds
        self._prefix = prefix
        self._make = make
        self._clock = Clock()

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._make is None, "only the controller holds workers that are started again"
        return type(self), (self._actor, self._name, self._seconds, self._prefix)

    def __getattr__(self, member: str) -> Callable[..., Awaitable[Any]]:
        if member.startswith("__"):
            raise AttributeError(member)
        return partial(self._call, member)

    def made_by(self, make: bytes) -> None:
        """What makes the worker again from now on."""
        self._make = make

    async def _call(self, member: str, *arguments: Any, **keywords: Any) -> Any:
        reference = self._actor.call.remote(self._prefix + member, arguments, keywords)
        try:
            return await answer(reference, self._name, f"{self._name} to {member}", self._seconds, self._clock)
        except WorkerLost:
            if self._make is not None:
                await self._revive()
            raise

    async def _revive(self) -> None:
        """Make a worker that has died again; one that Ray has given up stays dead."""
        reference = self._actor.make.options(max_task_retries=-1).remote(self._make)
        with suppress(WorkerLost):
            await answer(reference, self._name, f"{self._name} to start again", self._seconds, self._clock)


async def answer(reference: Any, name: str, waiting_for: str, seconds: float, clock: Clock) -> Any:
    """What an actor's method returns.

    Raises:
        JackfieldError: see :class:`Stub`.
    """
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        return await clock.wait_for(_awaited(reference), seconds, waiting_for)
    except (asyncio.CancelledError, DeadlineExceeded):
        if ray.is_initialized():  # Ray would start a cluster in order to cancel
            with suppress(RayError):
                ray.cancel(reference)
        raise
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, WorkerLost) and cause.where == name:  # it speaks of the process before it
            raise _lost(name, str(cause.found)) from None
        if isinstance(cause, JackfieldError):
            raise cause from None
        raise RunError(
            f"{name} raised {type(cause).__name__}: {cause}", where=name, fix="the traceback is in error.txt"
        ) from error
    except RayActorError as error:
        raise _lost(name, _reason(str(error))) from None


def _lost(name: str, found: str) -> WorkerLost:
    return WorkerLost(
        f"{name} died",
        where=", ".join(filter(None, (name, PROCESSES.get(name)))),
        found=ENDS.get(name) or found,
        fix="look at the worker's log in Ray's session folder; lack of memory is the usual reason",
    )


async def _awaited(reference: Any) -> Any:
    return await reference


def _reason(text: str) -> str:
    """The line of Ray's explanation that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "creation task" in text:
        return lines[-1][:300]
    telling = [line for line in lines if "exit" in line.lower() or "dead" in line.lower()]
    return (telling or lines or ["no reason is known"])[0][:300]


class RemoteServer(Stub):
    """A replica of a rollout server in an actor."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        reference = self._actor.serve.remote("generate", (request,))
        waiting_for = f"{self._name} to generate"
        result: GenerateResult = await answer(reference, self._name, waiting_for, self._seconds, self._clock)
        return result

    async def stop(self) -> None:
        """End it; a dead one has ended."""
        with suppress(WorkerLost, DeadlineExceeded):
            await self._clock.wait_for(self._call("stop"), _LAST_SECONDS, f"{self._name} to stop")


class RemoteRank(Stub):
    """A rank of an engine in an actor, with its end of the weight plane."""

    @property
    def sender(self) -> RemoteSender:
        """Stands for the rank's :class:`~jackfield.weights.WeightSender`."""
        return RemoteSender(self._actor, f"{self._name}, as a sender of weights,", self._seconds, "sender.")

    async def close(self) -> None:
        """Release it; a dead one has been."""
        with suppress(WorkerLost, DeadlineExceeded):
            await self._clock.wait_for(self._call("close"), _LAST_SECONDS, f"{self._name} to close")


class RemoteSender(Stub):
    """The trainer's side of a weight transfer in an actor."""

    sent_bytes = 0

    async def send(self, *, base: int | None = None) -> dict[str, str]:
        """Send the weights, or what has changed of them since version ``base``; digests of all by name."""
        digests: dict[str, str] = await self._call("send", base=base)
        self.sent_bytes = await self._call("sent_bytes")
        return digests
