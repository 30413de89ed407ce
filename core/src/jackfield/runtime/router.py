"""Which replica serves a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RolloutError, WorkerLost
from jackfield.runtime.revival import state_of

__all__ = ["ReplicaRouter"]


class ReplicaRouter:
    """Sends requests to the replica with the fewest running ones; later turns of one run go where its first went."""

    def __init__(self, replicas: Sequence[BaseRolloutServer], clock: Clock) -> None:
        self._replicas = list(replicas)
        self._clock = clock
        self._running = [0] * len(self._replicas)

    def of_one_run(self) -> Callable[[GenerateRequest], Awaitable[GenerateResult]]:
        """What generates for one agent run: its first replica has what was said before in its cache.

        It leaves a replica that is being made anew for another one.
        """
        chosen: int | None = None

        async def generate(request: GenerateRequest) -> GenerateResult:
            nonlocal chosen
            if chosen is None or not self._is_available(chosen):
                chosen = self._least_loaded()
            return await self._generate(chosen, request)

        return generate

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the least loaded replica; one that is being made anew only where there is no other.

        Raises:
            RolloutError: ``rollout.stopped``, naming the replica, when it failed and is not healthy any more.
            Exception: what a healthy replica raised.
        """
        return await self._generate(self._least_loaded(), request)

    async def _generate(self, index: int, request: GenerateRequest) -> GenerateResult:
        self._running[index] += 1
        try:
            return await self._replicas[index].generate(request)
        except Exception as error:
            if not isinstance(error, WorkerLost):  # that says all there is to say
                await self._require_alive(index, error)
            raise
        finally:
            self._running[index] -= 1

    def _least_loaded(self) -> int:
        return min(range(len(self._replicas)), key=lambda index: (not self._is_available(index), self._running[index]))

    def _is_available(self, index: int) -> bool:
        return bool(getattr(self._replicas[index], "available", True))

    async def _require_alive(self, index: int, error: Exception) -> None:
        """Tell a request that failed from a replica that died."""
        state = await state_of(self._replicas[index], self._clock, f"replica {index}", error)
        if state is not None:
            raise RolloutError(
                f"rollout replica {index} died",
                code="rollout.stopped",
                where=f"replica {index}",
                expected="a replica that answers until the run ends",
                found=f"{_one_line(error)}; its health: {state}",
                fix="look at what the server printed; the traceback is in error.txt in the run's folder",
            ) from error


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, JackfieldError) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())
