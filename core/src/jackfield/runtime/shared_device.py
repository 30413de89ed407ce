"""One device for the engine and the replicas: who gives memory back at which hand-over."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.abc.rollout import SleepRequest, WakeUpRequest
from jackfield.runtime.engine_group import EngineGroup
from jackfield.weights import Replica, SyncReport, WeightSynchronizer

__all__ = ["SharedDevice"]


class SharedDevice:
    """The hand-overs of a placement lease, and a synchronisation that wakes sleeping replicas first."""

    def __init__(
        self, actor: EngineGroup, replicas: Sequence[Replica], device: str, synchronizer: WeightSynchronizer
    ) -> None:
        self._actor = actor
        self._replicas = replicas
        self._device = device
        self._synchronizer = synchronizer

    async def enter_train(self) -> None:
        """The engine comes to the device."""
        await self._actor.to(self._device)

    async def leave_train(self) -> None:
        """The engine leaves the device."""
        await self._actor.to("cpu")

    async def enter_rollout(self) -> None:
        """The replicas take weights and KV cache."""
        for replica in self._replicas:
            await replica.server.wake_up(WakeUpRequest())

    async def leave_rollout(self) -> None:
        """The replicas give weights and KV cache back."""
        for replica in self._replicas:
            await replica.server.sleep(SleepRequest(level=1))

    async def sync(self, version: int) -> SyncReport:
        """Synchronise while the engine holds the device: the replicas take room for the weights alone."""
        for replica in self._replicas:
            await replica.server.wake_up(WakeUpRequest(tags=("weights",)))
        return await self._synchronizer.sync(version)
