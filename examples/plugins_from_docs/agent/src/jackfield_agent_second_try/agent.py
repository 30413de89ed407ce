"""A conversation of several turns in one token sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput
from jackfield.sdk.sequences import SequenceBuilder, sequences_of


class SecondTryAgent(AgentLoopBase):
    """Asks; where the answer lacks the marker, says so and asks again."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Return one sequence: the prompt, then answers (mask 1) and what was said between them (mask 0)."""
        messages, task = fields.get("messages") or (), fields.get("task_id")
        builder = SequenceBuilder(self.context, sampling_params, messages, task=task)
        reason = await self._ask(builder)
        return AgentLoopOutput(sequences=sequences_of([builder]), num_turns=builder.turns, end_reason=reason)

    async def _ask(self, builder: SequenceBuilder) -> str:
        """Return why the conversation ended."""
        for _ in range(self.config.tries):
            answer = await builder.generate()
            if answer.finish_reason != "stop":
                return "aborted" if answer.finish_reason == "abort" else "budget"
            if self.config.marker in answer.text:
                return "answered"
            if not builder.append_turn([{"role": "user", "content": self.config.hint}]):
                return "budget"
        return "turns"
