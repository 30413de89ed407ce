"""Agent loops of ABI 1.1 with one fault each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopOutput, AgentSequence, AgentWorkerContext, ToolCall, ToolResult
from jackfield.errors import AgentError
from jackfield.sdk.sequences import Answer, SequenceBuilder
from mutants import harness
from mutants.agent_features import ONE_CONVERSATION, REFERENCE, STOPS, Ended, FullAgent, Hints


class Changed(FullAgent):
    """Changes what a rollout has yielded."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        return self.changed(await super().run(sampling_params, **fields))

    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        return attrs.evolve(output, sequences=tuple(map(self.sequence, output.sequences)))

    def sequence(self, sequence: AgentSequence) -> AgentSequence:
        return sequence


# -- life


class FinishNeedsRun(FullAgent):
    async def finish(self) -> None:
        assert self.environment is not None
        await super().finish()


class FinishForgets(FullAgent):
    async def finish(self) -> None:
        return


class FinishOnlyAfterSuccess(FullAgent):
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **fields)
        await super().finish()
        return output

    async def finish(self) -> None:
        return


class GrowsInItsWorker(FullAgent):
    async def finish(self) -> None:
        self.context.shared.tasks.append(asyncio.create_task(asyncio.Event().wait(), name="trace"))
        await super().finish()


class WritesIntoTheWorkersFolder(FullAgent):
    async def finish(self) -> None:
        folder = self.context.shared.folder
        (folder / f"rollout-{len(list(folder.iterdir()))}").write_text("done", encoding="utf-8")
        await super().finish()


class ClassInsteadOfShared(FullAgent):
    hints: ClassVar[Hints]

    @classmethod
    async def start(cls, config: Any, context: AgentWorkerContext) -> Any:
        ClassInsteadOfShared.hints = await super().start(config, context)
        return ClassInsteadOfShared.hints

    async def hint(self) -> str:
        return await self.hints.hint()


class CloseForgets(FullAgent):
    @classmethod
    async def close(cls, shared: Any) -> None:
        return


class CancelledStartForgets(FullAgent):
    @classmethod
    async def start(cls, config: Any, context: AgentWorkerContext) -> Any:
        hints = Hints(context.folder)
        await hints.open()
        return hints


# -- limits


class NoContextLimit(FullAgent):
    def __init__(self, config: Any, context: AgentContext) -> None:
        super().__init__(config, attrs.evolve(context, max_model_len=None))


class SilentBudget(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        return attrs.evolve(output, end_reason="" if output.end_reason == "budget" else output.end_reason)


class CutIsStop(Changed):
    def sequence(self, sequence: AgentSequence) -> AgentSequence:
        reason = "stop" if sequence.finish_reason == "length" else sequence.finish_reason
        return attrs.evolve(sequence, finish_reason=reason)


class SilentDeadline(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        return attrs.evolve(output, end_reason="" if output.end_reason == "deadline" else output.end_reason)


class GenerationOutlivesTheDeadline(FullAgent):
    async def in_time(self, builder: SequenceBuilder) -> Answer:
        if self.context.deadline is None:
            return await builder.generate(stop=STOPS)
        generation = asyncio.create_task(builder.generate(stop=STOPS), name="generation")
        return await self.context.clock.wait_for(asyncio.shield(generation), self.context.seconds_left / 2, "it")


class LargeSeedsAreIgnored(FullAgent):
    async def hint(self) -> str:
        text = await super().hint()
        return text if self.context.seed < 2**32 else f"{text} {random.random()}"


# -- reports


class MetricIsNotANumber(FullAgent):
    async def finish(self) -> None:
        self.context.metric("seconds", float("nan"))
        await super().finish()


class EventOfObjects(FullAgent):
    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.context.event("tools", calls=list(calls))
        return await super().results(calls)


class ReportsObjects(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        calls = tuple({**call, "call": self} for call in output.tool_calls)
        return attrs.evolve(output, tool_calls=calls)


class ReasonIsASentence(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        return attrs.evolve(output, end_reason=f"It was {output.end_reason}.")


# -- rewards and sequences


class RewardPerSequence(Changed):
    def sequence(self, sequence: AgentSequence) -> AgentSequence:
        if not sequence.token_rewards:
            return sequence
        return attrs.evolve(sequence, turn_rewards=(0.0,) * (sequence.response_mask.count(1) + 1))


class RewardIsInfinite(Changed):
    def sequence(self, sequence: AgentSequence) -> AgentSequence:
        return attrs.evolve(sequence, token_rewards=(float("inf"),) * len(sequence.response_ids))


class NoTurnRewards(Changed):
    def sequence(self, sequence: AgentSequence) -> AgentSequence:
        return attrs.evolve(sequence, token_rewards=None)


class ParentComesLater(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        return attrs.evolve(output, sequences=output.sequences[::-1])


class RelationWithoutParent(Changed):
    def sequence(self, sequence: AgentSequence) -> AgentSequence:
        return attrs.evolve(sequence, parent=None)


class TrainsTwice(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        again = (output.sequences[0],) if len(output.sequences) > 1 else ()
        return attrs.evolve(output, sequences=(*output.sequences, *again))


class OneSequenceOfSeveral(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        return attrs.evolve(output, sequences=output.sequences[:1])


class SequencesWithoutImages(Changed):
    def sequence(self, sequence: AgentSequence) -> AgentSequence:
        return attrs.evolve(sequence, multi_modal_inputs={})


class RequestsWithoutImages(FullAgent):
    def __init__(self, config: Any, context: AgentContext) -> None:
        async def generate(request: Any) -> Any:
            return await context.generate(attrs.evolve(request, multi_modal_data={}))

        super().__init__(config, attrs.evolve(context, generate=generate))


# -- tools


class HidesToolCalls(Changed):
    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        return attrs.evolve(output, tool_calls=())


class FirstResultOnly(FullAgent):
    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return (await super().results(calls))[:1]


class ToolErrorsFailTheRollout(FullAgent):
    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        results = await super().results(calls)
        if any(result.is_error for result in results):
            raise AgentError("a tool has failed")
        return results


class ResultsAsTheyCome(FullAgent):
    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        results: list[ToolResult] = []

        async def call(each: ToolCall) -> None:
            results.append(await self.context.tools.call(each))

        await asyncio.gather(*map(call, calls))
        return results


class DropsToolRewards(FullAgent):
    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [attrs.evolve(result, reward=None) for result in await super().results(calls)]


class ToolRewardsAtTheEnd(FullAgent):
    later = 0.0

    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        results = await super().results(calls)
        self.later += sum(result.reward or 0.0 for result in results)
        return [attrs.evolve(result, reward=None) for result in results]

    async def turn(self, main: SequenceBuilder, truth: str) -> None:
        try:
            await super().turn(main, truth)
        except Ended:
            if self.later:
                main.reward(self.later)
            raise


class CallGoesOn(FullAgent):
    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return await asyncio.shield(asyncio.create_task(super().results(calls), name="calls"))


class GoesOnAfterTheEnd(FullAgent):
    async def results(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [attrs.evolve(result, ends=False) for result in await super().results(calls)]


# -- other models


class TrainsOnOthers(Changed):
    text = ""

    async def ask(self, main: SequenceBuilder) -> str:
        self.text = await super().ask(main)
        return self.text

    async def finish(self) -> None:
        self.text = ""
        await super().finish()

    def changed(self, output: AgentLoopOutput) -> AgentLoopOutput:
        if not self.text:
            return output
        ids = self.context.tokenizer.encode_text(self.text)
        copied = AgentSequence(
            prompt_ids=output.sequences[0].prompt_ids,
            response_ids=ids,
            response_mask=(1,) * len(ids),
            response_log_probs=(0.0,) * len(ids),
            weight_versions=(-1,) * len(ids),
        )
        return attrs.evolve(output, sequences=(*output.sequences, copied))


class UnknownSampling(FullAgent):
    async def ask(self, main: SequenceBuilder) -> str:
        return (await self.context.chat("helper", [{"role": "user", "content": "?"}], max_tokens=5)).text


class QuestionGoesOn(FullAgent):
    async def ask(self, main: SequenceBuilder) -> str:
        return await asyncio.shield(asyncio.create_task(super().ask(main), name="question"))


def _undeclared(capability: str) -> type[FullAgent]:
    """Return a class that has no fault but its declaration."""
    return type(f"Undeclared_{capability}", (FullAgent,), {})


_FULL = dict(REFERENCE.capabilities)
mutant = partial(harness.mutant, "agent")
one = partial(
    mutant, settings={}, capabilities=ONE_CONVERSATION.capabilities, fixture=ONE_CONVERSATION.fixture
)  #: of the reference with one conversation

MUTANTS = harness.named(
    mutant(FinishNeedsRun, "finish fails if the rollout has not begun", "027"),
    mutant(FinishForgets, "finish does not end the rollout's environment", "025 028 042"),
    mutant(FinishOnlyAfterSuccess, "what failed or was cancelled is not cleaned up", "025 028 042"),
    mutant(GrowsInItsWorker, "each rollout leaves a task in the worker until that closes", "028"),
    mutant(WritesIntoTheWorkersFolder, "each rollout leaves a file in the worker's folder", "028"),
    mutant(ClassInsteadOfShared, "what start opened is kept in the class", "041"),
    mutant(CloseForgets, "close does not end what start has opened", "025 042 043"),
    mutant(CancelledStartForgets, "a start that is cancelled leaves a task", "043"),
    mutant(NoContextLimit, "max_model_len is not looked at", "029"),
    mutant(SilentBudget, "a rollout without room ends without a reason", "029"),
    mutant(CutIsStop, "an answer that was cut is reported as finished", "029"),
    mutant(SilentDeadline, "a rollout that has no time left ends without a reason", "033"),
    mutant(GenerationOutlivesTheDeadline, "the generation continues after the deadline", "033"),
    mutant(LargeSeedsAreIgnored, "seeds above 32 bits are ignored", "034"),
    mutant(MetricIsNotANumber, "a metric is NaN", "035"),
    mutant(EventOfObjects, "an event has objects", "035"),
    mutant(ReportsObjects, "tool_calls has objects", "035"),
    mutant(ReasonIsASentence, "the end reason is a sentence", "037"),
    mutant(RewardPerSequence, "turn_rewards has a number per token", "036"),
    mutant(RewardIsInfinite, "a token's reward is infinite", "036 048"),
    mutant(NoTurnRewards, "declared rewards of turns never come", "048 054"),
    mutant(ParentComesLater, "sequences are in the order in which they end", "038"),
    mutant(RelationWithoutParent, "a sequence has a relation to no parent", "038"),
    mutant(TrainsTwice, "a sequence is there twice", "039"),
    mutant(OneSequenceOfSeveral, "of declared several sequences one is returned", "053"),
    mutant(SequencesWithoutImages, "the sequence lacks the images", "055"),
    mutant(RequestsWithoutImages, "the model does not get the images", "055"),
    mutant(HidesToolCalls, "tool calls are not reported", "044"),
    mutant(FirstResultOnly, "of parallel calls one result reaches the model", "045 048"),
    mutant(ToolErrorsFailTheRollout, "an error of a tool fails the rollout", "046"),
    mutant(ResultsAsTheyCome, "results of parallel calls are in the order in which they came", "047"),
    mutant(DropsToolRewards, "rewards of tools are lost", "048"),
    one(ToolRewardsAtTheEnd, "rewards of tools go to the last turn", "048"),
    mutant(CallGoesOn, "a cancelled rollout leaves its tool calls running", "049"),
    mutant(GoesOnAfterTheEnd, "the model is asked again after a tool has ended the rollout", "051"),
    mutant(TrainsOnOthers, "the answer of another model is trained on", "011 052"),
    mutant(UnknownSampling, "another model is asked with an unknown parameter", "052"),
    mutant(QuestionGoesOn, "a cancelled rollout leaves its question to another model running", "056"),
    *(
        mutant(
            _undeclared(name),
            f"{name} is used and not declared",
            "014 040" if name == "several_sequences" else "040",
            capabilities={each: level for each, level in _FULL.items() if each != name},
        )
        for name in ("tools", "models", "turn_rewards", "multi_modal", "several_sequences")
    ),
)
