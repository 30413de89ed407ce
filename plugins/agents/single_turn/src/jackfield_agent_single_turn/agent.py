"""One question, one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput
from jackfield.sdk.sequences import SequenceBuilder, sequences_of


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
        messages, task = fields.get("messages") or (), fields.get("task_id")
        builder = SequenceBuilder(self.context, sampling_params, messages, task=task)
        await builder.generate()
        return AgentLoopOutput(sequences=sequences_of([builder]))
