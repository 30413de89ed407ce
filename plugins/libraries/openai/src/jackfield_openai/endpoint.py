"""The web server: routes, keys, deadlines, errors and metrics around a rollout server.

``POST /v1/completions`` and ``/v1/chat/completions`` (whole or streamed), ``GET /v1/models``, ``/health`` and, for
Prometheus, ``/metrics``. A client that leaves ends its requests. With ``openai.collect`` answers are kept as samples,
and ``POST /v1/feedback`` takes users' rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import attrs
from aiohttp import web

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest
from jackfield.errors import RolloutError
from jackfield_openai.bodies import Answer, Body, ChatBody, Choice, CompletionBody, read_body
from jackfield_openai.collecting import Collector
from jackfield_openai.metrics import Metrics
from jackfield_openai.settings import EndpointConfig
from jackfield_openai.text import ClientError, ServedTokenizer, refused
from jackfield_openai.web import (
    Handler,
    WebServer,
    bearer,
    check_key,
    error_body,
    error_response,
    first_error,
    read_json,
    same_key,
    send_event,
)

_READING_SECONDS = 30.0  #: time for a client to read an answer, after the deadline for generating it
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
        self._web: WebServer | None = None
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
        check_key(host, self._config.api_key, "openai.api_key")
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
        port = self._config.port + context.replica if self._config.port else 0
        config = self._config
        self._web = WebServer(app, max_connections=config.max_connections, idle_seconds=config.idle_seconds)
        return await self._web.start(host, port, "openai.port")

    async def close(self) -> None:
        """Stop listening and end running requests. May be called again."""
        if self._web is not None:
            await self._web.close()
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
        return await read_json(request, self._config.body_seconds)

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
                await send_event(response, answer.event([piece]))
                piece = await pieces.get()
            try:
                await following
                if usage:
                    await send_event(response, answer.event([], usage=True))
                await response.write(b"data: [DONE]\n\n")
            except Exception as error:  # the status has been sent: the last event reports the error
                await send_event(response, error_body(first_error(error))[0])
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
        try:
            if key is not None and request.path not in _OPEN and not same_key(bearer(request), key):
                raise ClientError("the key is missing or wrong", "invalid_api_key", status=401)
            return await handler(request)
        except Exception as error:
            return error_response(request, error)


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
