"""Operators on experiences that a pipeline service has started: for all runs, or for one if they learn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import attrs

from jackfield.abc.operator import Operator, OperatorContext
from jackfield.clock import Clock
from jackfield.errors import ConfigError, OperatorError
from jackfield_pipelines.contract import stages_errors
from jackfield_pipelines.experiences import ExperiencePipeline
from jackfield_pipelines.loops import LoopThread
from jackfield_pipelines.pipeline import Step
from jackfield_pipelines.process_operators import end_processes
from jackfield_pipelines.protocol import ExperienceJob, ShapeReply, ShapeRequest
from jackfield_pipelines.served_asks import ServedAsks
from jackfield_pipelines.services import Gate
from jackfield_pipelines.stages import OperatorStage

_COUNTED: ContextVar[list[tuple[str, float]]] = ContextVar("counted")  #: for the request that is processed


@attrs.define(eq=False, kw_only=True)
class Instance:
    """The operators of one run, which :meth:`Room.open` makes, and :meth:`Room.close` closes."""

    pipeline: ExperiencePipeline
    own: list[Operator] = attrs.field(factory=list)  #: those that learn, which no other run has

    @property
    def states(self) -> list[Any]:
        """The states of all operators."""
        return [stage.operator.state() for stage in self.pipeline.stages]


@attrs.define(eq=False, kw_only=True)
class Room:
    """One pipeline on experiences, whose operators run in a thread of their own, one request after the other."""

    job: ExperienceJob
    asks: Callable[[], ServedAsks]  #: made in the thread
    steps: Callable[[], Sequence[Step]]
    users: int = attrs.field(default=0, init=False)  #: runs that have it, or open it
    requests: int = attrs.field(default=0, init=False)
    _thread: LoopThread = attrs.field(factory=partial(LoopThread, "pipeline"), init=False)
    _turn: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: requests come in it as they were made
    _asks: ServedAsks | None = attrs.field(default=None, init=False)
    _steps: Sequence[Step] = attrs.field(default=(), init=False)
    _shared: dict[int, Operator] = attrs.field(factory=dict, init=False)  #: by number, those that do not learn

    async def open(self, instance: Instance, states: Sequence[Any] | None) -> None:
        """Make the operators of a run; those that learn go on from their states."""
        await self._thread.do(self._open(instance, states))

    async def shape(self, instance: Instance, request: ShapeRequest) -> ShapeReply:
        """Process experiences of a run."""
        self.requests += 1
        return await self._thread.do(self._shape(instance, request))

    async def close(self, instance: Instance, *, everything: bool) -> None:
        """Close the operators that one run alone has, or after the last run everything."""
        await self._thread.do(self._closed(instance.own))
        if everything:
            await self._thread.do(self._end())
            self._thread.end()

    async def _open(self, instance: Instance, states: Sequence[Any] | None) -> None:
        async with self._turn:
            if self._asks is None:
                self._asks = self.asks()
            if not self._steps:
                steps = self.steps()
                self._asks.check(steps, "data.pipeline.experiences")
                self._steps = steps
            if states is not None and len(states) != len(self._steps):
                what, expected = "a run has states of other operators", f"{len(self._steps)} states"
                raise OperatorError(what, code="operator.state", expected=expected, found=len(states))
            stages = list[OperatorStage]()
            for number, step in enumerate(self._steps, 1):
                if (operator := self._shared.get(number)) is None:
                    operator = await self._made(number, step, states, instance.own)
                shared: Any = {"clock": Clock(), "seconds": self.job.seconds, "about": step.about}
                stages.append(OperatorStage(name=step.name, number=number, operator=operator, **shared))
            instance.pipeline.stages = stages

    async def _made(self, number: int, step: Step, states: Sequence[Any] | None, own: list[Operator]) -> Operator:
        """Make and start an operator, for this run alone if it learns."""
        assert self._asks is not None
        count = lambda name, value: _COUNTED.get().append((name, float(value)))  # noqa: E731
        context = OperatorContext(clock=Clock(), seed=self.job.seed, target="experiences", count=count)
        gate = Gate(step.name, self._asks)
        context = attrs.evolve(gate.given(context), score=partial(_scored, gate, self._asks))
        gate.operator = operator = step.build(context)
        if operator.selection is not None:
            what, expected = f"{step.name} puts all rows into an order", "an operator that looks at groups"
            raise ConfigError(what, where="data.pipeline.experiences", expected=expected, found=step.name)
        if type(operator).state is not Operator.state:
            own.append(operator)
            with stages_errors(step.name, "at its start"):
                await operator.start()
            if states is not None:
                operator.restore(states[number - 1])
            return operator
        try:
            with stages_errors(step.name, "at its start"):
                await operator.start()
        except BaseException:
            await operator.close()
            raise
        self._shared[number] = operator
        return operator

    async def _shape(self, instance: Instance, request: ShapeRequest) -> ShapeReply:
        async with self._turn:
            counted = list[tuple[str, float]]()
            _COUNTED.set(counted)
            shaped = await instance.pipeline.shape(request.records, request.batch)
            written: Any = {"columns": dict(shaped.columns), "removed": dict(shaped.removed), "made": (*shaped.made,)}
            return ShapeReply(**written, states=instance.states, counted=counted)

    async def _closed(self, operators: Sequence[Operator]) -> None:
        async with self._turn:
            await _close(operators)

    async def _end(self) -> None:
        await self._closed(list(self._shared.values()))
        end_processes(step.record for step in self._steps)
        if self._asks is not None:
            await self._asks.close()


async def _scored(gate: Gate, asks: ServedAsks, values: Mapping[str, Any], response: str) -> float:
    gate.check("reward")
    return await asks.score_experience(values, response)


async def _close(operators: Sequence[Operator]) -> None:
    for operator in reversed(operators):
        with stages_errors(type(operator).__name__, "at its end"):
            await operator.close()
