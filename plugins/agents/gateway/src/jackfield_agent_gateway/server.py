"""The web server of one agent worker: it answers programs from the rollouts that are open.

``POST /v1/chat/completions``, ``/v1/completions`` and ``/v1/responses``, ``GET /v1/models``; for programs that are
started elsewhere ``POST /v1/rollouts`` (take one), ``/v1/rollouts/NAME/reward`` and ``/v1/rollouts/NAME/finish``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from jackfield.abc.agent import AgentContext, AgentWorkerContext
from jackfield.errors import ConfigError
from jackfield_agent_gateway import streams
from jackfield_agent_gateway.asking import Ask
from jackfield_agent_gateway.chats import Form, TextBody, ToolChatBody
from jackfield_agent_gateway.recording import Recording
from jackfield_agent_gateway.responses import AskingResponseBody
from jackfield_agent_gateway.rollouts import Rollout, Rollouts, unknown_key
from jackfield_agent_gateway.settings import GatewayConfig
from jackfield_agent_gateway.speech import Listener
from jackfield_openai.bodies import read_body
from jackfield_openai.responses import ResponseForm, answered, response_id
from jackfield_openai.said import Answers
from jackfield_openai.text import ClientError, refused, shown_format
from jackfield_openai.web import (
    Handler,
    WebServer,
    bearer,
    check_key,
    error_response,
    read_json,
    same_key,
)
from jackfield_tool_calls import Format

HEADER = "X-Jackfield-Rollout"  #: names a rollout where the key does not
_RETRIES = "x-stainless-retry-count"  #: of OpenAI's clients
_PORTS = 64  #: ports above the first one that further workers try
_ROLLOUT = "/v1/rollouts/{name:.+}"
_READING_SECONDS = 30.0  #: time for a client to read an answer


class Gateway:
    """The server of one worker and its open rollouts."""

    def __init__(self, config: GatewayConfig, context: AgentWorkerContext, images: bool = False) -> None:
        self._config, self._context, self._images = config, context, images
        self._numbers = itertools.count()
        self._rollouts = Rollouts(context.clock)
        self._web: WebServer | None = None
        self._format = _format(config, context.tokenizer)
        self._key: str | None = None
        self.address = ""
        self.programs: Any = None  #: what :mod:`programs` keeps for all rollouts

    async def start(self) -> None:
        """Start to listen.

        It raises ``config.invalid-value`` without a key beyond loopback, and if no port is free.
        """
        config = self._config
        self._key = None if config.api_key_env is None else self._context.secret(config.api_key_env)
        check_key(config.host, self._key, "agent.api_key_env")
        ports = range(config.port, config.port + _PORTS) if config.port else (0,)
        for port in ports:
            self._web = WebServer(self._app(), max_connections=config.max_connections, idle_seconds=config.idle_seconds)
            try:
                self.address = await self._web.start(config.host, port, "agent.port")
                break
            except ConfigError:
                if port == ports[-1]:
                    raise
        logging.getLogger("jackfield").info("the gateway of %s listens at %s", self._context.name, self.address)
        if config.address_file is not None:
            await asyncio.to_thread(_append_line, Path(config.address_file), self.address)

    async def close(self) -> None:
        """Stop to listen, and end running requests. May be called again."""
        if self._web is not None:
            await self._web.close()

    def open(self, context: AgentContext, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Rollout:
        """Open a rollout, which gets requests from now on."""
        recording = Recording(self._config, context, sampling, self._format)
        name = f"{context.request_prefix or self._context.name}-{next(self._numbers)}".replace("/", "-")
        rollout = Rollout(name=name, fields=fields, recording=recording, clock=context.clock, deadline=context.deadline)
        self._rollouts.add(rollout, is_free=self._config.external)
        return rollout

    async def end(self, rollout: Rollout) -> None:
        """Close a rollout: its requests that still run are cancelled, and further ones refused."""
        self._rollouts.remove(rollout)
        await rollout.recording.end()

    async def restart(self, rollout: Rollout) -> None:
        """Drop all that a rollout's program has done: its next attempt has another key and an empty recording."""
        dropped = rollout.recording
        self._rollouts.restart(rollout)
        text = "the program of rollout %s is run again, because its process died with another one: %s turns are dropped"
        logging.getLogger("jackfield").warning(text, rollout.name, dropped.turns)
        await dropped.end()

    # -- requests

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/responses", self._response),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._models),
                web.get("/health", self._health),
                web.get("/v1/rollouts", self._counts),
                web.post("/v1/rollouts", self._claim),
                web.post(f"{_ROLLOUT}/reward", self._reward),
                web.post(f"{_ROLLOUT}/finish", self._finish),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as error:
            return error_response(request, error)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, ToolChatBody)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, TextBody)

    async def _answered(self, request: web.Request, cls: type[ToolChatBody] | type[TextBody]) -> web.StreamResponse:
        body = read_body(cls, await self._read(request))
        async with self._rollout(request) as rollout:
            ask = body.ask(_is_retry(request), self._images)
            form = Form(body, body.model or self._config.model_name, self._context.tokenizer.decode)
            if not body.stream:
                return web.json_response(form.whole(await self._answers(rollout, ask)))
            return await self._streamed(request, rollout, ask, form.more, form.end, b"data: [DONE]\n\n")

    async def _response(self, request: web.Request) -> web.StreamResponse:
        body = read_body(AskingResponseBody, await self._read(request))
        async with self._rollout(request) as rollout:
            responses = rollout.responses  # those of this attempt of the program
            ask, messages = body.ask(responses, _is_retry(request), self._images)
            form = ResponseForm(body, body.model or self._config.model_name)

            def end(answers: Answers) -> Iterator[dict[str, Any]]:
                responses[response_id(answers.head)] = answered(body, messages, answers)
                return form.end(answers)

            if body.stream:
                more = lambda head, piece: form.more(head, piece.content, piece.reasoning)  # noqa: E731
                return await self._streamed(request, rollout, ask, more, end)
            answers = await self._answers(rollout, ask)
            responses[response_id(answers.head)] = answered(body, messages, answers)
            return web.json_response(form.whole(answers))

    async def _answers(self, rollout: Rollout, ask: Ask, listener: Listener | None = None) -> Answers:
        """Return the answers to a request, under its deadline."""
        recording, waiting = rollout.recording, f"the model to answer a request of rollout {rollout.name}"
        try:
            return await self._context.clock.wait_for(
                recording.answer(ask, listener), self._config.request_seconds, waiting
            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if recording.is_ended and (task is None or not task.cancelling()):
                raise _ended() from None
            raise

    async def _streamed(self, request: web.Request, rollout: Rollout, ask: Ask, *events: Any) -> web.StreamResponse:
        """Answer with events while the model generates; they are those of :func:`streams.send`."""
        listener, seconds = Listener(), self._config.request_seconds + _READING_SECONDS
        answering = asyncio.create_task(self._answers(rollout, ask, listener))
        try:
            sending = streams.send(request, listener, answering, *events)
            return await self._context.clock.wait_for(sending, seconds, "a client to read a stream")
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _rollout(self, request: web.Request) -> AsyncIterator[Rollout]:
        """Find the rollout of a request, and note that it is busy."""
        rollout = await self._found(request)
        if rollout.recording.is_ended:
            raise _ended()
        rollout.active += 1
        try:
            yield rollout
        finally:
            rollout.active -= 1
            rollout.last = self._context.clock.time()

    async def _found(self, request: web.Request) -> Rollout:
        given, name = bearer(request), request.headers.get(HEADER)
        if name is not None and self._is_allowed(given):
            key: str | None = name
            rollout = self._rollouts.find(name) if self._key is not None else self._rollouts.with_own_key(name)
        else:
            key = self._own(given)
            rollout = self._rollouts.with_key(given) or (self._rollouts.with_own_key(key) if key else None)
        if rollout is not None:
            return rollout
        if not key or not self._config.external:
            raise unknown_key()
        return await self._rollouts.claim(self._config.program.claim_seconds, key)

    def _own(self, given: str) -> str | None:
        """Return the own key of a program; with a key of the gateway, own keys are ``KEY/GROUP/N``."""
        if self._key is None:
            return given
        begin, _, own = given.partition("/")
        return own if own and same_key(begin, self._key) else None

    def _is_allowed(self, given: str) -> bool:
        return self._key is None or same_key(given, self._key)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name")
        model = {"id": name or self._config.model_name, "object": "model", "created": 0, "owned_by": "jackfield"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"healthy": True})

    # -- rollouts of programs that are started elsewhere

    async def _counts(self, request: web.Request) -> web.StreamResponse:
        self._check_allowed(request)
        return web.json_response(self._rollouts.counts())

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        self._check_allowed(request)
        if not self._config.external:
            raise ClientError("this run starts its programs itself (agent.program)", "unknown_url", status=404)
        given = await self._read(request) if request.can_read_body else {}
        name = given.get("name") if isinstance(given, Mapping) else given
        if name is not None and not (isinstance(name, str) and name):
            raise refused("name", "a text, such as GROUP/N", name)
        _check_fields(given, ("name",))
        if name is not None:
            self._rollouts.release(name)
        found = None if name is None else self._rollouts.with_own_key(name)
        rollout = found or await self._rollouts.claim(self._config.program.claim_seconds, name)
        return web.json_response(rollout.shown(self.address))

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        self._named(request)
        given = await self._read(request)
        rollout = self._named(request)  # the key may have ended meanwhile
        reward, finish = self._noted(rollout, given, is_needed=True)
        if finish:
            rollout.finished.set()
        return web.json_response({"id": rollout.name, "reward": reward})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        self._named(request)
        given = await self._read(request) if request.can_read_body else {}
        rollout = self._named(request)
        self._noted(rollout, {} if given is None else given)
        rollout.finished.set()
        return web.json_response({"id": rollout.name, "finished": True})

    def _noted(self, rollout: Rollout, given: Any, is_needed: bool = False) -> tuple[float | None, bool]:
        """Note the reward of a body; return it, and whether the body asks for the end of the rollout."""
        finish = given.get("finish", False) if isinstance(given, Mapping) else False
        if not isinstance(finish, bool):
            raise refused("finish", "true or false", finish)
        reward, metrics = read_reward(given, "finish")
        if is_needed and reward is None:
            raise refused("reward", "a number", given)
        rollout.metrics |= metrics
        if reward is not None:
            rollout.reward = reward
            rollout.rewarded.set()
        return reward, finish

    def _named(self, request: web.Request) -> Rollout:
        name, given = request.match_info["name"], bearer(request)
        rollout = self._rollouts.find(name)
        if rollout is None:
            raise ClientError(f"there is no open rollout {name[:100]!r}", "rollout_not_found", status=404)
        if same_key(given, rollout.key) or (self._key is not None and same_key(given, self._key)):
            return rollout
        own = self._own(given)
        if not own or rollout.own_key is None or not same_key(own, rollout.own_key):
            raise unknown_key()
        return rollout

    def _check_allowed(self, request: web.Request) -> None:
        if not self._is_allowed(bearer(request)):
            raise unknown_key()

    async def _read(self, request: web.Request) -> Any:
        return await read_json(request, self._config.body_seconds)


def read_reward(given: Any, *further: str) -> tuple[float | None, dict[str, float]]:
    """Return the reward and the metrics of a JSON value: a number, or an object with ``reward`` and ``metrics``.

    ``ClientError`` names a field that is wrong, or unknown; ``further`` ones are left to the caller.
    """
    _check_fields(given, ("reward", "metrics", *further))
    value, metrics = (given.get("reward"), given.get("metrics") or {}) if isinstance(given, Mapping) else (given, {})
    if value is not None and not _is_number(value):
        raise refused("reward", "a finite number", value)
    if not isinstance(metrics, Mapping) or not all(map(_is_number, metrics.values())):
        raise refused("metrics", "an object of finite numbers", metrics)
    reward = None if value is None else float(value)
    return reward, {str(name): float(number) for name, number in metrics.items()}


def _check_fields(given: Any, known: tuple[str, ...]) -> None:
    for name in given if isinstance(given, Mapping) else ():
        if name not in known:
            raise refused(str(name)[:100], "one of the fields " + ", ".join(known), given, "unknown_parameter")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _format(config: GatewayConfig, tokenizer: Any) -> Format | None:
    if config.format == "none":
        return None
    if config.format != "auto":
        return config.format
    return shown_format(tokenizer)


def _append_line(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def _is_retry(request: web.Request) -> bool:
    count = request.headers.get(_RETRIES, "0")
    return count.isdecimal() and int(count) > 0


def _ended() -> ClientError:
    return ClientError("the rollout of this key has ended", "rollout_ended", status=410)
