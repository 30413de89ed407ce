"""MCP servers as tools: a session per agent worker, which is opened again when its server has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import attrs
import httpx2
import jsonschema  # type: ignore[import-untyped]
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolResult
from jackfield.errors import DeadlineExceeded
from jackfield_tools.schemas import schema
from jackfield_tools.settings import McpServer, Tool
from jackfield_tools.sources import Arguments, Refused, Session, Source
from jackfield_user_code.commands import tied_command

_CLOSE_SECONDS = 10.0  #: for a session to end
_ALIVE_SECONDS = 5.0  #: a server answers a question within this time after a late call, or is replaced
_LOG = logging.getLogger("jackfield")


class _Connection:
    """A session with a server. One task opens and closes it, as the MCP library wants it."""

    def __init__(self, server: McpServer, context: AgentWorkerContext, name: str) -> None:
        self._server, self._context, self._name = server, context, name
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self.why = "its server ended"
        self._task = asyncio.create_task(self._keep(), name=f"the MCP session of {name}")

    @property
    def has_ended(self) -> bool:
        """Return whether no calls can be made any longer."""
        return self._task.done() or self._leave.is_set()

    async def client(self, seconds: float) -> Client:
        """Return the client when the session is open."""
        opened = asyncio.shield(self._opened)
        return await self._context.clock.wait_for(opened, seconds, f"the MCP server of {self._name}")

    async def _keep(self) -> None:
        try:
            async with self._transport() as transport, Client(transport) as client:
                self._opened.set_result(client)
                await self._leave.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.why = _cause(error)
            if not self._opened.done():
                self._opened.set_exception(ConnectionError(self.why))
                self._opened.exception()  # it may be that none waits for it
        finally:
            self._leave.set()
            if not self._opened.done():
                self._opened.cancel()

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        server = self._server
        if server.command is not None:
            program, *arguments = tied_command(server.command)  # it ends with this process
            parameters = StdioServerParameters(command=program, args=arguments, env=dict(server.env), cwd=server.cwd)
            log = f"{self._context.logs}-tool-{self._name}.log" if self._context.logs else "/dev/null"
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as output:  # the library wants a file of text, and uses only its descriptor
                yield self._watched(stdio_client(parameters, errlog=output))  # type: ignore[arg-type]
            return
        assert server.url is not None
        headers = dict(server.headers)
        if server.api_key_env is not None:
            headers["Authorization"] = f"Bearer {self._context.secret(server.api_key_env)}"
        timeout = httpx2.Timeout(30.0, read=None)  # calls have deadlines of their own
        async with httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as http:
            yield self._watched(streamable_http_client(server.url, http_client=http))

    @contextlib.asynccontextmanager
    async def _watched(self, transport: Any) -> AsyncIterator[Any]:
        """Pass a transport's streams on, and notice the end of what the server sends."""
        async with transport as (incoming, outgoing):
            send, receive = anyio.create_memory_object_stream[Any](0)

            async def forward() -> None:
                try:
                    async with send:
                        async for message in incoming:
                            await send.send(message)
                except anyio.BrokenResourceError:
                    pass
                finally:
                    self._leave.set()

            async with anyio.create_task_group() as group:
                group.start_soon(forward)
                yield receive, outgoing
                group.cancel_scope.cancel()

    async def call(self, client: Client, name: str, arguments: Arguments) -> Any:
        """Call a tool; ``ConnectionError`` if the session ends meanwhile."""
        calling = asyncio.ensure_future(client.call_tool(name, dict(arguments)))
        leaving = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait({calling, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done() and not calling.cancelled():
                return calling.result()
            raise ConnectionError(self.why)
        finally:
            calling.cancel()
            leaving.cancel()
            await asyncio.wait({calling, leaving})
            if not calling.cancelled():
                calling.exception()  # it failed because the session has ended

    async def check(self) -> None:
        """End the session if its server does not answer. Its list of tools is asked for: newer ones know no ping."""
        if self.has_ended or not self._opened.done():
            return
        try:
            asking = self._opened.result().session.list_tools()
            await self._context.clock.wait_for(asking, _ALIVE_SECONDS, f"the MCP server of {self._name}")
        except DeadlineExceeded:
            self.why = f"its server did not answer within {_ALIVE_SECONDS:g} s after a late call"
            _LOG.warning("the MCP server of %s hangs, and is ended: %s", self._name, self.why)
            await self.close()
        except Exception as error:  # an answer, or the end of the session
            _LOG.debug("the MCP server of %s was asked after a late call: %s", self._name, error)

    async def close(self) -> None:
        """End the session, and the server that it has started."""
        self._leave.set()
        done, _ = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)


def _cause(error: BaseException) -> str:
    """Return the first plain reason in groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@attrs.frozen(kw_only=True)
class _Listed:
    """A tool of the server."""

    name: str  #: the server's
    schema: Mapping[str, Any]
    arguments: Any  #: a validator of its arguments
    repeats: bool  #: whether a call may be made twice


class McpSource(Source):
    """The tools of an MCP server."""

    def __init__(self, tool: Tool) -> None:
        super().__init__(tool)
        self._context: AgentWorkerContext | None = None
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()
        self._checking: asyncio.Task[None] | None = None
        self.tools: dict[str, _Listed] = {}

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas that the server lists, after the start."""
        return {name: listed.schema for name, listed in self.tools.items()}

    async def start(self, context: AgentWorkerContext) -> None:
        """Start or reach the server, and read its list of tools."""
        self._context = context
        seconds = self.tool.limits.start_seconds
        fix = "run the command by hand; its output is in the worker's logs" if self.tool.target.command else None
        try:
            _, client = await self.client()
            listed = await context.clock.wait_for(_list(client), seconds, f"the MCP server of {self.tool.name}")
        except (DeadlineExceeded, ConnectionError, MCPError) as error:
            raise self.cannot_start(error, fix) from error
        known = {each.name: each for each in listed}
        limits = self.tool.limits
        if missing := {*(limits.include or ()), *limits.exclude} - known.keys():
            raise self.cannot_start(f"its server has no tool {min(missing)}; it has {', '.join(known) or 'none'}")
        chosen = known if limits.include is None else {name: known[name] for name in limits.include}
        for name, each in chosen.items():
            if name not in limits.exclude:
                self.tools[f"{limits.prefix}{name}"] = self._described(each)

    def _described(self, each: Any) -> _Listed:
        notes, limits = each.annotations, self.tool.limits
        repeats = limits.repeat or bool(notes and (notes.read_only_hint or notes.idempotent_hint))
        about = limits.description if limits.description is not None else (each.description or "")
        content = _without_titles(each.input_schema)
        return _Listed(
            name=each.name,
            schema=schema(f"{limits.prefix}{each.name}", about, content),
            arguments=jsonschema.validators.validator_for(each.input_schema)(each.input_schema),
            repeats=repeats,
        )

    def check(self) -> None:
        """Replace a server that hangs, after a call that was late. One check runs at a time."""
        if self._connection is not None and (self._checking is None or self._checking.done()):
            checking = self._connection.check()
            self._checking = asyncio.create_task(checking, name=f"the check of the MCP server of {self.tool.name}")

    async def client(self) -> tuple[_Connection, Client]:
        """Return an open session and its client; open another one if the server has ended."""
        assert self._context is not None
        async with self._opening:
            if self._connection is None or self._connection.has_ended:
                if self._connection is not None:
                    why = self._connection.why
                    _LOG.warning("the MCP session of %s is opened again: %s", self.tool.name, why)
                    await self._connection.close()
                self._connection = _Connection(self.tool.target, self._context, self.tool.name)
            connection = self._connection
        try:
            return connection, await connection.client(self.tool.limits.start_seconds)
        except (DeadlineExceeded, ConnectionError):  # a call that is cancelled leaves the opening to others
            await connection.close()
            raise

    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
        """Return the session of a rollout; all rollouts of a worker share the server."""
        return _McpSession(self, context)

    async def close(self) -> None:
        """End the session, and the server that it has started."""
        connection, self._connection = self._connection, None
        checking, self._checking = self._checking, None
        if checking is not None:
            checking.cancel()
            await asyncio.wait({checking})
        if connection is not None:
            await connection.close()


class _McpSession(Session):
    def __init__(self, source: McpSource, context: AgentContext) -> None:
        self._source, self._context = source, context

    async def call(self, name: str, arguments: Arguments, seconds: float) -> Any:
        listed = self._source.tools[name]
        if problem := jsonschema.exceptions.best_match(listed.arguments.iter_errors(dict(arguments))):
            place = f" at {problem.json_path.removeprefix('$').removeprefix('.')}" if problem.path else ""
            raise Refused(f"wrong arguments for {name}: {problem.message}{place}")
        try:
            made = self._made(name, listed, arguments)
            return await self._context.clock.wait_for(made, seconds, f"the tool {name}")
        except DeadlineExceeded:
            self._source.check()
            raise

    async def _made(self, name: str, listed: _Listed, arguments: Arguments) -> ToolResult:
        for attempt in (1, 2):
            try:
                connection, client = await self._source.client()
            except (DeadlineExceeded, ConnectionError) as error:
                raise Refused(f"{name} was not called: its server cannot be reached ({error})") from error
            try:
                return _result(await connection.call(client, listed.name, arguments))
            except (MCPError, ConnectionError) as error:
                # the code of the connection's end; other codes are the server's answer
                lost = not isinstance(error, MCPError) or error.error.code == -32000
                if lost and listed.repeats and attempt == 1:
                    continue
                end = ": the connection to its server was lost during the call" if lost else f": {error}"
                raise Refused(f"{name} failed{end}") from error
        raise AssertionError


async def _list(client: Client) -> list[Any]:
    found: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found


def _without_titles(content: Any) -> Any:
    """Return a schema without the titles that pydantic adds, which only cost tokens."""
    if isinstance(content, list):
        return [_without_titles(each) for each in content]
    if not isinstance(content, dict):
        return content
    titled = isinstance(content.get("title"), str)
    return {key: _without_titles(each) for key, each in content.items() if not (titled and key == "title")}


def _result(found: Any) -> ToolResult:
    texts, images = [], []
    for part in found.content:
        if part.type == "text":
            texts.append(part.text)
        elif part.type == "image":
            url = f"data:{part.mime_type};base64,{part.data}"
            images.append({"type": "image_url", "image_url": {"url": url}})
        elif part.type == "resource" and hasattr(part.resource, "text"):
            texts.append(part.resource.text)
        else:
            texts.append(f"[{part.type}]")
    return ToolResult(text="\n".join(texts), is_error=bool(found.is_error), images=tuple(images))
