"""What addresses of OpenAI's API have in common: listening, keys, bodies, streams, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError
from jackfield.sdk.rpc import is_loopback
from jackfield_openai.text import ClientError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {"rollout.stale": 503, "rollout.stopped": 503, "rollout.failed": 500}

#: OpenAI's codes of client errors, by our codes.
_CODES = {
    "config.unknown-key": "unknown_parameter",
    "config.missing-key": "missing_required_parameter",
    "config.wrong-type": "invalid_type",
    "config.invalid-value": "invalid_value",
    "rollout.request": "invalid_value",
    "rollout.context-length": "context_length_exceeded",
    "plugin.capability": "unsupported_parameter",
}
_PARAMS = {"rollout": "prompt", "plugin": None}  #: fields, by kind of our codes
_HTTP_CODES = {404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MESSAGE_CHARACTERS = 1000


class WebServer:
    """A listening web application with a limit of connections, and a time for each header."""

    def __init__(self, app: web.Application, *, max_connections: int, idle_seconds: float) -> None:
        self._app, self._most, self._idle = app, max_connections, idle_seconds
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int, where: str) -> str:
        """Start to listen; return the base URL, which ends in ``/v1``.

        A port that is taken raises ``config.invalid-value`` at the setting ``where``.
        """
        runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(lambda: self._connection(runner), host, port)
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                "the endpoint cannot listen", where=where, found=error, fix="choose another port, or 0"
            ) from error
        self._runner = runner
        bound = self._listener.sockets[0].getsockname()[1]
        return f"http://[{host}]:{bound}/v1" if ":" in host else f"http://{host}:{bound}/v1"

    async def close(self) -> None:
        """Stop listening and end running requests. May be called again."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _connection(self, runner: web.AppRunner) -> asyncio.BaseProtocol:
        server = runner.server
        if server is None or len(server.connections) >= self._most:
            return _Full()
        loop = asyncio.get_running_loop()
        log: Any = None  # no log of accesses
        return _Connection(server, loop=loop, keepalive_timeout=self._idle, lingering_time=1.0, access_log=log)


def check_key(host: str, key: str | None, where: str) -> None:
    """Refuse to listen beyond loopback without a key (``config.invalid-value``); ``where`` is its setting."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            "an endpoint that others can reach needs a key",
            where=where,
            expected="a key, or a loopback address",
            found=f"no key, and the address {host}",
            fix=f"set {where}",
        )


def bearer(request: web.Request) -> str:
    """Return the key that a request has, or an empty text."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def same_key(given: str, key: str) -> bool:
    """Compare keys in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


async def read_json(request: web.Request, seconds: float) -> Any:
    """Return the JSON of a body; refuse one that is late, with ``ClientError``."""
    try:
        async with asyncio.timeout(seconds):
            content = await request.read()
    except TimeoutError as error:
        raise ClientError("the body did not come in time", "timeout", status=408) from error
    except web.RequestPayloadError as error:
        raise ClientError(f"the body cannot be read: {error}", "invalid_body") from error
    try:
        data = json.loads(content.decode(), parse_constant=_refuse_constant)
        if _SURROGATE.search(content):
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ClientError(f"the body is not JSON in UTF-8: {str(error)[:200]}", "invalid_json") from error
    return data


def error_response(request: web.Request, error: Exception) -> web.StreamResponse:
    """Return the answer to a request that failed; close its connection if an answer has begun."""
    if request.writer.output_size:  # no second one can follow
        request.protocol.force_close()
    found = first_error(error)
    body, status = error_body(found)
    headers = {} if getattr(found, "retry_after", None) is None else {"Retry-After": str(found.retry_after)}  # type: ignore[attr-defined]
    return web.json_response(body, status=status, headers=headers)


def error_body(error: BaseException) -> tuple[dict[str, Any], int]:
    """Return an error in OpenAI's form, and its status."""
    code, status = _CODES.get(getattr(error, "code", ""), ""), 400
    param: str | None = None
    if isinstance(error, ClientError):
        code, status, param = error.code, error.status, error.param
    elif isinstance(error, web.HTTPException):
        code, status = _HTTP_CODES.get(error.status, "invalid_request"), error.status
    elif isinstance(error, RecursionError):
        code = "invalid_json"
    elif isinstance(error, JackfieldError) and code:
        param = _PARAMS.get(error.code.partition(".")[0], None if error.where is None else str(error.where))
    elif isinstance(error, DeadlineExceeded):
        code, status = error.code, 504
    elif isinstance(error, JackfieldError):
        code, status = error.code, _STATUS.get(error.code, 500)
    else:
        code, status = "internal", 500
        logging.getLogger("jackfield").error("a request to the OpenAI endpoint failed", exc_info=error)
    told = isinstance(error, JackfieldError | ClientError | web.HTTPException)
    body = {
        "message": _message(error)[:_MESSAGE_CHARACTERS] if told else "internal error",
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": None if param is None else str(param),
        "code": code,
    }
    return {"error": body}, status


def _message(error: BaseException) -> str:
    """Return a message for clients, without our codes and fixes, which name settings of the run."""
    if not isinstance(error, JackfieldError) or error.code not in _CODES:
        return str(error)
    parts = [f"{word} {what}" for word, what in (("expected", error.expected), ("found", error.found)) if what]
    return ": ".join([error.message, *(["; ".join(parts)] if parts else [])])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class _Connection(web.RequestHandler):
    """A connection. Input that is not HTTP is answered in OpenAI's form and logged in one line."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to a request that could not be read."""
        if status >= 500 or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        text = " ".join((message or str(exc)).split())[:200]
        logging.getLogger("jackfield").info("a client of the OpenAI endpoint sent a malformed request: %s", text)
        body, _ = error_body(ClientError(f"the request is malformed: {text}", "invalid_request", status=status))
        response = web.json_response(body, status=status)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Ignore the unread rest of a bad body: it is no failure of the server, and the client has its answer."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError | HttpProcessingError):
            super().log_exception(*args, **kw)


class _Full(asyncio.Protocol):
    """A connection above the limit. It gets 503 and is closed unread."""

    def connection_made(self, transport: Any) -> None:
        error = {"message": "too many connections", "type": "server_error", "param": None}
        body = json.dumps({"error": {**error, "code": "too_many_connections"}}).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        transport.write(head.encode() + b"\r\nConnection: close\r\nRetry-After: 1\r\n\r\n" + body)
        transport.close()


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group of errors, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def send_event(response: web.StreamResponse, event: dict[str, Any], name: str | None = None) -> None:
    """Write one event of a stream, with its name where it has one."""
    head = b"" if name is None else f"event: {name}\n".encode()
    await response.write(head + b"data: " + json.dumps(event).encode() + b"\n\n")
