"""The web server: routes, keys, deadlines, errors and metrics around a rollout server.

``POST /v1/completions``, ``/v1/chat/completions`` and ``/v1/responses`` (whole or streamed), ``/tokenize`` and
``/detokenize``, ``GET /tokenizer_info``, ``/v1/models``, ``/health`` and, for Prometheus, ``/metrics``. A client that
leaves ends its requests. With ``openai.collect`` answers are kept as samples, and ``POST /v1/feedback`` takes users'
rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs
from aiohttp import web

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.errors import RolloutError
from jackfield_openai.answers import Answer, Choice
from jackfield_openai.bodies import Body, ChatBody, CompletionBody, read_body
from jackfield_openai.collecting import Collector
from jackfield_openai.metrics import Metrics
from jackfield_openai.responses import ResponseBody, ResponseForm, answered, response_id
from jackfield_openai.said import Answers, Head
from jackfield_openai.settings import EndpointConfig
from jackfield_openai.text import ClientError, ServedTokenizer, refused
from jackfield_openai.tokenizing import DetokenizeBody, TokenizeChatBody, TokenizeTextBody, detokenized, tokenized
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
from jackfield_tool_calls import Format

_READING_SECONDS = 30.0  #: time for a client to read an answer, after the deadline for generating it
_KEPT_RESPONSES = 1000  #: conversations that a later response may continue
#: What clients call what a server may be unable to do.
_NAMES = {"grammar": "response_format", "top_log_probs": "top_logprobs", "prompt_log_probs": "prompt_logprobs"}
_OPEN = frozenset({"/health"})  #: without a key: load balancers ask
Events: TypeAlias = Iterable[dict[str, Any]]  #: of a stream


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
        self._responses: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

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
                web.post("/v1/responses", self._respond),
                web.post("/v1/feedback", self._feedback),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/tokenizer_info", self._tell_tokenizer),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._models),
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
        name = request.match_info.get("name")
        if name is not None:
            self._check_model(name)
        model = {"id": name or self._name, "object": "model", "created": 0, "owned_by": "jackfield"}
        model |= {"root": self._context.model.path, "max_model_len": self._max_model_len}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    def _check_model(self, name: str | None) -> None:
        if self._config.model_name is not None and name not in (None, self._name):
            message = f"the model {str(name)[:200]!r} does not exist; this is {self._name!r}"
            raise ClientError(message, "model_not_found", "model", 404)

    @property
    def _max_model_len(self) -> int | None:
        return getattr(self._server, "max_model_len", None) or None

    async def _health(self, request: web.Request) -> web.StreamResponse:
        report = await self._server.health()
        return web.json_response(attrs.asdict(report), status=200 if report.healthy else 503)

    async def _tell_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.text(await self._server.health(), self._collector), content_type="text/plain"
        )

    async def _answer(self, request: web.Request, cls: type[Body]) -> web.StreamResponse:
        answer = await self._prepared(read_body(cls, await self._read(request)))
        if not answer.body.stream:
            return await self._told(answer, self._collected(request, answer))
        options = answer.body.stream_options
        usage = options is not None and options.include_usage
        more = lambda piece: [answer.event([piece])]  # noqa: E731
        end = lambda: [answer.event([], usage=True)] if usage else []  # noqa: E731
        return await self._told(answer, self._streamed(request, answer, more, end, b"data: [DONE]\n\n"))

    async def _told(self, answer: Answer, whole: Coroutine[Any, Any, web.StreamResponse]) -> web.StreamResponse:
        """Send an answer under its deadline, and keep it."""
        reading = f"a client to read {answer.id}"
        done = await self._context.clock.wait_for(whole, self._config.request_seconds + _READING_SECONDS, reading)
        if self._collector is not None:
            self._collector.keep(answer)
        return done

    async def _prepared(self, body: Body) -> Answer:
        """Return the choices of a request, still to be generated; ``ClientError`` if they cannot be."""
        self._check_model(body.model)
        if body.prompt_count * body.choices > self._config.max_choices:
            count = f"{body.prompt_count} prompts x {body.choices}"
            raise refused("n", f"at most {self._config.max_choices} answers (prompts x n)", count)
        assert self._tokenizer is not None
        tokenizer, format = self._tokenizer, None
        self._check_served(body)
        async with self._encoding:  # a long text takes seconds; others are answered meanwhile
            if isinstance(body, ChatBody) and body.tool_use.parses:
                format = await asyncio.to_thread(self._format, body)
            encoded = await asyncio.to_thread(body.prompts, tokenizer)
        prompts = [prompt for prompt in encoded for _ in range(body.choices)]
        choices = [Choice(index, prompt, body, tokenizer, format) for index, prompt in enumerate(prompts)]
        return Answer(body, body.model or self._name, choices)

    def _check_served(self, body: Body) -> None:
        """Refuse what this kind of server cannot do."""
        served: frozenset[str] = getattr(self._server, "shaping", frozenset())
        for name in sorted(body.shaping().wanted - served):
            where = _NAMES.get(name, name)
            if name == "grammar" and isinstance(body, ChatBody) and body.tool_use.forced is not None:
                where = "tool_choice"
            message = f"{where} is not served by this server"
            if name == "grammar":
                message += ": it cannot make answers match a grammar"
            raise ClientError(message, "unsupported_parameter", where)

    def _format(self, body: ChatBody) -> Format | None:
        assert self._tokenizer is not None
        chosen = self._config.tool_format
        found = self._tokenizer.tool_format if chosen == "auto" else chosen
        if found is None and body.tool_use.forced is None:
            message = "the model's chat template shows no known format of tool calls; openai.tool_format can name one"
            raise ClientError(message, "unsupported_parameter", "tools")
        return found

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        body = read_body(ResponseBody, await self._read(request))
        messages = body.messages(self._responses)
        answer = await self._prepared(body.chat_body(messages))
        form, head = ResponseForm(body, answer.model), Head(id=answer.id, created=answer.created)

        def answers() -> Answers:
            found = Answers(said=[choice.said() for choice in answer.choices], head=head)
            if body.store is not False:
                self._responses[response_id(head)] = answered(body, messages, found)
                if len(self._responses) > _KEPT_RESPONSES:
                    self._responses.popitem(last=False)
            return found

        def more(piece: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
            delta = piece["delta"]
            return form.more(head, delta.get("content") or "", delta.get("reasoning_content", ""))

        async def collected() -> web.StreamResponse:
            await self._generate(answer, self._collect)
            return web.json_response(form.whole(answers()))

        whole = self._streamed(request, answer, more, lambda: form.end(answers())) if body.stream else collected()
        return await self._told(answer, whole)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        data = await self._read(request)
        is_chat = isinstance(data, Mapping) and "messages" in data
        body = read_body(TokenizeChatBody, data) if is_chat else read_body(TokenizeTextBody, data)
        self._check_model(body.model)
        assert self._tokenizer is not None
        async with self._encoding:
            found = await asyncio.to_thread(tokenized, body, self._tokenizer)
        return web.json_response({**found, "max_model_len": self._max_model_len})

    async def _tell_tokenizer(self, request: web.Request) -> web.StreamResponse:
        assert self._tokenizer is not None
        return web.json_response(self._tokenizer.info)

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        body = read_body(DetokenizeBody, await self._read(request))
        self._check_model(body.model)
        assert self._tokenizer is not None
        async with self._encoding:
            return web.json_response({"prompt": await asyncio.to_thread(detokenized, body, self._tokenizer)})

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
            result = await self._server.generate(choice.request(self._request_id()))
            done(result.finish_reason, len(result.token_ids))
        choice.add(result)

    async def _streamed(
        self,
        request: web.Request,
        answer: Answer,
        more: Callable[[Mapping[str, Any]], Events],
        end: Callable[[], Events],
        done: bytes = b"",
    ) -> web.StreamResponse:
        """Send the events of each piece of a choice as it comes, those of the end, and the bytes ``done``."""
        pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def follow() -> None:
            try:
                await self._generate(answer, functools.partial(self._follow, pieces))
            finally:
                pieces.put_nowait(None)

        async with _cancelled_at_end(asyncio.create_task(follow())) as following:
            piece = await pieces.get()
            if piece is None:
                await following  # raises before anything is sent, so that the status shows it
            response = _event_stream()
            await response.prepare(request)
            while piece is not None:
                await _send_events(response, more(piece))
                piece = await pieces.get()
            try:
                await following
                await _send_events(response, end())
                await response.write(done)
            except Exception as error:  # the status has been sent: the last event reports the error
                await send_event(response, error_body(first_error(error))[0])
        await response.write_eof()
        return response

    async def _follow(self, pieces: asyncio.Queue[dict[str, Any] | None], choice: Choice) -> None:
        with self._metrics.request(len(choice.prompt)) as done:
            chunks = self._server.generate_stream(choice.request(self._request_id()))
            async with contextlib.aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    for piece in choice.pieces(chunk):
                        pieces.put_nowait(piece)
            done(choice.chunks[-1].finish_reason or "abort", choice.completion_tokens)

    def _request_id(self) -> str:
        self._requests += 1
        return f"openai/{self._requests}"

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


async def _send_events(response: web.StreamResponse, events: Events) -> None:
    for event in events:
        await send_event(response, event, event.get("type"))


def _event_stream() -> web.StreamResponse:
    return web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})


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
