"""The web server: routes, keys, deadlines, errors and metrics around a rollout server.

``POST /v1/completions`` and ``/v1/chat/completions`` (whole or streamed), ``GET /v1/models``, ``/health`` and, for
Prometheus, ``/metrics``. A client that leaves ends its requests. With ``openai.collect`` answers are kept as samples,
and ``POST /v1/feedback`` takes users' rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import attrs
from aiohttp import web
from aiohttp.http import HttpProcessingError

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest
from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError, RolloutError
from jackfield.sdk.rpc import is_loopback
from jackfield_openai.bodies import Answer, Body, ChatBody, Choice, CompletionBody, read_body
from jackfield_openai.collecting import Collector
from jackfield_openai.metrics import Metrics
from jackfield_openai.settings import EndpointConfig
from jackfield_openai.text import ClientError, ServedTokenizer, refused

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
_READING_SECONDS = 30.0  #: time for a client to read an answer, after the deadline for generating it
_MESSAGE_CHARACTERS = 1000
_OPEN = frozenset({"/health"})  #: without a key: load balancers ask


class OpenAIEndpoint:
    """The endpoint of one started rollout server. The tokenizer's default is that of the model's folder."""

    def __init__(
        self, server: BaseRolloutServer, config: EndpointConfig, tokenizer: ServedTokenizer | None = None
    ) -> None:
        self._server = server
        self._config = config
        self._context = server.context
        self._tokenizer = tokenizer
        self._name = config.model_name or server.context.model.path.rstrip("/").rpartition("/")[2]
        self._metrics = Metrics(server.context.replica)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        folder, lines = config.collect, config.collect_lines
        self._collector = None if folder is None else Collector(folder, server.context.replica, lines)
        self._encoding = asyncio.Lock()  #: one text at a time, on a thread
        self._requests = 0

    async def start(self) -> str:
        """Start to listen; return the base URL, which ends in ``/v1``.

        It raises ``config.invalid-value`` without a key beyond loopback, or if the port is taken, and
        ``rollout.request`` if the model's folder has no tokenizer.
        """
        host, context = self._context.host, self._context
        if self._config.api_key is None and not is_loopback(host):
            raise ConfigError(
                "an endpoint that others can reach needs a key",
                where="openai.api_key",
                expected="a key, or a loopback address",
                found=f"no key, and the address {host}",
                fix="set openai.api_key",
            )
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, context.model.path, context.model)
        if self._collector is not None:
            self._collector.start()
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/v1/completions", functools.partial(self._answer, cls=CompletionBody)),
                web.post("/v1/chat/completions", functools.partial(self._answer, cls=ChatBody)),
                web.post("/v1/feedback", self._feedback),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._tell_metrics),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        port = self._config.port + context.replica if self._config.port else 0
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(lambda: self._connection(runner), host, port)
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                "the endpoint cannot listen", where="openai.port", found=error, fix="choose another port, or 0"
            ) from error
        self._runner = runner
        bound = self._listener.sockets[0].getsockname()[1]
        return f"http://[{host}]:{bound}/v1" if ":" in host else f"http://{host}:{bound}/v1"

    def _connection(self, runner: web.AppRunner) -> asyncio.BaseProtocol:
        server = runner.server
        if server is None or len(server.connections) >= self._config.max_connections:
            return _Full()
        idle, loop = self._config.idle_seconds, asyncio.get_running_loop()
        log: Any = None  # no log of accesses
        return _Connection(server, loop=loop, keepalive_timeout=idle, lingering_time=1.0, access_log=log)

    async def close(self) -> None:
        """Stop listening and end running requests. May be called again."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._collector is not None:
            await self._collector.close()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "jackfield"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        report = await self._server.health()
        return web.json_response(attrs.asdict(report), status=200 if report.healthy else 503)

    async def _tell_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.text(await self._server.health(), self._collector), content_type="text/plain"
        )

    async def _answer(self, request: web.Request, cls: type[Body]) -> web.StreamResponse:
        body = read_body(cls, await self._read(request))
        if self._config.model_name is not None and body.model != self._name:
            message = f"the model {str(body.model)[:200]!r} does not exist; this is {self._name!r}"
            raise ClientError(message, "model_not_found", "model", 404)
        if body.prompt_count * body.choices > self._config.max_choices:
            count = f"{body.prompt_count} prompts x {body.choices}"
            raise refused("n", f"at most {self._config.max_choices} answers (prompts x n)", count)
        assert self._tokenizer is not None
        tokenizer = self._tokenizer
        async with self._encoding:  # a long text takes seconds; others are answered meanwhile
            encoded = await asyncio.to_thread(body.prompts, tokenizer)
        prompts = [prompt for prompt in encoded for _ in range(body.choices)]
        choices = [Choice(index, prompt, body, tokenizer) for index, prompt in enumerate(prompts)]
        answer = Answer(body, body.model or self._name, choices)
        whole = self._streamed(request, answer) if body.stream else self._collected(request, answer)
        reading = f"a client to read {answer.id}"
        done = await self._context.clock.wait_for(whole, self._config.request_seconds + _READING_SECONDS, reading)
        if self._collector is not None:
            self._collector.keep(answer)
        return done

    async def _feedback(self, request: web.Request) -> web.StreamResponse:
        if self._collector is None:
            raise ClientError("answers are not collected here (openai.collect)", "unknown_url", status=404)
        self._collector.reward(await self._read(request))
        return web.json_response({"object": "feedback"})

    async def _read(self, request: web.Request) -> Any:
        """Return the JSON of a body; refuse one that is late."""
        try:
            async with asyncio.timeout(self._config.body_seconds):
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

    async def _generate(self, answer: Answer, one: Callable[[Choice], Coroutine[Any, Any, None]]) -> None:
        """Run ``one`` for all choices of an answer, under the deadline."""

        async def all_choices() -> None:
            async with asyncio.TaskGroup() as tasks:
                for choice in answer.choices:
                    tasks.create_task(one(choice))

        waiting = f"replica {self._context.replica} to answer {answer.id}"
        await self._context.clock.wait_for(all_choices(), self._config.request_seconds, waiting)

    async def _collected(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        await self._generate(answer, self._collect)
        response = web.json_response(answer.whole())
        await response.prepare(request)  # inside the deadline: a client may not read
        await response.write_eof()
        return response

    async def _collect(self, choice: Choice) -> None:
        with self._metrics.request(len(choice.prompt)) as done:
            result = await self._server.generate(self._request(choice))
            done(result.finish_reason, len(result.token_ids))
        choice.chunks.append(result)

    async def _streamed(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        usage = answer.body.stream_options is not None and answer.body.stream_options.include_usage

        async def follow() -> None:
            try:
                await self._generate(answer, functools.partial(self._follow, pieces))
            finally:
                pieces.put_nowait(None)

        async with _cancelled_at_end(asyncio.create_task(follow())) as following:
            first = await pieces.get()
            if first is None:
                await following  # raises before anything is sent, so that the status shows it
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            piece = first
            while piece is not None:
                await _send(response, answer.event([piece]))
                piece = await pieces.get()
            try:
                await following
                if usage:
                    await _send(response, answer.event([], usage=True))
                await response.write(b"data: [DONE]\n\n")
            except Exception as error:  # the status has been sent: the last event reports the error
                await _send(response, _error_body(_first(error))[0])
        await response.write_eof()
        return response

    async def _follow(self, pieces: asyncio.Queue[dict[str, Any] | None], choice: Choice) -> None:
        with self._metrics.request(len(choice.prompt)) as done:
            chunks = self._server.generate_stream(self._request(choice))
            async with contextlib.aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    pieces.put_nowait(choice.piece(chunk))
            done(choice.chunks[-1].finish_reason or "abort", choice.completion_tokens)

    def _request(self, choice: Choice) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(
            request_id=f"openai/{self._requests}",
            prompt_ids=choice.prompt,
            sampling=choice.sampling,
            minimum_weight_version=choice.minimum_weight_version,
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self._config.api_key
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        try:
            if key is not None and request.path not in _OPEN and not hmac.compare_digest(given, key.encode()):
                raise ClientError("the key is missing or wrong", "invalid_api_key", status=401)
            return await handler(request)
        except Exception as error:
            if request.writer.output_size:  # a response has begun: no second one can follow
                request.protocol.force_close()
            body, status = _error_body(_first(error))
            return web.json_response(body, status=status)


def _error_body(error: BaseException) -> tuple[dict[str, Any], int]:
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
        body, _ = _error_body(ClientError(f"the request is malformed: {text}", "invalid_request", status=status))
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


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def _cancelled_at_end(task: asyncio.Task[None]) -> AsyncIterator[asyncio.Task[None]]:
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _load_tokenizer(path: str, model: Any) -> ServedTokenizer:
    try:
        return ServedTokenizer(path, model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise RolloutError(
            "the endpoint needs the model's tokenizer",
            code="rollout.request",
            where=path,
            found=error,
            fix="save the tokenizer into the model folder",
        ) from error
