"""Contract of an agent loop, which turns a task into token sequences in an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Protocol

import attrs

from jackfield.abc.reward import Generate, HttpClient, read_secret
from jackfield.abc.rollout import GenerateChunk, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import AgentError

#: Why a sequence began beside its parent: another agent of the rollout, another continuation, a shorter history, or a
#: chat template that renders earlier turns otherwise.
Relation = Literal["sub_agent", "branch", "compaction", "template"]


class ChatTokenizer(Protocol):
    """Tokenizes text, each text once. ``jackfield.data.tokens`` implements it with a Hugging Face tokenizer."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a turn of the model."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to the point where the model answers.

        ``tools`` (since 1.1) are the tools' schemas in OpenAI's form, which the template shows to the model.
        """

    def encode_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answer: Mapping[str, Any] | None = None,
        closed: bool = True,
    ) -> tuple[int, ...]:
        """Return the tokens that append messages (tool results, user turns) to the model's answer.

        Since 1.1: ``tools`` are those of the prompt. ``answer`` is the model's answer as a message; a template that
        would render it otherwise now, without its reasoning for example, is refused (``data.not-append-only``).
        ``closed`` says that the answer's last token ends its turn; without it, the template's end of the turn comes
        first.
        """

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that is put into the model's answer, without a turn of its own (since 1.1).

        Names of special tokens in it are plain text.
        """

    def encode_multi_modal(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return the tokens of a conversation with images, and the model's inputs beside tokens (since 1.1).

        These are NumPy arrays by name, such as ``pixel_values``; without images, there are none.
        """

    def encode_multi_modal_turn(
        self, messages: Sequence[Mapping[str, Any]], **how: Any
    ) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return the tokens of :meth:`encode_turn`, and the arrays of the images of these messages (since 1.1)."""

    def placeholders(self) -> tuple[int, ...]:
        """Return the tokens in whose places models see images (since 1.1)."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call of a tool by the model (since 1.1)."""

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)  #: JSON values
    id: str = ""


@attrs.frozen(kw_only=True)
class ToolResult:
    """The result of a tool call (since 1.1)."""

    text: str  #: what the model reads
    is_error: bool = False
    reward: float | None = None  #: for the model's turn that made the call
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    images: tuple[Any, ...] = ()  #: parts of a message's content, in OpenAI's form
    ends: bool = False  #: the rollout ends: no further turn is needed


class ToolSession(Protocol):
    """The tools of one rollout, with their state (since 1.1)."""

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools' schemas in OpenAI's form: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""

    async def call(self, call: ToolCall) -> ToolResult:
        """Call a tool under its deadline; whatever goes wrong is a result with ``is_error``. Calls may be parallel."""


class _NoTools:
    schemas: tuple[Mapping[str, Any], ...] = ()

    async def call(self, call: ToolCall) -> ToolResult:
        return ToolResult(text=f"there is no tool {call.name!r}", is_error=True)


def _absent(what: str) -> Callable[..., NoReturn]:
    """Return a function that refuses a service that this host does not give."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        fix = "give it to AgentContext, as a run does"
        raise AgentError(f"the agent's host has no {what}", code="agent.context", expected=what, fix=fix)

    return refuse


class _NoHttp:
    request = staticmethod(_absent("HTTP client"))


@attrs.frozen(kw_only=True, eq=False)
class AgentWorkerContext:
    """The context of what all rollouts of one worker share (since 1.1)."""

    tokenizer: ChatTokenizer
    folder: Path  #: a scratch folder, which is removed when the worker ends
    clock: Clock = attrs.field(factory=Clock)
    name: str = "agent"  #: the worker's name, for messages and files
    seed: int = 0
    logs: str | None = None  #: path prefix of files that get the output of processes; None: no files
    heartbeat_seconds: float = 30.0  #: a process of the agent without a heartbeat for so long is dead
    http: HttpClient = attrs.field(factory=_NoHttp)
    secret: Callable[[str], str] = read_secret  #: returns an environment variable, else ``reward.secret``


@attrs.frozen(kw_only=True, eq=False)
class AgentContext:
    """The services and limits that an agent loop gets at its construction."""

    generate: Callable[[GenerateRequest], Awaitable[GenerateResult]]  #: calls a replica that the router chooses
    tokenizer: ChatTokenizer
    clock: Clock = attrs.field(factory=Clock)
    request_prefix: str = ""  #: prefix that makes request ids unique
    max_prompt_tokens: int | None = None
    # Since 1.1:
    #: generates as ``generate`` does, and calls a function with the tokens as they come; None: they come at the end
    stream: Callable[[GenerateRequest, Callable[[GenerateChunk], None]], Awaitable[GenerateResult]] | None = None
    cuts_prompts: bool = False  #: the last tokens of a prompt that is too long are used, instead of an error
    max_model_len: int | None = None  #: most tokens of a sequence, prompt and response together
    shared: Any = None  #: what :meth:`AgentLoopBase.start` returned in this worker
    tools: ToolSession = attrs.field(factory=_NoTools)  #: the run's ``tools``
    #: asks a model by name for text: ``policy`` (a replica of this run; these tokens are not trained on), or one of the
    #: run's ``models``
    chat: Generate = attrs.field(factory=lambda: _absent("models"))
    seed: int = 0  #: of the rollout; the same when the run is repeated
    deadline: float | None = None  #: the time of ``clock`` at which the rollout is cancelled
    #: returns a scratch folder of the rollout, made at the first call and removed after it
    folder: Callable[[], Path] = attrs.field(factory=lambda: _absent("scratch folder"))
    metric: Callable[[str, float], None] = lambda name, number: None  #: adds a number to a metric of the rollout
    #: notes that something happened now, ``event(name, **fields)`` of JSON values, for `jackfield trace`
    event: Callable[..., None] = lambda name, **fields: None

    @property
    def seconds_left(self) -> float:
        """The seconds until the rollout is cancelled."""
        return float("inf") if self.deadline is None else self.deadline - self.clock.time()


@attrs.frozen(kw_only=True)
class AgentSequence:
    """One token sequence: a prompt and the response to it.

    ``response_ids``, ``response_mask``, ``response_log_probs`` and ``weight_versions`` have the same length. The mask
    is 1 exactly on tokens that the model generated; on others the log-probability is 0.0 and the version is -1.

    The environment's rewards are added up: ``reward`` on the last token, ``turn_rewards`` on the last token of each
    turn, ``token_rewards`` on each token. If all are None, the reward agent scores the sequence.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    response_log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    reward: float | None = None  #: set if the environment itself computes it
    multi_modal_inputs: Mapping[str, Any] = attrs.field(factory=dict)  #: NumPy arrays of the model's inputs, by name
    step_id: int = 0  #: the step, in a multi-step rollout that yields several sequences
    finish_reason: str = "stop"
    # Since 1.1:
    token_rewards: tuple[float, ...] | None = None  #: one per response token
    turn_rewards: tuple[float, ...] | None = None  #: one per turn: per uninterrupted piece of the model's own tokens
    parent: int | None = None  #: index in the output of the sequence from which this one began; None: the task
    relation: Relation | None = None  #: why it began there; set exactly if there is a parent
    name: str = ""  #: of the agent that wrote it, where several work on one task


@attrs.frozen(kw_only=True)
class AgentLoopOutput:
    """The result of one rollout: no, one or several sequences."""

    sequences: tuple[AgentSequence, ...]
    num_turns: int = 1
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    # Since 1.1:
    tool_calls: tuple[Mapping[str, Any], ...] = ()  #: the model's, of JSON values, for rewards
    end_reason: str = ""  #: why it ended, a word: ``answered``, ``turns``, ``budget``; empty: not said


class AgentLoopBase(ABC):
    """A loop between the model and an environment. One object serves one rollout at a time.

    Invariants, each checked by the conformance suite: tokens are append-only over turns; the mask is 1 exactly on
    the model's tokens; lengths agree; a cancelled rollout leaves nothing running.
    """

    abi_version: ClassVar[str] = "1.1"

    def __init__(self, config: Any, context: AgentContext) -> None:
        self.config = config
        self.context = context

    @classmethod
    async def start(cls, config: Any, context: AgentWorkerContext) -> Any:
        """Open what all rollouts of one worker share, and return it for ``context.shared`` (since 1.1).

        Sessions, pools of environments, indexes. A host calls it once before the first rollout.
        """
        return None

    @classmethod
    async def close(cls, shared: Any) -> None:
        """Close what :meth:`start` returned, after the last rollout (since 1.1)."""
        return

    @abstractmethod
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Solve one task once, whose fields always have ``messages`` (a list of role and content).

        ``sampling_params`` are keyword arguments of :class:`jackfield.abc.rollout.SamplingParams`.
        """

    async def finish(self) -> None:
        """End what a rollout has opened, after :meth:`run`, however that ended: also cancelled (since 1.1)."""
        return
