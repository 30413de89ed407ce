"""Operators in a process of their own, with another interpreter, which a pipeline uses like those that are here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, Row, Selection, Use
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError, OperatorError, PluginError, WorkerLost
from jackfield.plugins.interpreters import environment_python, resolve_interpreter
from jackfield.plugins.registry import PluginRecord, Registry
from jackfield.runtime.operators import Declared, OperatorHost, Place, in_parts
from jackfield.settings import structure
from jackfield_pipelines.processes import OperatorProcess

T = TypeVar("T")

INTERPRETER = "interpreter"  #: the key of an operator's entry that names its interpreter
_ATTEMPTS = 3  #: how often a request is tried if the process dies
_DEATHS = 16  #: after so many, without a request that was processed, it is not the rows' fault
_SLACK_SECONDS = 30.0  #: beyond the deadline of a request, which the pipeline keeps itself


class ProcessOperator(Operator):
    """An operator that is in another process. Its calls raise what the operator raises there.

    If the process dies in a request, the request is repeated there by a new one, at most three times in all. Then a
    request of several rows raises ``operator.process``, so that the pipeline cuts it until it has the row that is at
    fault. A process that dies whatever it gets raises ``WorkerLost``.
    """

    def __init__(
        self, process: OperatorProcess, settings: Mapping[str, Any], config: Any, context: OperatorContext
    ) -> None:
        super().__init__(config, context)
        self.owner, self._settings = process, dict(settings)
        self._number = process.add(self)
        self._lock = asyncio.Lock()  # of requests: a cancelled one may still be ending
        self._made_in = self._started_in = -1  # the process's life in which it was made and started
        self._starts, self._state = False, cast(Any, None)
        self._suspects = set[str]()  # rows with which the process died
        self._loop: asyncio.AbstractEventLoop | None = None  # of the pipeline
        self._declared: Declared
        process.call(self._repeated(self._host))

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns that the operator reads."""
        return self._declared.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the columns that the operator writes."""
        return self._declared.writes

    @property
    def compares(self) -> bool:
        """Return whether the operator compares rows."""
        return self._declared.compares

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return what of the run the operator uses."""
        return self._declared.uses

    @property
    def version(self) -> str:
        """Return the version of what the operator runs."""
        return self._declared.version

    @property
    def selection(self) -> Selection | None:
        """Return the order in which the operator puts rows."""
        return self._declared.selection

    def state(self) -> Any:
        """Return the state after the last request."""
        return self._state

    def restore(self, state: Any) -> None:
        """Have the operator made again before its next request, with this state."""
        self._state, self._made_in = state, -1

    async def start(self) -> None:
        """Start the operator."""
        self._starts, self._loop = True, asyncio.get_running_loop()
        await self.owner.submit(self._repeated(self._host))

    async def close(self) -> None:
        """Close the operator. Its process stays, for others and for decisions."""
        self._starts = False
        await self.owner.submit(self._close())

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Have a request processed there, again if the process dies."""
        if not request.rows:
            return OperatorResult()
        self._loop = asyncio.get_running_loop()
        result, counted = await self.owner.submit(self._processed(request))
        for name, value in counted:
            self.context.count(name, value)
        return result

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Have a filter decide there."""
        return self.owner.call(self._repeated(partial(self._decided, rows)))

    async def asked(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run what the operator asks of its context, in the pipeline's event loop."""
        assert self._loop is not None, "it asks in a request, or at its start"

        async def run() -> T:
            return await work()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    # -- in the process's thread

    async def _host(self) -> OperatorHost:
        """Return the process's operators, of which this one is made, and started if it was."""
        host = await self.owner.open()
        if self._made_in != self.owner.life:
            given = {name: getattr(self.context, name) for name in attrs.fields_dict(Place)}
            declared = await host.build(
                self._number, self.owner.record.name, self._settings, Place(**given), self._state
            )
            self._told(declared)
            self._made_in, self._started_in = self.owner.life, -1
        if self._starts and self._started_in != self.owner.life:
            self._told(await host.start(self._number))
            self._started_in = self.owner.life
        return host

    def _told(self, declared: Declared) -> None:
        self._declared = declared
        self.type, self.decides_by = declared.type, declared.decides_by  # type: ignore[misc]

    async def _repeated(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what has no rows that could be at fault, again if the process dies."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await work()
            except JackfieldError as error:
                if not self.owner.is_lost or not isinstance(error, WorkerLost):
                    raise
                self._warn(error)
        return await work()

    async def _processed(self, request: OperatorRequest) -> tuple[OperatorResult, Sequence[tuple[str, float]]]:
        keys, process = {row.key for row in request.rows}, self.owner
        attempts = _ATTEMPTS if not keys <= self._suspects else 2 if len(keys) == 1 else 1
        async with self._lock:
            for left in reversed(range(attempts)):
                asking = asyncio.ensure_future(self._asked(request))
                try:
                    answer = await asyncio.shield(asking)
                except WorkerLost as error:
                    if not process.is_lost:  # the operator itself raised it
                        raise
                    process.deaths += 1
                    lost = error
                    if left:
                        self._warn(error)
                except (asyncio.CancelledError, DeadlineExceeded):
                    self._made_in = -1  # it is made again, with the state before the request
                    asking.cancel()
                    await self.owner.end_if_silent()
                    await asyncio.gather(asking, return_exceptions=True)
                    raise
                else:
                    process.deaths, self._suspects = 0, self._suspects - keys
                    return answer
        if process.deaths >= _DEATHS or self._declared.compares:
            raise lost
        self._suspects |= keys
        what = f"{process.name} died with {len(keys)} rows, {_ATTEMPTS} times"
        raise OperatorError(what, code="operator.process", where=lost.where, found=lost.found, fix=lost.fix)

    async def _asked(self, request: OperatorRequest) -> tuple[OperatorResult, Sequence[tuple[str, float]]]:
        host, result = await self._host(), OperatorResult()
        updates, removed, aside, made = dict[str, Any](), dict[str, str](), dict[str, str](), list[Any]()
        for at, rows in enumerate(in_parts(request.rows, _plain)):
            await host.add(self._number, [attrs.evolve(row, values=dict(row.values)) for row in rows], at > 0)
        seconds = request.deadline_seconds + _SLACK_SECONDS
        async for part in host.process(self._number, request.batch, request.steps, seconds):
            found = part.result
            updates.update(found.updates)
            removed.update(found.removed)
            aside.update(found.set_aside)
            made.extend(found.made)
        self._state = part.state
        if part.declared is not None:
            self._told(part.declared)
        result = OperatorResult(updates=updates, removed=removed, set_aside=aside, made=tuple(made))
        return result, part.counted

    async def _decided(self, rows: Sequence[Row]) -> dict[str, str]:
        host, found = await self._host(), dict[str, str]()
        for part in in_parts(rows, _plain):
            found |= await host.decide(self._number, [attrs.evolve(row, values=dict(row.values)) for row in part])
        return found

    async def _close(self) -> None:
        if self._made_in == self.owner.life and not self.owner.is_lost:
            host = await self.owner.open()
            with suppress(JackfieldError):
                await host.close(self._number)
        self._made_in = -1

    def _warn(self, error: WorkerLost) -> None:
        text = "%s (%s): %s; it is started again [%s]"
        logging.getLogger("jackfield").warning(text, error.message, error.where, error.found, error.code)


def _plain(row: Row) -> Any:
    return [row.key, dict(row.values)]


@attrs.frozen(kw_only=True)
class ProcessRecord(PluginRecord):
    """The record of a plugin whose operators are made in another process. Its class is not imported here."""

    owner: OperatorProcess

    def build(self, settings: Mapping[str, Any], context: Any, where: str = "") -> Any:
        """Make an operator in the process."""
        config: Any = structure(self.settings_class, settings, where)
        return ProcessOperator(self.owner, settings, config, context)


@attrs.define(eq=False)
class Interpreters:
    """Finds where operators of a configuration run; those of one plugin and interpreter share a process."""

    config: RunConfig | None  #: None: there are no named environments, and logs are in the working folder
    _processes: dict[tuple[str, str], OperatorProcess] = attrs.field(factory=dict, init=False)

    def record(self, registry: Registry, name: str, given: Any, where: str) -> PluginRecord:
        """Return the record of an operator that runs where the key ``interpreter`` of its entry, or its manifest, says.

        Without either it runs here. Raise ``plugin.interpreter`` if there is no such interpreter.
        """
        record = registry.resolve(name, "operator")
        if given is None and (given := record.usable().env.python) is None:
            return registry.load("operator", name)
        if not isinstance(given, str):
            details: Any = {"where": where, "expected": "a name under environments, or a path", "found": repr(given)}
            raise ConfigError("an operator's interpreter is not a text", **details)
        python = self._python(given, where)
        if (key := (record.name, python)) not in self._processes:
            folder, options = Path("logs"), dict[str, Any]()
            if self.config is not None:
                folder, deadlines = Path(self.config.folder, "logs"), self.config.deadlines
                options = {"start_seconds": deadlines.start, "heartbeat_seconds": deadlines.heartbeat}
                options["threads"] = self.config.cluster.threads
            log = folder / f"operator-{record.name}.log"
            self._processes[key] = OperatorProcess(record, python, log, **options)
        return ProcessRecord(owner=self._processes[key], **attrs.asdict(record, recurse=False))

    def _python(self, given: str, where: str) -> str:
        environments = {} if self.config is None else self.config.environments
        if given not in environments:
            return resolve_interpreter(given, where)
        python = environment_python(environments[given].path(given))
        if not Path(python).exists():
            what, fix = f"the environment '{given}' has not been made", f"jackfield env create {given} FILE"
            details: Any = {"where": where, "expected": python, "found": "no such file"}
            raise PluginError(what, code="plugin.interpreter", fix=fix, **details)
        return python


def end_processes(places: Iterable[Operator | PluginRecord]) -> None:
    """End the processes of operators, or of records that make them; those that are here have none."""
    for place in places:
        if isinstance(place, ProcessRecord | ProcessOperator):
            place.owner.close()
