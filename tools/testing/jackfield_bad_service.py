"""A real HTTP service on loopback that misbehaves: its answers are scripted, one fault after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import attrs
from aiohttp import web

from jackfield.clock import Clock, too_late

T = TypeVar("T")

Answers = Callable[[Any], Any]  #: makes the JSON of a right answer out of the JSON of a request

#: What a fault does, for tables of the documentation.
FAULTS = {
    "busy": "429 with Retry-After: 7",
    "broken": "500",
    "unavailable": "503 with Retry-After: 2.5",
    "refused": "400",
    "wrong key": "401 with the key in its text",
    "redirect": "a redirection to another address",
    "garbage": "200 with a text that is no JSON",
    "wrong type": "200 with the right JSON as text/html",
    "half": "half of the body, then the connection is closed",
    "nothing": "the connection is closed before the answer",
    "late": "the right answer, after the deadline",
    "never": "no answer",
    "twice": "the right answer, twice on the same connection",
    "two bodies": "the right JSON twice in one body",
    "huge": "a body without end",
    "empty": "200 without a body",
    "list": "200 with JSON of another shape",
}


class BadService:
    """A service that behaves as the next fault of ``script`` says, and well when there is none."""

    def __init__(self, right: Answers) -> None:
        self.right = right
        self.script: list[str | Answers] = []  #: faults, or functions that make the JSON of an answer
        self.bodies: list[Any] = []  #: of all requests, in order
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []  #: of GET requests
        self.address = ""
        self._released = asyncio.Event()
        self._ended = asyncio.Event()
        self.hanging = asyncio.Event()  #: set when an answer is late, or never comes

    def answer_late(self) -> None:
        """Give the answers that are late."""
        self._released.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, or misbehave."""
        if request.method == "GET":
            self.paths.append(request.path_qs)
            return web.json_response({"object": "list", "data": []})
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        fault = self.script.pop(0) if self.script else self.right
        if not isinstance(fault, str):
            return web.json_response(fault(body))
        method = getattr(self, "_" + fault.replace(" ", "_"))
        answered: web.StreamResponse = await method(request, body)
        return answered

    def end(self) -> None:
        """End what never answers."""
        self._ended.set()

    async def _busy(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "7"}, text="slow down")

    async def _broken(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(status=500, text="oh")

    async def _unavailable(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "2.5"}, text="starting")

    async def _refused(self, request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)

    async def _wrong_key(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(status=401, text=f"wrong key: {request.headers.get('Authorization')}")

    async def _redirect(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(status=307, headers={"Location": f"{self.address}/elsewhere"})

    async def _garbage(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(text="<html>Bad Gateway</html>")

    async def _wrong_type(self, request: web.Request, body: Any) -> web.Response:
        return web.Response(body=web.json_response(self.right(body)).body, content_type="text/html")

    async def _empty(self, request: web.Request, body: Any) -> web.Response:
        return web.Response()

    async def _list(self, request: web.Request, body: Any) -> web.Response:
        return web.json_response([1, 2])

    async def _half(self, request: web.Request, body: Any) -> web.Response:
        return self._cut(
            request, b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"sc'
        )

    async def _nothing(self, request: web.Request, body: Any) -> web.Response:
        return self._cut(request, b"")

    async def _late(self, request: web.Request, body: Any) -> web.Response:
        self.hanging.set()
        await self._released.wait()
        return web.json_response(self.right(body))

    async def _never(self, request: web.Request, body: Any) -> web.Response:
        self.hanging.set()
        await self._ended.wait()
        return web.Response()

    async def _twice(self, request: web.Request, body: Any) -> web.Response:
        content = web.json_response(self.right(body)).body
        assert isinstance(content, bytes)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        assert request.transport is not None
        request.transport.write(head.encode() + content)
        return web.json_response(self.right(body))

    async def _two_bodies(self, request: web.Request, body: Any) -> web.Response:
        content = web.json_response(self.right(body)).body
        assert isinstance(content, bytes)
        return web.Response(body=content + content, content_type="application/json")

    async def _huge(self, request: web.Request, body: Any) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await answer.write(b" " * 2**20)
        return answer

    @staticmethod
    def _cut(request: web.Request, sent: bytes) -> web.Response:
        assert request.transport is not None
        request.transport.write(sent)
        request.transport.close()
        return web.Response()


@attrs.define
class DeadlineOfHanging(Clock):
    """A clock whose waits reach their deadline as soon as the service hangs, so that no test waits for one."""

    service: BadService

    async def wait_for(self, awaitable: Awaitable[T], seconds: float, waiting_for: str) -> T:
        """Await ``awaitable`` until the service hangs."""
        call, hanging = asyncio.ensure_future(awaitable), asyncio.ensure_future(self.service.hanging.wait())
        try:
            await asyncio.wait([call, hanging], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            self.service.hanging.clear()
            raise too_late(seconds, waiting_for)
        finally:
            for task in (call, hanging):
                task.cancel()
            await asyncio.gather(call, hanging, return_exceptions=True)


@contextlib.asynccontextmanager
async def bad_service(right: Answers) -> AsyncIterator[BadService]:
    """Run a service for a test."""
    service = BadService(right)
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", service.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        service.address = f"http://{host}:{port}"
        yield service
    finally:
        service.end()
        await runner.cleanup()
