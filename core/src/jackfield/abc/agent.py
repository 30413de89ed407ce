"""Contract of an agent loop, which turns a task into token sequences in an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.clock import Clock


class ChatTokenizer(Protocol):
    """Tokenizes text, each text once. ``jackfield.data.tokens`` implements it with a Hugging Face tokenizer."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a turn of the model."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to the point where the model answers."""

    def encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens that append messages (tool results, user turns) to the model's answer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""


@attrs.frozen(kw_only=True, eq=False)
class AgentContext:
    """The services and limits that an agent loop gets at its construction."""

    generate: Callable[[GenerateRequest], Awaitable[GenerateResult]]  #: calls a replica that the router chooses
    tokenizer: ChatTokenizer
    clock: Clock = attrs.field(factory=Clock)
    request_prefix: str = ""  #: prefix that makes request ids unique
    max_prompt_tokens: int | None = None


@attrs.frozen(kw_only=True)
class AgentSequence:
    """One token sequence: a prompt and the response to it.

    ``response_ids``, ``response_mask``, ``response_log_probs`` and ``weight_versions`` have the same length. The mask
    is 1 exactly on tokens that the model generated; on others the log-probability is 0.0 and the version is -1.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    response_log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    reward: float | None = None  #: set if the environment itself computes it
    multi_modal_inputs: Mapping[str, Any] = attrs.field(factory=dict)
    step_id: int = 0  #: the step, in a multi-step rollout that yields several sequences
    finish_reason: str = "stop"


@attrs.frozen(kw_only=True)
class AgentLoopOutput:
    """The result of one rollout: no, one or several sequences."""

    sequences: tuple[AgentSequence, ...]
    num_turns: int = 1
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    tool_calls: tuple[Mapping[str, Any], ...] = ()  #: the model's, of JSON values, for rewards (since 1.1)


class AgentLoopBase(ABC):
    """A loop between the model and an environment. One object serves one rollout at a time.

    Invariants, each checked by the conformance suite: tokens are append-only over turns; the mask is 1 exactly on
    the model's tokens; lengths agree; a cancelled rollout leaves nothing running.
    """

    abi_version: ClassVar[str] = "1.1"

    def __init__(self, config: Any, context: AgentContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Solve one task once, whose fields always have ``messages`` (a list of role and content).

        ``sampling_params`` are keyword arguments of :class:`jackfield.abc.rollout.SamplingParams`.
        """
