"""Contract of an agent loop: how a task becomes token sequences, with whatever environment it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.clock import Clock


class ChatTokenizer(Protocol):
    """Text to tokens, once. ``jackfield.data.tokens`` implements it over a Hugging Face tokenizer."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn of the model."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the model has to answer."""

    def encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Tokens that append further messages (tool results, user turns) after the model's own answer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of some tokens."""


@attrs.frozen(kw_only=True, eq=False)
class AgentContext:
    """What a loop works with."""

    generate: Callable[[GenerateRequest], Awaitable[GenerateResult]]  #: a replica, chosen by the router
    tokenizer: ChatTokenizer
    clock: Clock = attrs.field(factory=Clock)
    request_prefix: str = ""  #: prefix that makes request ids unique
    max_prompt_tokens: int | None = None


@attrs.frozen(kw_only=True)
class AgentSequence:
    """One token sequence: a prompt, then everything that followed.

    ``response_ids``, ``response_mask``, ``response_log_probs`` and ``weight_versions`` have one length. The mask is 1
    exactly on tokens that the model generated; on others the log-probability is 0.0 and the version is -1.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    response_log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    reward: float | None = None  #: where the environment itself knows it
    multi_modal_inputs: Mapping[str, Any] = attrs.field(factory=dict)
    step_id: int = 0  #: of a multi-step rollout that yields several sequences
    finish_reason: str = "stop"


@attrs.frozen(kw_only=True)
class AgentLoopOutput:
    """What one rollout yields: no, one or several sequences."""

    sequences: tuple[AgentSequence, ...]
    num_turns: int = 1
    metrics: Mapping[str, float] = attrs.field(factory=dict)


class AgentLoopBase(ABC):
    """A conversation between the model and an environment. One object serves one rollout at a time.

    Invariants, each checked by the conformance suite: tokens are append-only over turns; the mask is 1 exactly on
    the model's tokens; lengths agree; a cancelled rollout leaves nothing running.
    """

    abi_version: ClassVar[str] = "1.0"

    def __init__(self, config: Any, context: AgentContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Solve one task once.

        Args:
            sampling_params: keywords of :class:`jackfield.abc.rollout.SamplingParams`.
            **fields: the task's fields; ``messages`` (a list of role and content) is always there.
        """
