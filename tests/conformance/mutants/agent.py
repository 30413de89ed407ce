"""A correct agent loop of several turns, and loops with one fault each."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult, SamplingParams
from jackfield.errors import AgentError, DataError
from mutants import harness
from mutants.harness import Reference

#: What mutants leave behind on purpose; the meta-test clears it.
LEAKED: list[subprocess.Popen[bytes]] = []

_numbers = itertools.count()


@attrs.frozen(kw_only=True)
class Config:
    """How often the model may answer."""

    max_turns: int = 4


@attrs.define
class Draft:
    """A sequence that grows."""

    prompt: tuple[int, ...]
    ids: list[int] = attrs.field(factory=list)
    mask: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)
    generated: int = 0

    def insert(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def answer(self, result: GenerateResult) -> None:
        self.ids += result.token_ids
        self.mask += [1] * len(result.token_ids)
        self.log_probs += result.log_probs
        self.versions += result.weight_versions
        self.generated += len(result.token_ids)

    def finish(self, reward: float | None, reason: str) -> AgentSequence:
        return AgentSequence(
            prompt_ids=self.prompt,
            response_ids=tuple(self.ids),
            response_mask=tuple(self.mask),
            response_log_probs=tuple(self.log_probs),
            weight_versions=tuple(self.versions),
            reward=reward,
            finish_reason=reason,
        )


class ReferenceAgent(AgentLoopBase):
    """Asks again, ``go on``, while the answer ends with ``+``; the reward says whether the last one is the truth.

    It was built for ABI 1.0, and knows nothing of what came later.
    """

    abi_version = "1.0"
    draft_class: ClassVar[type[Draft]] = Draft

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        draft, turns = self.draft_class(self.prompt(fields)), 0
        for _ in range(self.config.max_turns):
            sampling = self.sampling(sampling_params)
            left = self.left(sampling.max_new_tokens, draft)
            if not left:
                break
            result = await self.ask(self.shown(draft), attrs.evolve(sampling, max_new_tokens=left))
            draft.answer(result)
            turns += 1
            text = self.context.tokenizer.decode(result.token_ids)
            if self.is_last(text, result):
                break
            draft.insert(self.turn([{"role": "user", "content": "go on"}]))
        if not draft.ids:
            return AgentLoopOutput(sequences=())
        sequence = draft.finish(self.reward(text, fields), result.finish_reason)
        return AgentLoopOutput(sequences=(sequence,), num_turns=turns)

    def prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        prompt = self.context.tokenizer.encode_chat(fields["messages"])
        limit = self.context.max_prompt_tokens
        if limit is not None and len(prompt) > limit:
            raise DataError("the prompt has too many tokens", code="data.prompt-too-long")
        return prompt

    def shown(self, draft: Draft) -> tuple[int, ...]:
        return (*draft.prompt, *draft.ids)

    def sampling(self, sampling_params: Mapping[str, Any]) -> SamplingParams:
        stops = (*sampling_params.get("stop_token_ids", ()), *self.context.tokenizer.end_token_ids)
        return SamplingParams(**{**sampling_params, "stop_token_ids": stops})

    def left(self, budget: int, draft: Draft) -> int:
        return budget - draft.generated

    async def ask(self, prompt: tuple[int, ...], sampling: SamplingParams) -> GenerateResult:
        request = GenerateRequest(request_id=self.request_id(), prompt_ids=prompt, sampling=sampling)
        return await self.context.generate(request)

    def request_id(self) -> str:
        return f"{self.context.request_prefix}/{next(_numbers)}"

    def is_last(self, text: str, result: GenerateResult) -> bool:
        return not text.endswith("+") or result.finish_reason == "abort"

    def turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.context.tokenizer.encode_turn(messages)

    def reward(self, text: str, fields: Mapping[str, Any]) -> float | None:
        return float(text == fields.get("ground_truth"))


class UndeclaredTurns(ReferenceAgent):
    """It has no fault but its declaration."""


class UndeclaredReward(ReferenceAgent):
    """It has no fault but its declaration."""


class EndTokenMaskedDraft(Draft):
    def answer(self, result: GenerateResult) -> None:
        super().answer(result)
        if self.mask:
            self.mask[-1] = 0


class EndTokenMasked(ReferenceAgent):
    draft_class = EndTokenMaskedDraft


class EverythingTrainedDraft(Draft):
    def insert(self, ids: Sequence[int]) -> None:
        super().insert(ids)
        self.mask[-len(ids) :] = [1] * len(ids)


class EverythingTrained(ReferenceAgent):
    draft_class = EverythingTrainedDraft


class Retokenises(ReferenceAgent):
    def shown(self, draft: Draft) -> tuple[int, ...]:
        if not draft.ids:
            return draft.prompt
        text = self.context.tokenizer.decode(draft.ids)
        return (*draft.prompt, *self.context.tokenizer.encode_chat([{"role": "assistant", "content": text}]))


class ForgetsThinking(ReferenceAgent):
    def shown(self, draft: Draft) -> tuple[int, ...]:
        return (*draft.prompt, *(token for token, own in zip(draft.ids, draft.mask, strict=True) if not own))


class NoLogProbsDraft(Draft):
    def answer(self, result: GenerateResult) -> None:
        super().answer(attrs.evolve(result, log_probs=(0.0,) * len(result.token_ids)))


class NoLogProbs(ReferenceAgent):
    draft_class = NoLogProbsDraft


class OneVersionDraft(Draft):
    def answer(self, result: GenerateResult) -> None:
        newest = max(result.weight_versions, default=0)
        super().answer(attrs.evolve(result, weight_versions=(newest,) * len(result.token_ids)))


class OneVersion(ReferenceAgent):
    draft_class = OneVersionDraft


class ShortLogProbsDraft(Draft):
    def finish(self, reward: float | None, reason: str) -> AgentSequence:
        return attrs.evolve(super().finish(reward, reason), response_log_probs=tuple(self.log_probs[:-1]))


class ShortLogProbs(ReferenceAgent):
    draft_class = ShortLogProbsDraft


class RewardIsNotANumber(ReferenceAgent):
    def reward(self, text: str, fields: Mapping[str, Any]) -> float | None:
        return float("nan")


class OwnTemperature(ReferenceAgent):
    def sampling(self, sampling_params: Mapping[str, Any]) -> SamplingParams:
        return super().sampling({**sampling_params, "temperature": 1.0})


class BudgetPerTurn(ReferenceAgent):
    def left(self, budget: int, draft: Draft) -> int:
        return budget


class NoEndTokens(ReferenceAgent):
    def sampling(self, sampling_params: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams(**sampling_params)


class DropsStopTokens(ReferenceAgent):
    def sampling(self, sampling_params: Mapping[str, Any]) -> SamplingParams:
        return super().sampling({**sampling_params, "stop_token_ids": ()})


class NoPromptLimit(ReferenceAgent):
    def prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        return self.context.tokenizer.encode_chat(fields["messages"])


class CutsPrompts(ReferenceAgent):
    def prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        prompt = self.context.tokenizer.encode_chat(fields["messages"])
        limit = self.context.max_prompt_tokens
        return prompt if limit is None else prompt[-limit:]


class OnlySystemMessage(ReferenceAgent):
    def prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        return super().prompt({"messages": [{"role": "user", "content": "Solve the task."}]})


class RefusesFields(ReferenceAgent):
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        if "conformance_unknown" in fields:
            raise AgentError("unknown field")
        return await super().run(sampling_params, **fields)


class AppendsToMessages(ReferenceAgent):
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **fields)
        fields["messages"].append({"role": "assistant", "content": "done"})
        return output


class GenerationGoesOn(ReferenceAgent):
    async def ask(self, prompt: tuple[int, ...], sampling: SamplingParams) -> GenerateResult:
        return await asyncio.shield(asyncio.create_task(super().ask(prompt, sampling), name="generation"))


class SwallowsCancellation(ReferenceAgent):
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        try:
            return await super().run(sampling_params, **fields)
        except asyncio.CancelledError:
            return AgentLoopOutput(sequences=())


class SwallowsFailures(ReferenceAgent):
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        try:
            return await super().run(sampling_params, **fields)
        except DataError:
            raise
        except Exception:
            return AgentLoopOutput(sequences=())


class GoesOnAfterAbort(ReferenceAgent):
    def is_last(self, text: str, result: GenerateResult) -> bool:
        return not text.endswith("+") and result.finish_reason != "abort"


class AbortedAsStopped(ReferenceAgent):
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **fields)
        return attrs.evolve(output, sequences=tuple(attrs.evolve(s, finish_reason="stop") for s in output.sequences))


class SameRequestId(ReferenceAgent):
    def __init__(self, config: Any, context: AgentContext) -> None:
        super().__init__(config, context)
        self.numbers = itertools.count()

    def request_id(self) -> str:
        return f"{self.context.request_prefix}/{next(self.numbers)}"


class KeepsTheTask(ReferenceAgent):
    def __init__(self, config: Any, context: AgentContext) -> None:
        super().__init__(config, context)
        self.messages: list[Any] = []

    def prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        self.messages += fields["messages"]
        return super().prompt({"messages": self.messages})


class SharedTask(ReferenceAgent):
    current: ClassVar[Mapping[str, Any]] = {}

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        SharedTask.current = fields
        await asyncio.sleep(0)
        return await super().run(sampling_params, **SharedTask.current)


class LeavesAProcess(ReferenceAgent):
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **fields)
        LEAKED.append(subprocess.Popen(["sleep", "60"]))
        return output


class OneTurn(ReferenceAgent):
    def is_last(self, text: str, result: GenerateResult) -> bool:
        return True


class OwnTemplate(ReferenceAgent):
    def turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.context.tokenizer.encode_turn(messages)[1:]


class NoReward(ReferenceAgent):
    def reward(self, text: str, fields: Mapping[str, Any]) -> float | None:
        return None


def _task(question: str, truth: str, *answers: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"fields": {"messages": messages, "ground_truth": truth}, "answers": answers}


_CAPABILITIES = {"multi_turn": "full", "environment_reward": "full"}

REFERENCE = Reference(
    cls=ReferenceAgent,
    config_class=Config,
    settings={"max_turns": 3},
    capabilities=_CAPABILITIES,
    fixture={"tasks": [_task("What is 2 + 2?", "4", "4"), _task("Think.", "done", "first+", "second+", "done")]},
)

mutant = partial(harness.mutant, "agent")

MUTANTS = harness.named(
    mutant(ShortLogProbs, "the last log-probability is missing", "010 013 021"),
    mutant(RewardIsNotANumber, "the environment's reward is NaN", "010 021"),
    mutant(EndTokenMasked, "the mask is one short in each answer", "011"),
    mutant(EverythingTrained, "inserted tokens have mask 1", "011"),
    mutant(Retokenises, "earlier answers become text and tokens again", "012"),
    mutant(ForgetsThinking, "the model does not see its answers", "012"),
    mutant(NoLogProbs, "log-probabilities are 0", "013"),
    mutant(OneVersion, "old tokens carry the newest weight version", "013"),
    mutant(OwnTemperature, "the temperature is always 1", "014"),
    mutant(BudgetPerTurn, "each turn may generate as many tokens as the whole rollout", "014"),
    mutant(NoEndTokens, "the end tokens of the chat template do not stop the model", "026"),
    mutant(DropsStopTokens, "the stop tokens of the run are replaced by the end tokens", "026"),
    mutant(NoPromptLimit, "prompts may be of any length", "015"),
    mutant(CutsPrompts, "long prompts lose their beginning silently", "015"),
    mutant(OnlySystemMessage, "the task's messages are not used", "016"),
    mutant(RefusesFields, "an unknown field of the task is refused", "017"),
    mutant(AppendsToMessages, "the task's messages grow", "018"),
    mutant(GenerationGoesOn, "a cancelled rollout leaves its generation running", "019 025"),
    mutant(SwallowsCancellation, "a cancelled rollout returns as if it were done", "019 025"),
    mutant(SwallowsFailures, "an exception becomes a rollout without sequences", "020"),
    mutant(GoesOnAfterAbort, "after an aborted answer the model is asked again", "021"),
    mutant(AbortedAsStopped, "an aborted answer is reported as finished", "021"),
    mutant(SameRequestId, "each object counts its requests from 0", "022 050"),
    mutant(SharedTask, "the task is kept in the class over a wait", "022 050"),
    mutant(KeepsTheTask, "messages of earlier rollouts come again", "023"),
    mutant(
        UndeclaredTurns, "several turns are taken and not declared", "024", capabilities={"environment_reward": "full"}
    ),
    mutant(UndeclaredReward, "a reward is given and not declared", "024", capabilities={"multi_turn": "full"}),
    mutant(LeavesAProcess, "each rollout leaves a process running", "025"),
    mutant(OneTurn, "declared turns are never taken", "030"),
    mutant(OwnTemplate, "a template token between turns is dropped", "031"),
    mutant(NoReward, "the declared reward never comes", "032"),
)
