"""The token sequences of a conversation, as the sequence builder makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from jackfield.abc.agent import AgentSequence, Relation
from jackfield.sdk.arrays import joined


@attrs.frozen(kw_only=True)
class Answer:
    """What the model said in one turn."""

    text: str  #: without special tokens
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort"]
    closed: bool  #: whether its last token ends the turn

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message."""
        return {"role": "assistant", "content": self.text}


@attrs.define(eq=False)
class Part:
    """One token sequence that grows."""

    prompt_ids: tuple[int, ...]
    inputs: Mapping[str, Any]  #: arrays of all images
    parent: Part | None = None
    relation: Relation | None = None
    response_ids: list[int] = attrs.field(factory=list)
    mask: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)
    rewards: dict[int, float] = attrs.field(factory=dict)  #: by index of a response token
    end: int = 0  #: the number of response tokens up to the model's last one
    seen: Mapping[str, Any] = attrs.field(factory=dict)  #: arrays of the images up to there
    finish_reason: str = "stop"
    name: str = ""
    step_id: int = 0

    def insert(self, token_ids: Sequence[int], inputs: Mapping[str, Any] | None = None) -> None:
        """Append tokens that the model has not generated, and the arrays of their images."""
        self.inputs = joined(self.inputs, inputs or {})
        count = len(token_ids)
        self.response_ids += token_ids
        self.mask += [0] * count
        self.log_probs += [0.0] * count
        self.versions += [-1] * count

    def sequence(self, parent: int | None) -> AgentSequence:
        """Return the sequence up to the model's last token."""
        end = self.end
        rewards = [self.rewards.get(place, 0.0) for place in range(end)] if self.rewards else None
        return AgentSequence(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.response_ids[:end]),
            response_mask=tuple(self.mask[:end]),
            response_log_probs=tuple(self.log_probs[:end]),
            weight_versions=tuple(self.versions[:end]),
            token_rewards=None if rewards is None else tuple(rewards),
            multi_modal_inputs=self.seen,
            finish_reason=self.finish_reason,
            parent=parent,
            relation=None if parent is None else self.relation,
            name=self.name,
            step_id=self.step_id,
        )


@attrs.frozen(eq=False)
class Point:
    """The state of a conversation after an answer."""

    part: Part
    inputs: Mapping[str, Any]
    end: int  #: number of its response tokens
    messages: list[dict[str, Any]]
    count: int  #: number of messages
    answer: Answer | None
    made: int
    turn: tuple[int, ...]
    text: str
