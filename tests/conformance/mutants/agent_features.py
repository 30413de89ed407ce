"""A correct agent loop of ABI 1.1 that uses everything of it; ``agent_faults`` has loops with one fault each.

What the model says are orders: ``call NAME NAME`` calls tools at the same time; ``ask`` asks another model;
``delegate`` begins a conversation of another agent; ``again`` asks again; anything else is the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentWorkerContext, ToolCall, ToolResult
from jackfield.errors import AgentError, DeadlineExceeded
from jackfield.sdk.sequences import Answer, SequenceBuilder, sequences_of
from mutants.agent import Config
from mutants.harness import Reference

#: Texts that end an answer which goes on with what another model says.
STOPS = ("ask",)


@attrs.define(eq=False)
class Hints:
    """A service of the worker that a task of its own gives."""

    folder: Path
    tasks: list[asyncio.Task[Any]] = attrs.field(factory=list)
    _asked: asyncio.Queue[asyncio.Future[str]] = attrs.field(factory=asyncio.Queue)

    async def open(self) -> None:
        self.tasks.append(asyncio.create_task(self._serve(), name="hints"))
        for _ in range(3):
            await asyncio.sleep(0)

    async def hint(self) -> str:
        if not self.tasks:
            raise AgentError("the hints are closed")
        hint: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._asked.put(hint)
        return await hint

    async def close(self) -> None:
        while self.tasks:
            task = self.tasks.pop()
            task.cancel()
            await asyncio.wait([task])

    async def _serve(self) -> None:
        while True:
            hint = await self._asked.get()
            if not hint.done():
                hint.set_result("go on")


class Ended(Exception):
    """Raised where a rollout ends, with the reason."""


class FullAgent(AgentLoopBase):
    """Carries out orders until there is an answer, in an environment that ``finish`` ends."""

    environment: asyncio.Task[Any] | None = None

    @classmethod
    async def start(cls, config: Any, context: AgentWorkerContext) -> Any:
        hints = Hints(context.folder)
        try:
            await hints.open()
        except BaseException:
            await hints.close()
            raise
        return hints

    @classmethod
    async def close(cls, shared: Any) -> None:
        await shared.close()

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        self.environment = asyncio.create_task(asyncio.sleep(3600), name="environment")
        (self.context.folder() / "notes").write_text("begun", encoding="utf-8")
        main = self.builder(sampling_params, fields)
        self.builders, self.calls = [main], list[Mapping[str, Any]]()
        try:
            while True:
                await self.turn(main, str(fields.get("ground_truth")))
        except Ended as ended:
            reason = str(ended)
        self.context.metric("orders", len(self.calls))
        return AgentLoopOutput(
            sequences=sequences_of(self.builders),
            num_turns=sum(each.turns for each in self.builders) or 1,
            tool_calls=tuple(self.calls),
            end_reason=reason,
        )

    async def finish(self) -> None:
        if self.environment is not None:
            self.environment.cancel()
            await asyncio.wait([self.environment])

    def builder(self, sampling_params: Mapping[str, Any], fields: Mapping[str, Any]) -> SequenceBuilder:
        tools = self.context.tools.schemas
        return SequenceBuilder(self.context, sampling_params, fields["messages"], tools=tools, name="main")

    async def turn(self, main: SequenceBuilder, truth: str) -> None:
        said = (await self.answer(main)).text
        match said.split():
            case ["call", *names]:
                await self.call(main, names)
            case ["ask"]:
                self.go_on(main.append_text(await self.ask(main)))
            case ["delegate"]:
                helper = main.sub_agent([{"role": "user", "content": "Help."}], name="helper")
                self.builders.append(helper)
                text = (await self.answer(helper)).text
                self.go_on(main.append_turn([{"role": "user", "content": text}]))
            case ["again"]:
                self.go_on(main.append_turn([{"role": "user", "content": await self.hint()}]))
            case _:
                main.reward(float(said == truth))
                raise Ended("answered")

    async def answer(self, builder: SequenceBuilder) -> Answer:
        if not builder.may_continue:
            raise Ended("budget")
        try:
            answer = await self.in_time(builder)
        except DeadlineExceeded:
            raise Ended("deadline") from None
        if answer.finish_reason != "stop":
            raise Ended("budget" if answer.finish_reason == "length" else "aborted")
        return answer

    async def in_time(self, builder: SequenceBuilder) -> Answer:
        seconds = self.context.seconds_left
        if math.isinf(seconds):
            return await builder.generate(stop=STOPS)
        return await self.context.clock.wait_for(builder.generate(stop=STOPS), seconds / 2, "the model")

    async def call(self, main: SequenceBuilder, names: Sequence[str]) -> None:
        calls = [ToolCall(name=name, arguments={"number": number}) for number, name in enumerate(names)]
        self.calls += [{"name": call.name, "arguments": call.arguments} for call in calls]
        results = await self.results(calls)
        self.context.event("tools", names=list(names))
        for result in results:
            if result.reward is not None:
                main.reward(result.reward)
        if any(result.ends for result in results):
            raise Ended("ended")
        self.go_on(main.append_turn([{"role": "tool", "content": result.text} for result in results]))

    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return list(await asyncio.gather(*map(self.context.tools.call, calls)))

    async def ask(self, main: SequenceBuilder) -> str:
        messages = [{"role": "user", "content": "How many?"}]
        return (await self.context.chat("helper", messages, temperature=0.0)).text

    async def hint(self) -> str:
        text: str = await self.context.shared.hint()
        return text

    def go_on(self, possible: bool) -> None:
        if not possible:
            raise Ended("budget")


def _task(question: Any, truth: str, *answers: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"fields": {"messages": messages, "ground_truth": truth}, "answers": answers}


PICTURE = [
    {"type": "text", "text": "What is there?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
]
SIMPLE = (
    _task("What is 2 + 2?", "4", "call add add", "call add", "4"),
    _task("Think.", "done", "again", "again", "done"),
    _task("Ask.", "seven", "ask", "seven"),
    _task(PICTURE, "cat", "dog"),
)
DELEGATING = _task("Get help.", "done", "delegate", "I help", "done")
TOOLS = ({"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},)

#: Of one conversation.
CAPABILITIES = dict.fromkeys(("multi_turn", "worker_life", "tools", "models", "turn_rewards", "multi_modal"), "full")

ONE_CONVERSATION = Reference(
    cls=FullAgent,
    config_class=Config,
    capabilities=CAPABILITIES,
    fixture={"tasks": SIMPLE, "tools": TOOLS, "chat": ["seven"]},
)
REFERENCE = attrs.evolve(
    ONE_CONVERSATION,
    capabilities={**CAPABILITIES, "several_sequences": "full"},
    fixture={"tasks": (*SIMPLE, DELEGATING), "tools": TOOLS},
)
