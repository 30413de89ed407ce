"""Weights for replicas that no synchronisation waits for: they come from what the trainer has said of its newest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.clock import Clock
from jackfield.errors import WeightsError
from jackfield.weights.synchronizer import Replica, SyncReport, verify

__all__ = ["Posted", "WeightFollower"]


@attrs.frozen(kw_only=True)
class Posted:
    """What a trainer says of its newest weights: plain values."""

    version: int
    kind: str = "full"
    connect: Mapping[str, Any] | None = None  #: of any worker; None: they are those of the model's folder
    digests: Mapping[str, str] = attrs.field(factory=dict)
    peft_config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, version: int, report: SyncReport | None) -> Posted:
        """The newest version, and the synchronisation that brought it; None: there was none.

        Raises:
            WeightsError: ``weights.transfer``: the checkpoint engine keeps nothing for those who come late.
        """
        if report is None:
            return cls(version=version)
        if report.retained is None or report.kind == "delta":
            raise WeightsError(
                "the checkpoint engine keeps no weights for explorers that come and go",
                where="checkpoint_engine",
                expected="one with the capability 'retains_weights' (file)",
                fix="choose checkpoint_engine: {name: file, folder: …}",
            )
        return cls(
            version=version,
            kind=report.kind,
            connect=report.retained,
            digests=report.digests,
            peft_config=report.peft_config,
        )


class WeightFollower:
    """Brings posted weights to the replicas of this process, and believes nothing but their receipts."""

    def __init__(
        self, replicas: Sequence[Replica], name: str, settings: Mapping[str, Any], clock: Clock, seconds: float
    ) -> None:
        """
        Args:
            replicas: the live list of them; read anew each time.
            name: of the checkpoint engine's plugin.
            settings: of it.
            clock: through which every wait goes.
            seconds: the deadline of each update.
        """
        self._replicas = replicas
        self._name = name
        self._settings = dict(settings)
        self._clock = clock
        self._seconds = seconds
        self.newest: Posted | None = None  #: that all replicas have
        self.bringing = asyncio.Lock()  #: held while all get weights, and while one gets them that joins or comes back

    async def load(self, posted: Posted) -> None:
        """Bring weights to all replicas.

        Raises:
            WeightsError: ``weights.version`` when the trainer has gone back, else as a synchronisation.
            DeadlineExceeded: naming the replica.
        """
        async with self.bringing:
            await self._load(posted)

    async def _load(self, posted: Posted) -> None:
        before = -1 if self.newest is None else self.newest.version
        if posted.version < before:
            raise WeightsError(
                "the trainer went back to earlier weights, which replicas do not take",
                code="weights.version",
                expected=f"at least {before}",
                found=posted.version,
                fix="start this explorer again",
            )
        if posted != self.newest:  # a trainer that was restored may make a version anew
            await asyncio.gather(*(self.bring(replica, posted) for replica in list(self._replicas)))
        self.newest = posted

    async def bring(self, replica: Replica, posted: Posted | None = None) -> None:
        """Bring the newest weights, or these, to one replica."""
        posted = posted or self.newest
        if posted is None or posted.connect is None:
            return  # it has those of the model's folder
        request = UpdateWeightsRequest(
            version=posted.version,
            checkpoint_engine=self._name,
            checkpoint_engine_config=self._settings,
            connect=(posted.connect,) * replica.info.workers,
            first_worker=0,
            total_workers=replica.info.workers,
            kind="full" if posted.peft_config is None else "adapter",
            peft_config=posted.peft_config,
            deadline_seconds=self._seconds,
        )
        who = f"replica {replica.info.replica} to take weights {posted.version}"
        receipt = await self._clock.wait_for(replica.server.update_weights(request), self._seconds, who)
        verify(replica.info, receipt, posted.version, posted.digests)
