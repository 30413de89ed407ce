"""Which replica serves a request."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RolloutError, WorkerLost

__all__ = ["ReplicaRouter"]


#: Refusals of one request by a replica that is well.
_REFUSALS = ("rollout.request", "rollout.stale", "plugin.capability")
_HEALTH_SECONDS = 10.0


class ReplicaRouter:
    """Sends each request to the replica with the fewest running requests."""

    def __init__(self, replicas: Sequence[BaseRolloutServer], clock: Clock) -> None:
        self._replicas = list(replicas)
        self._clock = clock
        self._running = [0] * len(self._replicas)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the least loaded replica.

        Raises:
            RolloutError: ``rollout.stopped``, naming the replica, when it failed and is not healthy any more.
            Exception: what a healthy replica raised.
        """
        index = min(range(len(self._replicas)), key=self._running.__getitem__)
        self._running[index] += 1
        try:
            return await self._replicas[index].generate(request)
        except Exception as error:
            await self._require_alive(index, error)
            raise
        finally:
            self._running[index] -= 1

    async def _require_alive(self, index: int, error: Exception) -> None:
        """Tell a request that failed from a replica that died."""
        if isinstance(error, WorkerLost) or (isinstance(error, JackfieldError) and error.code in _REFUSALS):
            return
        try:
            name = f"replica {index} to tell its health"
            report = await self._clock.wait_for(self._replicas[index].health(), _HEALTH_SECONDS, name)
            healthy, state = report.healthy, report.detail or "not healthy"
        except Exception as silence:
            healthy, state = False, f"{type(silence).__name__}: {silence}"
        if not healthy:
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
