"""One question, one answer."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, SamplingParams
from jackfield.errors import AgentError, DataError

_SAMPLING_KEYS = frozenset(field.name for field in attrs.fields(SamplingParams))
_request_numbers = itertools.count()


@attrs.frozen(kw_only=True)
class Config:
    """Nothing to set: the prompt limit and the sampling parameters belong to the run."""


class SingleTurnAgent(AgentLoopBase):
    """An agent that asks the model once and returns its answer as one sequence."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Answer one task. Only its field ``messages`` is used, and ``task_id`` in error messages.

        Sampling parameters are the fields of :class:`jackfield.abc.rollout.SamplingParams`; end tokens are added to
        ``stop_token_ids`` unless ``ignore_eos`` is set. Return one sequence with mask 1 on each token, or none when
        generation was aborted before its first token. It raises ``agent.failed`` for a task without messages or unknown
        sampling parameters, and ``data.prompt-too-long`` for a prompt above the limit.
        """
        prompt_ids = self._prompt(fields)
        result = await self.context.generate(
            GenerateRequest(
                request_id=f"{self.context.request_prefix or 'run'}/{next(_request_numbers)}",
                prompt_ids=prompt_ids,
                sampling=_sampling(sampling_params, self.context.tokenizer.end_token_ids),
            )
        )
        if not result.token_ids:
            return AgentLoopOutput(sequences=())
        sequence = AgentSequence(
            prompt_ids=prompt_ids,
            response_ids=result.token_ids,
            response_mask=(1,) * len(result.token_ids),
            response_log_probs=result.log_probs,
            weight_versions=result.weight_versions,
            finish_reason=result.finish_reason,
        )
        return AgentLoopOutput(sequences=(sequence,))

    def _prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        task = fields.get("task_id")
        if not fields.get("messages"):
            raise AgentError(
                "the task has no messages",
                where=None if task is None else f"task {task}",
                expected="a field 'messages': a list of role and content",
                found=f"fields {sorted(fields)}",
            )
        prompt_ids = self.context.tokenizer.encode_chat(fields["messages"])
        limit = self.context.max_prompt_tokens
        if limit is not None and len(prompt_ids) > limit:
            raise DataError(
                "the prompt has too many tokens",
                code="data.prompt-too-long",
                where=None if task is None else f"task {task}",
                expected=f"at most {limit} tokens",
                found=f"{len(prompt_ids)} tokens",
                fix="raise the limit, or leave this task out of the data",
            )
        return prompt_ids


def _sampling(keywords: Mapping[str, Any], end_token_ids: tuple[int, ...]) -> SamplingParams:
    unknown = keywords.keys() - _SAMPLING_KEYS
    if unknown:
        name = min(unknown)
        close = difflib.get_close_matches(name, _SAMPLING_KEYS, n=1)
        raise AgentError(
            f"unknown sampling parameter {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
            expected=", ".join(sorted(_SAMPLING_KEYS)),
            found=", ".join(sorted(keywords)),
        )
    stop_token_ids = tuple(keywords.get("stop_token_ids", ()))
    if not keywords.get("ignore_eos", False):
        stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *end_token_ids)))
    return SamplingParams(**{**keywords, "stop": tuple(keywords.get("stop", ())), "stop_token_ids": stop_token_ids})
