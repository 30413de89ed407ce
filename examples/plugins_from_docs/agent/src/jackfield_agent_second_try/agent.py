"""A conversation of several turns in one token sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult, SamplingParams
from jackfield.errors import DataError
from jackfield_agent_second_try.config import Config

_NUMBERS = itertools.count()


class SecondTryAgent(AgentLoopBase):
    """Asks; where the answer lacks the marker, says so and asks again."""

    def __init__(self, config: Config, context: AgentContext) -> None:
        super().__init__(config, context)
        self._settings = config

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """One sequence: the prompt, then answers (mask 1) and what was said between them (mask 0)."""
        tokenizer = self.context.tokenizer
        prompt_ids = self._prompt(fields)
        hint_ids = tokenizer.encode_turn([{"role": "user", "content": self._settings.hint}])
        budget = SamplingParams(**sampling_params).max_new_tokens  # of all tries together
        said = _Sequence(prompt_ids)
        turns, reason = 0, "stop"
        while turns < self._settings.tries and sum(said.mask) < budget:
            if turns:
                said.insert(hint_ids)
            result = await self._generate(sampling_params, prompt_ids + tuple(said.ids), budget - sum(said.mask))
            said.answer(result)
            turns, reason = turns + 1, result.finish_reason
            if reason != "stop" or self._settings.marker in tokenizer.decode(result.token_ids):
                break
        if not any(said.mask):
            return AgentLoopOutput(sequences=(), num_turns=turns)
        return AgentLoopOutput(sequences=(said.sequence(reason),), num_turns=turns, metrics={"turns": float(turns)})

    def _prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        prompt_ids = self.context.tokenizer.encode_chat(fields["messages"])
        limit = self.context.max_prompt_tokens
        if limit is not None and len(prompt_ids) > limit:
            raise DataError(
                "the prompt has too many tokens",
                code="data.prompt-too-long",
                where=f"task {fields.get('task_id')}",
                expected=f"at most {limit}",
                found=len(prompt_ids),
            )
        return prompt_ids

    async def _generate(self, sampling: Mapping[str, Any], prompt_ids: tuple[int, ...], limit: int) -> GenerateResult:
        stops = (*sampling.get("stop_token_ids", ()), *self.context.tokenizer.end_token_ids)
        return await self.context.generate(
            GenerateRequest(
                request_id=f"{self.context.request_prefix}/second-try/{next(_NUMBERS)}",
                prompt_ids=prompt_ids,
                sampling=SamplingParams(**{**sampling, "stop_token_ids": stops, "max_new_tokens": limit}),
            )
        )


class _Sequence:
    """Everything after the prompt. It only grows."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []

    def answer(self, result: GenerateResult) -> None:
        """Tokens of the model, with what is known of each."""
        self.ids += result.token_ids
        self.mask += [1] * len(result.token_ids)
        self.log_probs += result.log_probs
        self.versions += result.weight_versions

    def insert(self, token_ids: tuple[int, ...]) -> None:
        """Tokens of somebody else: no loss, no log-probability, no version."""
        self.ids += token_ids
        self.mask += [0] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)

    def sequence(self, reason: str) -> AgentSequence:
        return AgentSequence(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.ids),
            response_mask=tuple(self.mask),
            response_log_probs=tuple(self.log_probs),
            weight_versions=tuple(self.versions),
            finish_reason=reason,
        )
