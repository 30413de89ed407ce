"""The web server: routes, keys, deadlines, errors and metrics around a rollout server.

``POST /v1/completions`` and ``/v1/chat/completions`` (whole or streamed), ``GET /v1/models``, ``/health`` and, for
Prometheus, ``/metrics``. A client that leaves ends its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import attrs
from aiohttp import web

from jackfield.abc.rollout import BaseRolloutServer, GenerateChunk, GenerateRequest
from jackfield.errors import ConfigError, DataError, DeadlineExceeded, JackfieldError, RolloutError
from jackfield.runtime.openai.answers import Answer, Choice
from jackfield.runtime.openai.bodies import Body, ChatBody, CompletionBody, read_body
from jackfield.runtime.openai.metrics import Metrics
from jackfield.runtime.openai.settings import EndpointConfig
from jackfield.runtime.openai.text import ServedTokenizer

__all__ = ["OpenAIEndpoint"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {"rollout.stale": 503, "rollout.stopped": 503, "rollout.failed": 500}
_OPEN = frozenset({"/health"})  #: without a key: load balancers ask


class OpenAIEndpoint:
    """One replica's address.

    Args:
        server: a started rollout server.
        config: settings.
        tokenizer: of its model; None: it is loaded from the model's folder.
    """

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
        self._requests = 0

    async def start(self) -> str:
        """Listen; returns the base URL, which ends in ``/v1``.

        Raises:
            ConfigError: ``config.invalid-value``: no key where it listens beyond loopback, or the port is taken.
            RolloutError: ``rollout.request``: the model's folder has no tokenizer.
        """
        host, context = self._context.host, self._context
        if self._config.api_key is None and not _is_loopback(host):
            raise ConfigError(
                "an endpoint that others can reach needs a key",
                where="openai.api_key",
                expected="a key, or a loopback address",
                found=f"no key, and the address {host}",
                fix="set openai.api_key",
            )
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, context.model.path, context.model)
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._tell_metrics),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        port = self._config.port + context.replica if self._config.port else 0
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                "the endpoint cannot listen", where="openai.port", found=error, fix="choose another port, or 0"
            ) from error
        self._runner = runner
        bound = runner.addresses[0][1]
        return f"http://[{host}]:{bound}/v1" if ":" in host else f"http://{host}:{bound}/v1"

    async def close(self) -> None:
        """Stop listening; requests that run are ended. May be called again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # -- routes ----------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionBody)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatBody)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "jackfield"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        report = await self._server.health()
        return web.json_response(attrs.asdict(report), status=200 if report.healthy else 503)

    async def _tell_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(await self._server.health()), content_type="text/plain")

    # -- answers ---------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request, cls: type[Body]) -> web.StreamResponse:
        try:
            data = json.loads(await request.text())
        except ValueError as error:
            raise RolloutError("the body is not JSON", code="rollout.request", found=error) from error
        body = read_body(cls, data)
        if self._config.model_name is not None and body.model != self._name:
            raise RolloutError(
                "there is no such model", code="rollout.request", where="model", expected=self._name, found=body.model
            )
        assert self._tokenizer is not None
        tokenizer = self._tokenizer
        prompts = [prompt for prompt in body.prompts(tokenizer) for _ in range(body.choices)]
        choices = [Choice(index, prompt, body, tokenizer) for index, prompt in enumerate(prompts)]
        answer = Answer(body, body.model or self._name, choices)
        whole = self._streamed(request, answer) if body.stream else self._collected(answer)
        waiting = f"replica {self._context.replica} to answer {answer.id}"
        return await self._context.clock.wait_for(whole, self._config.request_seconds, waiting)

    async def _collected(self, answer: Answer) -> web.StreamResponse:
        async with asyncio.TaskGroup() as tasks:
            for choice in answer.choices:
                tasks.create_task(self._collect(choice))
        return web.json_response(answer.whole())

    async def _collect(self, choice: Choice) -> None:
        with self._metrics.request(len(choice.prompt)) as done:
            result = await self._server.generate(self._request(choice))
            done(result.finish_reason, len(result.token_ids))
        choice.chunks.append(
            GenerateChunk(
                request_id=result.request_id,
                token_ids=result.token_ids,
                log_probs=result.log_probs,
                weight_versions=result.weight_versions,
                finish_reason=result.finish_reason,
            )
        )

    async def _streamed(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        usage = answer.body.stream_options is not None and answer.body.stream_options.include_usage

        async def follow() -> None:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for choice in answer.choices:
                        tasks.create_task(self._follow(choice, pieces))
            finally:
                pieces.put_nowait(None)

        async with _cancelled_at_end(asyncio.create_task(follow())) as following:
            first = await pieces.get()
            if first is None:
                await following  # raises before anything is sent, so that the status tells
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
            except Exception as error:  # the status has been sent: the last event tells
                await _send(response, _error_body(_first(error))[0])
        await response.write_eof()
        return response

    async def _follow(self, choice: Choice, pieces: asyncio.Queue[dict[str, Any] | None]) -> None:
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

    # -- who may, and what went wrong ------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self._config.api_key
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key is not None and request.path not in _OPEN and not hmac.compare_digest(given.encode(), key.encode()):
            body = {"message": "the key is missing or wrong", "type": "authentication_error", "code": "invalid_api_key"}
            return web.json_response({"error": body}, status=401)
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except Exception as error:
            body, status = _error_body(_first(error))
            return web.json_response(body, status=status)


def _error_body(error: BaseException) -> tuple[dict[str, Any], int]:
    """OpenAI's form of an error, and its status."""
    if isinstance(error, DeadlineExceeded):
        status = 504
    elif isinstance(error, RolloutError | DataError):
        status = _STATUS.get(error.code, 400)
    else:
        status = 500
        logging.getLogger("jackfield").error("a request to the OpenAI endpoint failed", exc_info=error)
    ours = isinstance(error, JackfieldError)
    body = {
        "message": str(error) if ours else "internal error",
        "type": "invalid_request_error" if status == 400 else "server_error",
        "param": getattr(error, "where", None),
        "code": getattr(error, "code", "internal"),
    }
    return {"error": body}, status


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
