"""A correct agent loop of several turns, and loops with one fault each."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult, SamplingParams
from jackfield.errors import AgentError, DataError
from mutants.harness import Mutant, Reference

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
    """Asks again, ``go on``, while the answer ends with ``+``; the reward says whether the last one is the truth."""

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

MUTANTS: dict[str, Mutant] = {
    "short log-probabilities": Mutant(
        cls=ShortLogProbs, killed_by=("AGT-010", "AGT-013", "AGT-021"), what="the last log-probability is missing"
    ),
    "reward is not a number": Mutant(
        cls=RewardIsNotANumber, killed_by=("AGT-010", "AGT-021"), what="the environment's reward is NaN"
    ),
    "end token masked": Mutant(cls=EndTokenMasked, killed_by=("AGT-011",), what="the mask is one short in each answer"),
    "everything trained": Mutant(cls=EverythingTrained, killed_by=("AGT-011",), what="inserted tokens have mask 1"),
    "retokenises": Mutant(cls=Retokenises, killed_by=("AGT-012",), what="earlier answers become text and tokens again"),
    "forgets thinking": Mutant(cls=ForgetsThinking, killed_by=("AGT-012",), what="the model does not see its answers"),
    "no log-probabilities": Mutant(cls=NoLogProbs, killed_by=("AGT-013",), what="log-probabilities are 0"),
    "one version": Mutant(cls=OneVersion, killed_by=("AGT-013",), what="old tokens carry the newest weight version"),
    "own temperature": Mutant(cls=OwnTemperature, killed_by=("AGT-014",), what="the temperature is always 1"),
    "budget per turn": Mutant(
        cls=BudgetPerTurn, killed_by=("AGT-014",), what="each turn may generate as many tokens as the whole run"
    ),
    "no end tokens": Mutant(
        cls=NoEndTokens, killed_by=("AGT-026",), what="the end tokens of the chat template do not stop the model"
    ),
    "drops stop tokens": Mutant(
        cls=DropsStopTokens, killed_by=("AGT-026",), what="the stop tokens of the run are replaced by the end tokens"
    ),
    "no prompt limit": Mutant(cls=NoPromptLimit, killed_by=("AGT-015",), what="prompts may be of any length"),
    "cuts prompts": Mutant(cls=CutsPrompts, killed_by=("AGT-015",), what="long prompts lose their beginning silently"),
    "same prompt": Mutant(cls=OnlySystemMessage, killed_by=("AGT-016",), what="the task's messages are not used"),
    "refuses fields": Mutant(cls=RefusesFields, killed_by=("AGT-017",), what="an unknown field of the task is refused"),
    "appends to messages": Mutant(cls=AppendsToMessages, killed_by=("AGT-018",), what="the task's messages grow"),
    "generation goes on": Mutant(
        cls=GenerationGoesOn, killed_by=("AGT-019", "AGT-025"), what="a cancelled rollout leaves its generation running"
    ),
    "swallows cancellation": Mutant(
        cls=SwallowsCancellation, killed_by=("AGT-019", "AGT-025"), what="a cancelled run returns as if it were done"
    ),
    "swallows failures": Mutant(
        cls=SwallowsFailures, killed_by=("AGT-020",), what="an exception becomes a run without sequences"
    ),
    "goes on after an abort": Mutant(
        cls=GoesOnAfterAbort, killed_by=("AGT-021",), what="after an aborted answer the model is asked again"
    ),
    "aborted as stopped": Mutant(
        cls=AbortedAsStopped, killed_by=("AGT-021",), what="an aborted answer is told as a finished one"
    ),
    "same request ids": Mutant(
        cls=SameRequestId, killed_by=("AGT-022", "AGT-050"), what="each object counts its requests from 0"
    ),
    "shared task": Mutant(
        cls=SharedTask, killed_by=("AGT-022", "AGT-050"), what="the task is kept in the class over a wait"
    ),
    "keeps the task": Mutant(cls=KeepsTheTask, killed_by=("AGT-023",), what="messages of earlier runs come again"),
    "undeclared turns": Mutant(
        cls=ReferenceAgent,
        killed_by=("AGT-024",),
        what="several turns are taken and not declared",
        capabilities={"environment_reward": "full"},
    ),
    "undeclared reward": Mutant(
        cls=ReferenceAgent,
        killed_by=("AGT-024",),
        what="a reward is given and not declared",
        capabilities={"multi_turn": "full"},
    ),
    "leaves a process": Mutant(cls=LeavesAProcess, killed_by=("AGT-025",), what="each run leaves a process running"),
    "one turn": Mutant(cls=OneTurn, killed_by=("AGT-030",), what="declared turns are never taken"),
    "own template": Mutant(cls=OwnTemplate, killed_by=("AGT-031",), what="a template token between turns is dropped"),
    "no reward": Mutant(cls=NoReward, killed_by=("AGT-032",), what="the declared reward never comes"),
}
