"""A scripted model behind the gateway, with a tokenizer whose template has tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jackfield.abc.agent import AgentContext, AgentLoopOutput, AgentSequence, AgentWorkerContext
from jackfield.abc.rollout import GenerateChunk, GenerateRequest, GenerateResult
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import RolloutError
from jackfield.sdk import structure
from jackfield_agent_gateway.agent import GatewayAgent
from jackfield_agent_gateway.programs import Shared
from jackfield_agent_gateway.rollouts import Rollout
from jackfield_agent_gateway.settings import GatewayConfig

TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def tokenizer() -> HuggingFaceChatTokenizer:
    """A tokenizer of one token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return HuggingFaceChatTokenizer(fast)


@attrs.define(eq=False)
class Model:
    """Answers by a script: by what the conversation ends with, or else with numbers, one after another."""

    tokenizer: HuggingFaceChatTokenizer
    answers: dict[str, str] = attrs.field(factory=dict)  #: by the last text before the answer
    asked: list[GenerateRequest] = attrs.field(factory=list)
    answered: list[GenerateRequest] = attrs.field(factory=list)
    said: list[tuple[int, ...]] = attrs.field(factory=list)
    failures: list[Exception] = attrs.field(factory=list)  #: of the next requests
    gate: asyncio.Event | None = None  #: answers wait for it
    arrived: asyncio.Event = attrs.field(factory=asyncio.Event)
    cancelled: int = 0
    next: Callable[[], str] | None = None  #: the next answer, instead of the script
    closes: bool = True  #: whether answers end with the end token
    hold: asyncio.Event | None = None  #: streamed answers wait for it before their last token
    breaks: bool = False  #: the next streamed answer fails before its last token

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(request)
        self.arrived.set()
        if self.failures:
            raise self.failures.pop(0)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        seen = self.tokenizer.decode(request.prompt_ids, False)
        known = max(self.answers, key=seen.rfind, default="")
        is_last = known and 0 <= seen.rfind(known) >= len(seen) - len(known) - 40
        text = self.answers[known] if is_last else f"answer {len(self.asked)}"
        text = text if self.next is None else self.next()
        ids = self.tokenizer.encode_text(text) + (self.tokenizer.end_token_ids[:1] if self.closes else ())
        cut = ids[: request.sampling.max_new_tokens]
        for stop in request.sampling.stop:
            if stop in text:
                cut = self.tokenizer.encode_text(text[: text.index(stop) + len(stop)])
        self.answered.append(request)
        self.said.append(cut)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=cut,
            log_probs=tuple(-0.001 * (place + 1) - 0.1 * len(self.said) for place in range(len(cut))),
            weight_versions=(len(self.said),) * len(cut),
            finish_reason="length" if len(cut) < len(ids) and not request.sampling.stop else "stop",
        )

    async def stream(self, request: GenerateRequest, hear: Callable[[GenerateChunk], None]) -> GenerateResult:
        """Say the answer token by token."""
        made = await self(request)
        for place, (token, number, version) in enumerate(
            zip(made.token_ids, made.log_probs, made.weight_versions, strict=True)
        ):
            if place + 1 == len(made.token_ids):
                if self.breaks:
                    self.breaks = False
                    self.said.pop()
                    self.answered.pop()
                    raise RolloutError("it has broken", code="rollout.failed")
                if self.hold is not None:
                    await self.hold.wait()
            shared: Any = {"token_ids": (token,), "log_probs": (number,), "weight_versions": (version,)}
            hear(GenerateChunk(request_id=request.request_id, **shared))
            await asyncio.sleep(0)
        return made


@attrs.define(eq=False)
class Served:
    """A gateway in this process, and what its rollouts use."""

    shared: Shared
    config: GatewayConfig
    model: Model
    tokenizer: HuggingFaceChatTokenizer
    folder: Path
    options: Mapping[str, Any]
    streams: bool = True  #: whether the model's server streams
    events: list[tuple[str, dict[str, Any]]] = attrs.field(factory=list)

    @property
    def url(self) -> str:
        return str(self.shared.gateway.address)

    def agent(self, **options: Any) -> GatewayAgent:
        """Return the agent of a new rollout."""
        folder = self.folder / f"rollout-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        context = AgentContext(
            generate=self.model,
            stream=self.model.stream if self.streams else None,
            tokenizer=self.tokenizer,  # of the rollout
            shared=self.shared,
            folder=lambda: folder,
            event=lambda name, **fields: self.events.append((name, fields)),
            **{"max_model_len": 4096, **self.options, **options},
        )
        return GatewayAgent(self.config, context)

    def run(self, question: str = "q", sampling: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Run a rollout to its end, as an agent worker does."""
        fields = {"messages": [{"role": "user", "content": question}], "task_id": question}

        async def run() -> AgentLoopOutput:
            agent = self.agent(**options)
            try:
                return await agent.run({"max_new_tokens": 1000, "seed": 1, **(sampling or {})}, **fields)
            finally:
                await agent.finish()

        return run()

    @contextlib.asynccontextmanager
    async def rollout(self, sampling: Mapping[str, Any] | None = None, **options: Any) -> AsyncIterator[Rollout]:
        """Open a rollout without a program, for requests of the test."""
        gateway, context = self.shared.gateway, self.agent(**options).context
        rollout = gateway.open(context, {"max_new_tokens": 1000, "seed": 1, **(sampling or {})}, {"task_id": "t"})
        try:
            yield rollout
        finally:
            await gateway.end(rollout)


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tokenizer: HuggingFaceChatTokenizer, tmp_path: Path) -> Serve:
    """``async with serve(settings) as served``: a gateway on loopback with a scripted model."""

    @contextlib.asynccontextmanager
    async def serving(
        context: Mapping[str, Any] | None = None, secrets: Any = None, logs: Any = None, **settings: Any
    ) -> Any:
        program = settings.pop("program", {"external": True})
        config = structure(GatewayConfig, {"program": program, **settings}, "agent")
        folder = tmp_path / "scratch"
        folder.mkdir(exist_ok=True)
        worker = AgentWorkerContext(
            tokenizer=tokenizer, folder=folder, logs=logs, **({} if secrets is None else {"secret": secrets})
        )
        shared = await GatewayAgent.start(config, worker)
        try:
            yield Served(shared, config, Model(tokenizer), tokenizer, folder, context or {})
        finally:
            await GatewayAgent.close(shared)

    return serving


def check_exact(model: Model, sequences: Iterable[AgentSequence]) -> None:
    """Check that sequences are what the model saw and said, and that each answer is in exactly one place."""
    found = []
    for sequence in sequences:
        ids, begin, mask = (
            (*sequence.prompt_ids, *sequence.response_ids),
            len(sequence.prompt_ids),
            sequence.response_mask,
        )
        place = 0
        while place < len(mask):
            version = sequence.weight_versions[place]  # the scripted model's answers have one each
            end = place + 1
            while end < len(mask) and sequence.weight_versions[end] == version:
                end += 1
            if mask[place]:
                assert model.answered[version - 1].prompt_ids == ids[: begin + place]
                assert model.said[version - 1] == sequence.response_ids[place:end]
                assert (1,) * (end - place) == mask[place:end]
                found.append(version)
            else:
                assert version == -1
                assert {(0, 0.0)} == {*zip(mask[place:end], sequence.response_log_probs[place:end], strict=True)}
            place = end
    assert sorted(found) == list(range(1, len(model.said) + 1))


@pytest.fixture
def exact() -> Callable[[Model, Iterable[AgentSequence]], None]:
    """The check that recorded sequences are what the model saw and said."""
    return check_exact
