"""The model calls tools and reads their results, turn by turn (ReAct, Yao et al., arXiv:2210.03629)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, ToolCall, ToolResult
from jackfield.errors import DataError
from jackfield.sdk.sequences import Answer, SequenceBuilder, sequences_of
from jackfield_agent_tool.formats import Call, Malformed, Reader, Said, plain
from jackfield_agent_tool.settings import Config, InlineCall
from jackfield_tool_calls import parse, split_reasoning


@attrs.define(eq=False)
class _Rollout:
    """What happens in one rollout."""

    builder: SequenceBuilder
    reader: Reader
    calls: list[dict[str, Any]] = attrs.field(factory=list)
    malformed: int = 0
    errors: int = 0


class ToolAgent(AgentLoopBase):
    """An agent that asks the model, calls the tools that it names, and asks again with their results.

    The tools are those of the run (``context.tools``). Errors of tools, unknown tools and calls that cannot be read go
    back to the model. The rollout ends (``end_reason``) when an answer has no call (``answered``), a tool says so
    (``ended``), after ``max_turns`` answers (``turns``), without tokens or context (``budget``), or when generation was
    aborted (``aborted``).
    """

    shows_images = False  #: of the tools' results

    def __init__(self, config: Config, context: AgentContext) -> None:
        super().__init__(config, context)

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Solve one task. Its fields ``messages`` and ``task_id`` are used.

        Errors are those of :class:`jackfield.sdk.sequences.SequenceBuilder`, and ``agent.tool-format``.
        """
        config: Config = self.config
        schemas, is_inline = self.context.tools.schemas, config.format == "inline"
        shown = config.show_tools if config.show_tools is not None else not is_inline
        builder = SequenceBuilder(
            self.context,
            sampling_params,
            fields.get("messages") or (),
            tools=schemas if shown else (),
            on_template_change=config.on_template_change,
            on_overflow=config.on_overflow,
            task=fields.get("task_id"),
        )
        rollout = _Rollout(builder, Reader(config, self.context.tokenizer, schemas))
        end = await (self._inline(rollout) if is_inline else self._turns(rollout))
        counts = {"tool_calls": len(rollout.calls), "tool_errors": rollout.errors, "malformed_calls": rollout.malformed}
        return AgentLoopOutput(
            sequences=sequences_of([builder]),
            num_turns=max(1, builder.turns),
            metrics={name: float(count) for name, count in counts.items()},
            tool_calls=tuple(rollout.calls),
            end_reason=end,
        )

    # -- calls in turns

    async def _turns(self, rollout: _Rollout) -> str:
        """Ask and call until the end; return why it came."""
        builder, config = rollout.builder, self.config
        while builder.may_continue:
            answer = await builder.generate()
            if reason := _cut_off(answer):
                return reason
            said = rollout.reader.read(answer.token_ids, builder.turns)
            if not said.calls:
                return "answered"
            if builder.turns >= config.max_turns:
                return "turns"
            results = await self._results(rollout, said.calls)
            if any(result.ends for result in results):
                return "ended"
            messages = [self._message(call, result) for call, result in zip(said.calls, results, strict=True)]
            if not self._append(builder, messages, said):
                return "budget"
        return "budget"

    def _append(self, builder: SequenceBuilder, messages: Sequence[Mapping[str, Any]], said: Said) -> bool:
        """Append the results. A template may refuse the calls, as Llama 3's does several: then they are plain text.

        Images that cannot be shown are left out, and the model reads why.
        """
        try:
            return builder.append_turn(messages, answer=said.message)
        except DataError as error:
            if error.code == "data.image" and any(isinstance(each["content"], list) for each in messages):
                why = f"[the images cannot be shown: {error.message}]"
                return self._append(builder, [_without_images(each, why) for each in messages], said)
            if error.code != "data.malformed" or "tool_calls" not in said.message:
                raise
            return builder.append_turn(messages, answer=said.plain_message)

    def _message(self, call: Call, result: ToolResult) -> dict[str, Any]:
        if isinstance(call, Malformed):
            named = {"name": "unknown", "tool_call_id": "call00000"} if self.config.error_role == "tool" else {}
            return {"role": self.config.error_role, **named, "content": result.text}
        content: Any = result.text
        if result.images and self.shows_images:
            content = [*([{"type": "text", "text": content}] if content else []), *result.images]
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}

    # -- calls within an answer

    async def _inline(self, rollout: _Rollout) -> str:
        """Go on behind each call with its result; return why the end came."""
        builder, text, calls = rollout.builder, "", 0
        stops = [mark.end for mark in self.config.marks]
        while builder.may_continue:
            answer = await builder.generate(stop=stops)
            if reason := _cut_off(answer):
                return reason
            piece = rollout.reader.text(answer.token_ids)
            text += piece
            found = self._inline_call(text)
            if found is None:
                if answer.closed or not any(stop in piece for stop in stops):
                    return "answered"
                continue  # the text that ends calls, where there is none
            calls += 1
            if calls >= self.config.max_turns:
                return "turns"
            mark, call = found
            [result] = await self._results(rollout, [call])
            if result.ends:
                return "ended"
            if not builder.append_text(mark.result.replace("{text}", result.text)):
                return "budget"
            text = ""
        return "budget"

    def _inline_call(self, text: str) -> tuple[InlineCall, Call] | None:
        """Return the call at the end of the model's text since the last result."""
        _, rest = split_reasoning(text)
        rest = rest or text  # within reasoning: calls belong to it
        for mark in self.config.marks:
            _, begins, inner = rest.rpartition(mark.begin)
            if mark.begin == mark.end or not begins:
                continue
            content, ends, _ = inner.partition(mark.end)
            if ends:
                return mark, _call_in(content, mark)
        return None

    # -- calls

    async def _results(self, rollout: _Rollout, calls: Sequence[Call]) -> list[ToolResult]:
        """Make the calls of one answer, several at a time; give their rewards to it."""
        if len(calls) == 1:
            results = [await self._called(calls[0])]
        else:
            places = asyncio.Semaphore(self.config.max_parallel)

            async def called(call: Call) -> ToolResult:
                async with places:
                    return await self._called(call)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(called(call)) for call in calls]
            results = [task.result() for task in tasks]
        for call, result in zip(calls, results, strict=True):
            rollout.errors += result.is_error
            if isinstance(call, Malformed):
                rollout.malformed += 1
                continue
            about = {"id": call.id, "turn": rollout.builder.turns, "is_error": result.is_error}
            rollout.calls.append({"name": call.name, "arguments": plain(call.arguments), **about})
        rewards = [result.reward for result in results if result.reward is not None]
        if rewards:
            rollout.builder.reward(math.fsum(rewards))
        return results

    async def _called(self, call: Call) -> ToolResult:
        if isinstance(call, Malformed):
            return ToolResult(text=call.problem, is_error=True)
        try:
            result = await self.context.tools.call(call)
        except Exception as error:  # a tool session returns errors; this one does not
            logging.getLogger("jackfield").warning("the tool %s raised", call.name, exc_info=True)
            return ToolResult(text=f"{call.name} failed: {type(error).__name__}: {error}", is_error=True)
        if result.images and not self.shows_images:
            text = f"{result.text}\n[{len(result.images)} images cannot be shown]".strip()
            return attrs.evolve(result, text=text)
        return result


class ToolImagesAgent(ToolAgent):
    """The same agent for a model that sees: tasks and results of tools may have images."""

    shows_images = True


def _without_images(message: Mapping[str, Any], why: str) -> dict[str, Any]:
    if not isinstance(message["content"], list):
        return dict(message)
    texts = [part["text"] for part in message["content"] if part.get("type") == "text"]
    return {**message, "content": "\n".join([*texts, why])}


def _call_in(text: str, mark: InlineCall) -> Call:
    """Return the call that stands between two texts."""
    if mark.tool is not None:
        return ToolCall(name=mark.tool, arguments={mark.argument: text.strip()})
    found = parse(f"<tool_call>{text}</tool_call>", "hermes")
    return Malformed(found.problems[0]) if found.problems else found.calls[0]


def _cut_off(answer: Answer) -> str:
    """Return why an answer is not whole; empty if it is."""
    if answer.finish_reason == "abort":
        return "aborted"
    return "budget" if answer.finish_reason == "length" else ""
