"""Experiences of a run that pass operators in a pipeline service."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from jackfield.abc.operator import OperatorContext
from jackfield.config import RunConfig
from jackfield.plugins.registry import Registry
from jackfield.sdk.rpc import Connection
from jackfield_pipelines.client import PipelineClient, client_of
from jackfield_pipelines.experiences import ExperiencePipeline, Shaped
from jackfield_pipelines.lines import Record
from jackfield_pipelines.made import MadeRows, record_operators
from jackfield_pipelines.protocol import (
    FRAME_BYTES,
    ExperienceJob,
    Opened,
    PipelineService,
    ShapeReply,
    ShapeRequest,
    encode,
)


@attrs.define(kw_only=True)
class ServedPipeline(ExperiencePipeline):
    """Has a service apply the operators.

    It holds the states of operators that learn, with which they go on if the service dies.
    """

    client: PipelineClient
    job: ExperienceJob
    count: Callable[[str, float], None]
    recorded: Path | None = None  #: the run's folder, which gets what the operators are
    opened: Opened = attrs.field(factory=lambda: Opened(reads=(), states=None))
    _now: list[Any] | None = attrs.field(default=None, init=False)  #: states; None: of operators that are new
    _at: Connection | None = attrs.field(default=None, init=False)  #: where the operators have these states
    _turn: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    @classmethod
    def of_run(cls, config: RunConfig, registry: Registry, context: OperatorContext, worker: int = 0) -> ServedPipeline:
        """Make the client of one of the run's reward workers."""
        settings, steps = config.data.pipeline, config.schedule.steps
        job: Any = {"operators": settings.experiences, "seed": context.seed, "steps": steps}
        job |= {"seconds": settings.seconds_per_request, "set_aside": settings.maximum_set_aside}
        return cls(
            stages=(),
            steps=steps,
            rows=MadeRows.of_run(config, worker),
            client=client_of(config, context.clock, f" (worker {worker})"),
            job=ExperienceJob(**job),
            count=context.count,
            recorded=Path(config.folder) if worker == 0 else None,
        )

    @property
    def reads(self) -> frozenset[str]:
        """Names of the columns that operators read, once they are started."""
        return frozenset(self.opened.reads)

    @property
    def generates(self) -> bool:
        """Return that no operator generates with the run's replicas."""
        return False

    async def start(self) -> None:
        """Have the service start all operators."""
        await self.client.call(self._open)

    async def close(self) -> None:
        """Leave the service."""
        await self.client.close()

    def restore(self, states: Sequence[Any]) -> None:
        """Have the operators continue from states, before the first experience."""
        self._now, self._at = list(states), None

    def _state(self) -> list[Any]:
        return copy.deepcopy(self._now or [])

    async def _open(self, service: PipelineService) -> None:
        """Have the service make operators with the states that are held here, unless this connection has them."""
        connection = self.client.connection
        if self._at is None or self._at is not connection:
            if self._now is not None:
                await _add(service, encode(self._now))
            self.opened = await service.open(self.job, self._now is not None)
            if self.recorded is not None:
                record_operators(self.recorded, self.opened.operators)
            if self.rows is not None:
                self.rows.warn(self.opened.samples)
            self._now = self.opened.states if self._now is None else self._now
            self._at = connection

    async def shape(self, records: Mapping[str, Record], batch: int) -> Shaped:
        """Have the service apply the operators to experiences of whole groups of a batch."""
        async with self._turn:
            self.remember(batch)
            request = encode(ShapeRequest(records={key: dict(each) for key, each in records.items()}, batch=batch))
            asking = self.client.call(lambda service: self._shape(service, request))
            what = f"{self.client.who} to shape {len(records)} samples of batch {batch} (deadlines.batch)"
            reply = await self.client.clock.wait_for(asking, self.client.seconds, what)
        for name, number in reply.counted:
            self.count(name, number)
        if reply.made and self.rows is not None:
            self.rows.write(reply.made, batch)
        return Shaped(columns=reply.columns, removed=reply.removed, made=reply.made)

    async def _shape(self, service: PipelineService, request: bytes) -> ShapeReply:
        await self._open(service)
        at, self._at = self._at, None  # a request without an answer leaves operators that learn in between
        await _add(service, request)
        content = b"".join([part async for part in service.shape()])
        reply = msgspec.msgpack.decode(content, type=ShapeReply)
        self._now, self._at = reply.states, at
        return reply


async def _add(service: PipelineService, content: bytes) -> None:
    for offset in range(0, len(content), FRAME_BYTES):
        await service.add(content[offset : offset + FRAME_BYTES], offset > 0)
