"""Which replica serves a request."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult

__all__ = ["ReplicaRouter"]


class ReplicaRouter:
    """Sends each request to the replica with the fewest running requests."""

    def __init__(self, replicas: Sequence[BaseRolloutServer]) -> None:
        self._replicas = list(replicas)
        self._running = [0] * len(self._replicas)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the least loaded replica."""
        index = min(range(len(self._replicas)), key=self._running.__getitem__)
        self._running[index] += 1
        try:
            return await self._replicas[index].generate(request)
        finally:
            self._running[index] -= 1
