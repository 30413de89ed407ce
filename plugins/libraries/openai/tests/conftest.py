"""A scripted replica behind an endpoint, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import openai
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import BaseRolloutServer, GenerateChunk, GenerateRequest, GenerateResult, RolloutContext
from jackfield_openai import EndpointConfig
from jackfield_openai.endpoint import OpenAIEndpoint

WORDS = ("<end>", "<user>", "<assistant>", "one", "two", "three", "four", "five")
ANSWER = (3, 4, 5)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with nothing but a tokenizer, of one token per word."""
    path = str(tmp_path_factory.mktemp("models") / "tiny")
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<end>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


@attrs.define
class Script:
    """What the replica does, and what it was asked."""

    asked: list[GenerateRequest] = attrs.Factory(list)
    ended: list[str] = attrs.Factory(list)
    failure: Exception | None = None
    fails_after: int | None = None  #: tokens of a stream
    hangs: bool = False


class ScriptedServer(BaseRolloutServer):
    """Answers everything with the same words, one per weight version."""

    script: Script

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        chunks = [chunk async for chunk in self.generate_stream(request)]
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
            weight_versions=tuple(version for chunk in chunks for version in chunk.weight_versions),
            finish_reason=chunks[-1].finish_reason or "abort",
        )

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:  # type: ignore[override]
        script = self.script
        script.asked.append(request)
        if script.failure is not None and script.fails_after is None:
            raise script.failure
        answer = ANSWER[: request.sampling.max_new_tokens]
        try:
            for index, token in enumerate(answer):
                if script.failure is not None and script.fails_after == index:
                    raise script.failure
                last = index == len(answer) - 1
                reason = ("stop" if len(answer) == len(ANSWER) else "length") if last else None
                yield GenerateChunk(
                    request_id=request.request_id,
                    token_ids=(token,),
                    log_probs=(-0.5 * (index + 1),),
                    weight_versions=(index,),
                    finish_reason=reason,  # type: ignore[arg-type]
                )
                if script.hangs:
                    await asyncio.Event().wait()
        finally:
            script.ended.append(request.request_id)

    async def health(self) -> Any:
        from jackfield.abc.rollout import HealthReport

        return HealthReport(healthy=self.script.failure is None, running=2, waiting=1, weight_version=7)

    async def start(self) -> Any: ...
    async def abort(self, request: Any) -> Any: ...
    async def pause(self, request: Any) -> Any: ...
    async def resume(self, request: Any) -> Any: ...
    async def sleep(self, request: Any) -> Any: ...
    async def wake_up(self, request: Any) -> Any: ...
    async def update_weights(self, request: Any) -> Any: ...
    async def stop(self) -> None: ...


Serve = Callable[..., contextlib.AbstractAsyncContextManager[tuple[openai.AsyncOpenAI, Script]]]


@pytest.fixture
def serve(model: str) -> Serve:
    """``async with serve(settings) as (client, script)``: an endpoint with OpenAI's client."""

    @contextlib.asynccontextmanager
    async def serving(host: str = "127.0.0.1", key: str = "none", **settings: Any) -> AsyncIterator[Any]:
        server = ScriptedServer(None, RolloutContext(model=ModelSpec(path=model), host=host, replica=3))
        server.script = Script()
        endpoint = OpenAIEndpoint(server, EndpointConfig(**settings))
        url = await endpoint.start()
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        try:
            yield client, server.script
        finally:
            await client.close()
            await endpoint.close()

    return serving
