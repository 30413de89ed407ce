"""Makes the host of an agent worker's loops, and the models that agents and rewards ask by name."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentWorkerContext, ChatTokenizer
from jackfield.abc.engine import ModelSpec
from jackfield.abc.reward import GeneratedText
from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, RolloutContext, SamplingParams
from jackfield.clock import Clock
from jackfield.compose.checks import prompt_limit, read_model, token_limit
from jackfield.compose.libraries import named_models, toolboxes
from jackfield.compose.rewards import http_client
from jackfield.config import RunConfig
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import AgentError, JackfieldError
from jackfield.plugins import Registry
from jackfield.routing import Router
from jackfield.runtime.agents import AgentHost, Generator, no_model
from jackfield.settings import structure


@attrs.define(eq=False)
class Models:
    """Asks models for text (a :class:`jackfield.abc.reward.Generate`): a replica of the run, or one of ``models``."""

    _config: RunConfig
    _registry: Registry
    _clock: Clock
    _router: Router
    _tokenizer: ChatTokenizer
    _prefix: str  #: of request ids
    _error: type[JackfieldError]  #: of an unknown name: of the kind that asks
    http: Any = attrs.field(factory=http_client, init=False)  #: an HTTP client, or None; :meth:`close` closes it
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _named: Any = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if named := self._config.models:
            shared: Any = {"clock": self._clock, "start_seconds": self._config.deadlines.start}
            made = {"settings": named, "http": self.http, "make": self._serve, "ask": self._ask}
            self._named = named_models().NamedModels(**made, **shared)

    async def __call__(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        """Answer a conversation."""
        asked: Any = messages
        given = [{"role": "user", "content": asked}] if isinstance(asked, str) else messages
        if model in self._config.models:
            answered: GeneratedText = await self._named.answer(model, given, sampling)
            return answered
        if model != "policy":
            what, expected = f"the run has no model {model!r}", ", ".join(["policy", *self._config.models])
            code = f"{self._error.default_code.partition('.')[0]}.context"
            raise self._error(what, code=code, where="models", expected=expected, found=model)
        return await self._answer(self._router.of_one_rollout(), self._tokenizer, given, sampling)

    async def close(self) -> None:
        """Stop the models that were started here, and close the HTTP client."""
        if self._named is not None:
            await self._named.close()
        if self.http is not None:
            await self.http.close()

    async def _answer(
        self, generate: Generator, tokenizer: ChatTokenizer, messages: Sequence[Any], sampling: Mapping[str, Any]
    ) -> GeneratedText:
        prompt, asked = tokenizer.encode_chat(messages), structure(SamplingParams, sampling, "sampling")
        if not asked.ignore_eos:
            ends = dict.fromkeys((*asked.stop_token_ids, *tokenizer.end_token_ids))
            asked = attrs.evolve(asked, stop_token_ids=tuple(ends))
        request = GenerateRequest(request_id=f"{self._prefix}/{next(self._numbers)}", prompt_ids=prompt, sampling=asked)
        answer = await generate(request)
        return GeneratedText(text=tokenizer.decode(answer.token_ids), tokens=len(prompt) + len(answer.token_ids))

    async def _ask(
        self, server: BaseRolloutServer, path: str, messages: Sequence[Any], sampling: Mapping[str, Any]
    ) -> GeneratedText:
        tokenizer = await asyncio.to_thread(_tokenizer_of, path)
        return await self._answer(server.generate, tokenizer, messages, sampling)

    def _serve(self, path: str) -> BaseRolloutServer:
        config = self._config
        model = ModelSpec(path=path, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code)
        where: Any = {"device": config.cluster.device, "seed": config.seed, "clock": self._clock}
        context = RolloutContext(model=model, replica=0, **where)
        plugin = self._registry.load("rollout", config.rollout.name)
        return cast(BaseRolloutServer, plugin.build(config.rollout.settings, context, "rollout"))


@lru_cache(maxsize=16)
def _tokenizer_of(path: str) -> HuggingFaceChatTokenizer:
    return HuggingFaceChatTokenizer.load(path)


def agent_host(
    config: RunConfig, registry: Registry, clock: Clock, router: Router, tokenizer: ChatTokenizer, prefix: str
) -> tuple[AgentHost, Models]:
    """Make the host of a worker's agent loops, which is not started, and the models that it gives them."""
    plugin, chosen = registry.load("agent", config.agent.name), config.agent.settings
    manifest = registry.resolve(config.agent.name, "agent").usable()
    settings: Any = structure(plugin.settings_class, chosen, "agent")  # once, and not for each rollout
    cls = cast(type[AgentLoopBase], plugin.cls)
    models = Models(config, registry, clock, router, tokenizer, f"{prefix}-models", AgentError)
    shared: Any = {"tokenizer": tokenizer, "clock": clock}
    folder = Path(config.folder, "scratch", f"agents-{prefix}").absolute()
    shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
    folder.mkdir(parents=True)
    worker = AgentWorkerContext(
        folder=folder,
        name=prefix,
        seed=config.seed,
        logs=str(Path(config.folder) / "logs" / f"agent-{prefix}"),
        heartbeat_seconds=config.deadlines.heartbeat,
        **shared,
        **({} if models.http is None else {"http": models.http}),
    )
    model = read_model(config)
    length = token_limit(config, model) or model.get("max_position_embeddings")
    context = AgentContext(
        generate=no_model,  # each rollout has its own
        request_prefix=prefix,
        max_prompt_tokens=prompt_limit(config),
        cuts_prompts=config.data.prompt_overflow == "truncate_left",
        max_model_len=length,
        chat=models,
        **shared,
    )
    host = AgentHost(
        make=partial(cls, settings),
        generator=router.of_one_rollout,
        streams=not config.model.router_replay,  # streamed tokens come without their experts
        context=context,
        settings=config.agent_service,
        life=(cls, settings) if manifest.abi != "1.0" else None,
        worker=worker,
        toolbox=toolboxes().Toolbox(config.tools, worker) if config.tools else None,
    )
    return host, models
