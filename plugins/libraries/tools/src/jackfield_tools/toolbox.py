"""The tools of a run in one agent worker, and in one rollout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolCall, ToolResult
from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError, did_you_mean
from jackfield_tools.settings import Tool, read_tools
from jackfield_tools.sources import Refused, Session, Source, as_result

_LOG = logging.getLogger("jackfield")


def open_sources(settings: Mapping[str, Any]) -> list[Source]:
    """Return the sources of the section's entries, which are not started."""
    return [_source(tool) for tool in read_tools(settings)]


def _source(tool: Tool) -> Source:
    if tool.kind == "mcp":
        from jackfield_tools.mcp_servers import McpSource

        return McpSource(tool)
    if tool.kind == "sandbox":
        from jackfield_tools.sandboxes import SandboxSource

        return SandboxSource(tool)
    if tool.kind == "search":
        from jackfield_tools.search import SearchSource

        return SearchSource(tool)
    from jackfield_tools.functions import ClassSource, FunctionSource, ProcessSource

    if tool.kind == "class":
        return ClassSource(tool)
    return ProcessSource(tool) if tool.limits.process else FunctionSource(tool)


def unique_names(sources: Sequence[Source]) -> dict[str, Source]:
    """Return the sources by the names of their tools, as far as these are known; no two tools may have one name."""
    found: dict[str, Source] = {}
    for source in sources:
        for name in source.schemas:
            if (other := found.get(name)) is not None:
                message = f"two tools have the name {name}"
                places = f"{other.tool.where} and {source.tool.where}"
                raise ConfigError(message, where="tools", found=places, fix="give one of them a prefix")
            found[name] = source
    return found


class Toolbox:
    """The tools of one agent worker.

    ``settings`` is the section ``tools`` of a run; errors of it are ``config.*``.
    """

    def __init__(self, settings: Mapping[str, Any], context: AgentWorkerContext) -> None:
        self._sources = open_sources(settings)
        self._context = context
        self._by_name = unique_names(self._sources)
        self._schemas: tuple[Mapping[str, Any], ...] = ()

    async def start(self) -> None:
        """Start processes, sessions and indexes; ``tools.start`` if that fails, and nothing is left running."""
        try:
            for source in self._sources:
                await source.start(self._context)
            self._by_name = unique_names(self._sources)
        except BaseException:
            await self.close()
            raise
        self._schemas = tuple(schema for source in self._sources for schema in source.schemas.values())

    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> RolloutTools:
        """Return the tools of one rollout; ``fields`` are those of its task."""
        return RolloutTools(self._by_name, self._schemas, context, fields)

    async def close(self) -> None:
        """End everything that was started. It may be called again."""
        for source in reversed(self._sources):
            try:
                await source.close()
            except Exception as error:
                _LOG.warning("the tool %s did not close: %s: %s", source.tool.name, type(error).__name__, error)


class RolloutTools:
    """A :class:`jackfield.abc.agent.ToolSession` over the tools of a worker."""

    def __init__(
        self,
        by_name: Mapping[str, Source],
        schemas: tuple[Mapping[str, Any], ...],
        context: AgentContext,
        fields: Mapping[str, Any],
    ) -> None:
        self.schemas = schemas
        self._by_name, self._context, self._fields = by_name, context, fields
        self._sessions: dict[str, Session] = {}

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool under its deadline; whatever goes wrong is a result with ``is_error``."""
        context, began = self._context, self._context.clock.time()
        source, result = self._by_name.get(call.name), None
        try:
            result = await self._result(source, call)
            return result
        finally:
            is_error = result is None or result.is_error  # without a result, the rollout was cancelled
            name = "unknown" if source is None else call.name
            context.metric(f"tools/{name}/calls", 1.0)
            context.metric(f"tools/{name}/errors", float(is_error))
            for metric, value in ({} if result is None else result.metrics).items():
                context.metric(f"tools/{name}/{metric}", value)
            seconds = round(context.clock.time() - began, 6)
            event: dict[str, Any] = {"tool": call.name, "arguments": call.arguments, "seconds": seconds}
            context.event("tool", **event, is_error=is_error)

    async def _result(self, source: Source | None, call: ToolCall) -> ToolResult:
        if source is None:
            names = ", ".join(self._by_name) or "none"
            hint = did_you_mean(call.name, self._by_name)
            return _error(f"there is no tool {call.name!r}{hint}; the tools are: {names}")
        arguments: Any = call.arguments
        if not isinstance(arguments, Mapping):
            return _error(f"the arguments of {call.name} must be a JSON object")
        limits, clock, free = source.tool.limits, self._context.clock, source.places.acquire()
        try:
            if source.places.locked():
                await clock.wait_for(free, limits.wait_seconds, f"a free place of the tool {call.name}")
            else:  # at once, without a timer
                await free
        except DeadlineExceeded as error:
            return _error(f"{error.message}: too many calls run")
        try:
            return _cut(await self._made(source, call), limits.max_characters)
        finally:
            source.places.release()

    async def _made(self, source: Source, call: ToolCall) -> ToolResult:
        session = self._sessions.get(source.tool.name)
        if session is None:
            session = self._sessions[source.tool.name] = source.session(self._context, self._fields)
        seconds = source.tool.limits.seconds
        try:
            return as_result(await session.call(call.name, call.arguments, seconds))
        except Refused as error:
            return _error(str(error))
        except DeadlineExceeded as error:
            if f"the tool {call.name}" in error.message:
                return _error(f"{call.name} did not answer within {seconds:g} s")
            return _error(f"{call.name} failed: {error.message}")
        except JackfieldError as error:
            return _error(f"{call.name} failed: {error.message}")
        except Exception as error:  # of any kind: it is the user's code
            _LOG.info("the tool %s raised", call.name, exc_info=True)
            return _error(f"{call.name} raised {type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the objects of the rollout. It may be called again."""
        sessions, self._sessions = self._sessions, {}
        for name, session in sessions.items():
            try:
                await session.close()
            except Exception as error:
                _LOG.warning("the tool %s did not close: %s: %s", name, type(error).__name__, error)


def _error(text: str) -> ToolResult:
    return ToolResult(text=text, is_error=True)


def _cut(result: ToolResult, most: int) -> ToolResult:
    """Return the result with at most so many characters, and a note of what is missing."""
    missing = len(result.text) - most
    if missing <= 0:
        return result
    return attrs.evolve(result, text=f"{result.text[:most]}\n… ({missing} more characters were cut)")
