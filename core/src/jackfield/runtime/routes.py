"""The experts that generated the tokens of a rollout, for training on the same ones (``ModelSpec.router_replay``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from jackfield.abc.agent import AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.routing import joined_experts

NAME = "routed_experts"  #: of the array in ``multi_modal_inputs``, int16 ``[prompt + response - 1, layers, experts]``


@attrs.define(eq=False)
class Routes:
    """What the servers' results of one rollout say, by tokens."""

    _found: list[tuple[tuple[int, ...], Any]] = attrs.field(factory=list)

    def note(self, request: GenerateRequest, result: GenerateResult) -> None:
        """Keep the experts of an answer."""
        if result.routed_experts is not None:
            self._found.append(((*request.prompt_ids, *result.token_ids)[:-1], result.routed_experts))

    def clear(self) -> None:
        """Forget all answers."""
        self._found.clear()

    def added(self, sequences: Sequence[AgentSequence]) -> list[AgentSequence]:
        """Return sequences with their experts; those of tokens that no answer has seen are -1 (chosen freely)."""
        return [self._added(each) for each in sequences]

    def _added(self, sequence: AgentSequence) -> AgentSequence:
        ids, experts = (*sequence.prompt_ids, *sequence.response_ids)[:-1], None
        for seen, found in self._found:
            if ids[: len(seen)] == seen:
                experts = joined_experts(experts, found)
        if experts is None:
            return sequence
        import numpy as np

        rest = np.full((len(ids) - len(experts), *experts.shape[1:]), -1, dtype=np.int16)
        inputs = {**sequence.multi_modal_inputs, NAME: np.concatenate([experts.astype(np.int16), rest])}
        return attrs.evolve(sequence, multi_modal_inputs=inputs)
