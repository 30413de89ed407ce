"""Which replica serves a request."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RolloutError, WorkerLost

__all__ = ["ReplicaRouter", "state_of"]


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
        """Generate on the least loaded replica; one that is being made anew only where there is no other.

        Raises:
            RolloutError: ``rollout.stopped``, naming the replica, when it failed and is not healthy any more.
            Exception: what a healthy replica raised.
        """
        index = min(range(len(self._replicas)), key=self._load)
        self._running[index] += 1
        try:
            return await self._replicas[index].generate(request)
        except Exception as error:
            await self._require_alive(index, error)
            raise
        finally:
            self._running[index] -= 1

    def _load(self, index: int) -> tuple[bool, int]:
        return not getattr(self._replicas[index], "available", True), self._running[index]

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


async def state_of(replica: BaseRolloutServer, clock: Clock, name: str, error: Exception | None = None) -> str | None:
    """How a replica is that does not serve any more; None: it is well.

    Args:
        replica: whose.
        clock: through which its answer is waited for.
        name: of the replica.
        error: of a request that it has failed; one that it has refused says that it is well.
    """
    if isinstance(error, WorkerLost) or (isinstance(error, JackfieldError) and error.code in _REFUSALS):
        return None
    try:
        report = await clock.wait_for(replica.health(), _HEALTH_SECONDS, f"{name} to tell its health")
    except Exception as silence:
        return f"{type(silence).__name__}: {silence}"
    return None if report.healthy else report.detail or "not healthy"


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, JackfieldError) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())
