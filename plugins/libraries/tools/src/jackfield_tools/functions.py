"""Python functions and classes as tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolResult
from jackfield.clock import Clock
from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError
from jackfield_tools.schemas import Signature, describe, load
from jackfield_tools.settings import Tool, refused
from jackfield_tools.sources import Arguments, Refused, Session, Source, Threads, awaited
from jackfield_user_code import UserCodePool, WorkerLimits, WorkerResult, hold


async def _called(function: Callable[..., Any], arguments: Arguments, threads: Threads, name: str) -> Any:
    if inspect.iscoroutinefunction(function):
        return await awaited(function(**arguments))
    value = await threads.run(functools.partial(function, **arguments), name)
    return await awaited(value) if inspect.isawaitable(value) else value


def _read(signature: Signature, arguments: Arguments) -> dict[str, Any]:
    try:
        return signature.read(arguments)
    except ValueError as error:
        raise Refused(f"wrong arguments for {signature.name}: {error}") from error


class FunctionSource(Source):
    """A function of the worker's process; one that is no coroutine function runs in threads."""

    def __init__(self, tool: Tool) -> None:
        super().__init__(tool)
        where = f"{tool.where}.function"
        self._function = load(tool.target, where)
        if not callable(self._function):
            found = type(self._function).__name__
            raise ConfigError(f"{tool.target} is no function", where=where, expected="a function", found=found)
        self._signature = describe(self._function, tool.name, where, tool.limits.description)
        self._threads = Threads(tool.concurrency)

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The function's schema."""
        return {self.tool.name: self._signature.schema}

    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
        """Return the session of a rollout; a function has no state."""
        return _FunctionSession(self._function, self._signature, self._threads, context.clock)


class _FunctionSession(Session):
    def __init__(self, function: Callable[..., Any], signature: Signature, threads: Threads, clock: Clock) -> None:
        self._function, self._signature, self._threads, self._clock = function, signature, threads, clock

    async def call(self, name: str, arguments: Arguments, seconds: float) -> Any:
        given = _read(self._signature, arguments)
        calling = _called(self._function, given, self._threads, name)
        return await self._clock.wait_for(calling, seconds, f"the tool {name}")


class ProcessSource(Source):
    """A function in processes of its own, which are killed at the deadline."""

    def __init__(self, tool: Tool) -> None:
        super().__init__(tool)
        self._pool: UserCodePool | None = None
        self._schema: Mapping[str, Any] | None = None

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The function's schema, after the start."""
        return {} if self._schema is None else {self.tool.name: self._schema}

    async def start(self, context: AgentWorkerContext) -> None:
        """Start a process, and ask it for the schema."""
        tool, settings = self.tool, self.tool.limits
        limits = WorkerLimits(
            memory_bytes=settings.memory_bytes,
            start_seconds=settings.start_seconds,
            heartbeat_seconds=context.heartbeat_seconds,
        )
        keywords = {"target": tool.target, "name": tool.name, "description": settings.description}
        self._pool = UserCodePool(
            "jackfield_tools._process:Function", workers=tool.concurrency, method="run", keywords=keywords,
            limits=limits, clock=context.clock, logs=f"{context.logs}-tool-{tool.name}" if context.logs else None,
        )  # fmt: skip
        try:
            await self._pool.start()
        except JackfieldError as error:
            raise self.cannot_start(error) from error
        found = await self._pool.call({"task": None}, settings.start_seconds, name="its schema")
        if found.status != "ok" or "error" in found.value:
            raise self.cannot_start(found.error if found.status != "ok" else found.value["error"])
        self._schema = found.value["schema"]

    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
        """Return the session of a rollout; a function has no state."""
        assert self._pool is not None
        return _ProcessSession(self._pool, self.tool.limits.repeat)

    async def close(self) -> None:
        """Kill the processes."""
        if self._pool is not None:
            await self._pool.close()


class _ProcessSession(Session):
    def __init__(self, pool: UserCodePool, repeat: bool) -> None:
        self._pool, self._repeat = pool, repeat

    async def call(self, name: str, arguments: Arguments, seconds: float) -> Any:
        task, shown = {"task": dict(arguments)}, f"the tool {name}"
        if self._repeat:
            found = await self._pool.call(task, seconds, name=shown)
        else:
            found = await self._called_once(task, seconds, shown)
        if found.status == "timeout":
            raise DeadlineExceeded(f"waited {seconds:g} s for the tool {name}")
        if found.status != "ok":
            raise Refused(f"{name} failed: {(found.error or 'no reason').strip().splitlines()[0]}")
        if "refused" in found.value:
            raise Refused(found.value["refused"])
        return ToolResult(**{**found.value["result"], "images": tuple(found.value["result"]["images"])})

    async def _called_once(self, task: Mapping[str, Any], seconds: float, shown: str) -> WorkerResult:
        """Make a call in a process that is held for it, because the pool would repeat a call whose process died."""
        held = await hold(self._pool)
        try:
            return await held.call(task, seconds, shown)
        finally:
            await held.release()


class ClassSource(Source):
    """A class whose public methods are tools; each rollout has an object, made at the first call."""

    def __init__(self, tool: Tool) -> None:
        super().__init__(tool)
        where = f"{tool.where}.class"
        self._class = load(tool.target, where)
        if not isinstance(self._class, type):
            found = type(self._class).__name__
            raise ConfigError(f"{tool.target} is no class", where=where, expected="a class", found=found)
        self._signatures = dict(self._describe(tool, where))
        self._check_settings(tool)
        self._threads = Threads(tool.concurrency)

    def _check_settings(self, tool: Tool) -> None:
        """Refuse settings that the constructor does not take, and those that it needs and does not get."""
        try:
            signature = inspect.signature(self._class)
        except ValueError:  # a class that is not written in Python may have none
            return
        try:
            signature.bind(**tool.limits.settings)
        except TypeError as error:
            message = f"{tool.target} cannot be made with these settings: {error}"
            found = ", ".join(tool.limits.settings) or "no settings"
            raise refused(f"{tool.where}.settings", message, expected=str(signature), found=found) from error

    def _describe(self, tool: Tool, where: str) -> list[tuple[str, tuple[str, Signature]]]:
        settings = tool.limits
        methods = [name for name in dir(self._class) if not name.startswith("_") and name not in ("start", "close")]
        methods = [name for name in methods if callable(getattr(self._class, name))]
        for name in (*(settings.include or ()), *settings.exclude):
            if name not in methods:
                known = ", ".join(methods) or "no public methods"
                raise ConfigError(f"{tool.target} has no method {name}", where=tool.where, expected=known, found=name)
        found = []
        for method in methods if settings.include is None else settings.include:
            if method in settings.exclude:
                continue
            plain = isinstance(inspect.getattr_static(self._class, method), types.FunctionType)
            name = f"{settings.prefix}{method}"
            signature = describe(getattr(self._class, method), name, where, settings.description, bound=not plain)
            found.append((name, (method, signature)))
        if not found:
            raise ConfigError(f"{tool.target} has no tools", where=where, expected="a class with public methods")
        return found

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the methods."""
        return {name: signature.schema for name, (_, signature) in self._signatures.items()}

    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
        """Return the session of a rollout, with an object of its own."""
        make = functools.partial(self._class, **self.tool.limits.settings)
        return _Object(make, self._signatures, self._threads, context.clock, fields, self.tool.limits.parallel)


class _Object(Session):
    """The object of one rollout. Its methods run one after the other, unless they may be parallel."""

    def __init__(
        self, make: Callable[[], Any], signatures: Mapping[str, tuple[str, Signature]], threads: Threads, clock: Clock,
        fields: Mapping[str, Any], parallel: bool,
    ) -> None:  # fmt: skip
        self._make, self._signatures, self._threads, self._clock = make, signatures, threads, clock
        self._fields, self._parallel = fields, parallel
        self._object: Any = None
        self._turn = asyncio.Lock()
        self._broken: str | None = None  #: why the object cannot be used any longer

    async def call(self, name: str, arguments: Arguments, seconds: float) -> Any:
        method, signature = self._signatures[name]
        given = _read(signature, arguments)
        return await self._clock.wait_for(self._called(name, method, given), seconds, f"the tool {name}")

    async def _called(self, name: str, method: str, arguments: Arguments) -> Any:
        async with self._turn:
            await self._ready(name)
            if not self._parallel:
                return await self._made(name, method, arguments)
        return await self._made(name, method, arguments)

    async def _made(self, name: str, method: str, arguments: Arguments) -> Any:
        if self._broken is not None:
            raise Refused(f"{name} was not called: {self._broken}")
        try:
            return await _called(getattr(self._object, method), arguments, self._threads, name)
        except asyncio.CancelledError:  # it may still run in its thread, or have stopped half-way
            self._broken = f"an earlier call of {name} did not end"
            raise

    async def _ready(self, name: str) -> None:
        if self._object is not None or self._broken is not None:
            return
        try:
            made = await self._threads.run(self._make, name)
            if (start := getattr(made, "start", None)) is not None:
                await _called(start, {"fields": dict(self._fields)}, self._threads, name)
        except BaseException as error:
            self._broken = f"its object could not be made ({type(error).__name__}: {error})"
            raise
        self._object = made

    async def close(self) -> None:
        """Call the object's ``close``, if it has one."""
        made, self._object = self._object, None
        self._broken = self._broken or "the rollout has ended"
        if (close := getattr(made, "close", None)) is not None:
            closing = _called(close, {}, self._threads, "close")
            await self._clock.wait_for(closing, 30.0, f"close of {type(made).__name__}")
