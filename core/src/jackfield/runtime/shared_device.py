"""One device for the engines and the replicas: who gives memory back at which hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from jackfield.abc.rollout import SleepRequest, WakeUpRequest
from jackfield.errors import WorkerLost
from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.revival import LastingServer
from jackfield.weights import ProbeAnswer, Replica, ReplicaProbe, SyncReport, WeightSynchronizer

__all__ = ["SharedDevice"]


class SharedDevice:
    """The hand-overs of a placement lease, and a synchronisation that wakes sleeping replicas first."""

    def __init__(
        self,
        engines: Sequence[EngineGroup],
        replicas: Sequence[Replica],
        device: str,
        synchronizer: WeightSynchronizer,
        probe: ReplicaProbe | None = None,
    ) -> None:
        """
        Args:
            engines: of every model that the trainer works with on the device.
            replicas: that work there in turns with them; somebody may add or remove some while replicas have it.
            device: where engines work.
            synchronizer: of the replicas.
            probe: replicas answer it when they have the device, the engine compares when it has it again, before it
                trains; None: nobody does.
        """
        self._engines = engines
        self._replicas = replicas
        self._device = device
        self._synchronizer = synchronizer
        self._probe = probe
        self._unasked: int | None = None  # a version that replicas have and have not answered the probe with
        self._answers: list[ProbeAnswer] = []

    async def enter_train(self) -> None:
        """The engines come to the device."""
        await self._move(self._device)
        answers, self._answers = self._answers, []
        if self._probe is not None and answers:
            await self._probe.compare(answers)

    async def leave_train(self) -> None:
        """The engines leave the device."""
        await self._move("cpu")

    async def enter_rollout(self) -> None:
        """The replicas take weights and KV cache."""
        await self._wake_up(WakeUpRequest())
        version, self._unasked = self._unasked, None
        if self._probe is not None and version is not None:
            servers = {
                replica.info.replica: replica.server
                for replica in self._replicas
                if not (isinstance(replica.server, LastingServer) and replica.server.behind)
            }
            with suppress(WorkerLost):  # who dies does not answer, and is made anew
                self._answers = await self._probe.ask(servers, version)

    async def leave_rollout(self) -> None:
        """The replicas give weights and KV cache back."""
        await asyncio.gather(*(replica.server.sleep(SleepRequest(level=1)) for replica in self._replicas))

    async def sync(self, version: int) -> SyncReport:
        """Synchronise while the engines hold the device: the replicas take room for the weights alone."""
        await self._wake_up(WakeUpRequest(tags=("weights",)))
        report = await self._synchronizer.sync(version)
        self._unasked = version
        return report

    async def join(self, replica: Replica, version: int) -> None:
        """Have a replica answer the probe that has just got ``version``, while replicas have the device."""
        if self._probe is not None:
            self._answers += await self._probe.ask({replica.info.replica: replica.server}, version)

    async def _move(self, device: str) -> None:
        await asyncio.gather(*(engine.to(device) for engine in self._engines))

    async def _wake_up(self, request: WakeUpRequest) -> None:
        await asyncio.gather(*(replica.server.wake_up(request) for replica in self._replicas))
