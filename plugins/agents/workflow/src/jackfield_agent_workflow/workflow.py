"""The base class of workflows, and what they get."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, ToolCall, ToolResult
from jackfield.abc.reward import GeneratedText
from jackfield.errors import AgentError, JackfieldError
from jackfield_agent_workflow.conversations import Conversations, Reply
from jackfield_environments import Episode


@attrs.frozen(eq=False)
class Task(Mapping[str, Any]):
    """One task: a mapping with the fields of its record, among them ``messages``, ``task_id`` and ``ground_truth``."""

    fields: Mapping[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt, as a list that may be changed."""
        return [dict(message) for message in self.fields.get("messages") or ()]

    @property
    def question(self) -> str:
        """The text of the last message."""
        content = self.messages[-1].get("content") if self.messages else ""
        return content if isinstance(content, str) else ""

    @property
    def id(self) -> str:
        """The task's id."""
        return str(self.fields.get("task_id", ""))

    @property
    def ground_truth(self) -> str:
        """The right answer, where the data has one."""
        return str(self.fields.get("ground_truth") or "")

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


@attrs.frozen(eq=False)
class Policy:
    """The model that is trained, as one agent of the workflow; ``name`` tells agents apart."""

    _conversations: Conversations
    name: str = ""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        stop: str | Sequence[str] = (),
        max_new_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Return the answer to a conversation, whose tokens are trained on.

        ``messages`` that extend an earlier conversation of this agent, with the message of its answer in its place, go
        on in the same sequence, token by token; after an answer that another turn has followed, in a branch. Any other
        conversation begins another sequence; that of a named agent has the newest one as its parent.

        Raises:
            RolloutEnded: The budget of tokens or the context is used up, or generation was aborted.
        """
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        more: Any = {"stop": stop, "max_new_tokens": max_new_tokens, "tools": tools}
        return await self._conversations.chat(given, self.name, **more)

    async def next_step(
        self, previous: Reply | None, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = ()
    ) -> Reply:
        """Return the answer to a conversation that is the next step of a rollout, in a sequence of its own.

        The sequence of a step has the number of the step, and the sequence of ``previous`` as its parent.
        """
        step = None if previous is None else previous.builder
        return await self._conversations.chat(messages, self.name, stop=stop, step=step)

    @property
    def tokens_left(self) -> int:
        """The number of tokens that all agents of the rollout together may still generate."""
        return self._conversations.tokens_left


@attrs.frozen(eq=False)
class OtherModel:
    """A model that is not trained, or answers of the policy that are not."""

    _context: AgentContext
    name: str

    async def chat(self, messages: Sequence[Mapping[str, Any]] | str, **sampling: Any) -> GeneratedText:
        """Return the answer to a conversation; ``text`` is its text."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return await self._context.chat(self.name, given, **sampling)


@attrs.frozen(eq=False)
class Models:
    """The models of the run by name: ``policy``, and those of the section ``models``."""

    _context: AgentContext

    def __getitem__(self, name: str) -> OtherModel:
        return OtherModel(self._context, name)


@attrs.frozen(eq=False)
class Tools:
    """The tools of the section ``tools``, with their state in this rollout."""

    _context: AgentContext
    _conversations: Conversations

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Their schemas in OpenAI's form, for ``chat(…, tools=…)``."""
        return self._context.tools.schemas

    async def call(self, name: str, arguments: Mapping[str, Any] | str, reply: Reply | None = None) -> ToolResult:
        """Call a tool; whatever goes wrong is a result with ``is_error``, and nothing is raised.

        ``arguments`` is a mapping, or a JSON object as text, which calls of OpenAI's form have. A reward of the tool
        is given to ``reply``, by default the newest answer.
        """
        try:
            given = _as_arguments(name, arguments)
            self._conversations.tool_calls.append({"name": name, "arguments": given})
            result = await self._context.tools.call(ToolCall(name=name, arguments=given))
            if result.reward is not None:
                self._conversations.reward(result.reward, reply)
        except Exception as error:  # of any kind: the arguments may be the model's, and the tool the user's
            what = error.message if isinstance(error, JackfieldError) else f"{error}"
            return ToolResult(text=f"{name} failed: {what}", is_error=True)
        return result


def _as_arguments(name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call's arguments; ``ValueError`` says what is wrong with it."""
    if not isinstance(name, str):
        raise ValueError(f"the name of a tool is a text, not a {type(name).__name__}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise ValueError(f"its arguments are not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"its arguments must be a JSON object, not a {type(arguments).__name__}")
    return dict(arguments)


class Workflow:
    """An agent as a class with one method, :meth:`run`. Settings are keyword arguments of the constructor.

    An object serves one rollout after the other; what it opens in the constructor is kept. Before each rollout
    :meth:`reset` is called. An object whose rollout failed or was cancelled is closed and not used again.
    """

    model: Policy  #: the model that is trained
    models: Models  #: other models, and the policy without training: ``await self.models["judge"].chat(…)``
    tools: Tools  #: the run's tools
    seed: int  #: of the rollout
    metric: Callable[[str, float], None]  #: adds a number to a metric of the rollout
    event: Callable[..., None]  #: notes that something happened, for `jackfield trace`
    context: AgentContext  #: everything that an agent gets
    _conversations: Conversations
    _environment: Episode | None
    _wrap: Callable[[Any], Any]

    async def run(self, task: Task) -> Any:
        """Work on a task once. It may be a plain function: it then runs in a thread, and its calls block.

        What it returns is not used, except for a number, which is the reward of the newest answer.
        """
        raise NotImplementedError

    async def reset(self, task: Task) -> None:
        """Prepare for a task. Called before each rollout, also the first."""

    async def close(self) -> None:
        """Free what the constructor has opened. Called when the worker ends, or the object is not used again."""

    @property
    def environment(self) -> Episode:
        """The environment, from the pool of ``agent.environment``; it is given back when the rollout ends."""
        if self._environment is None:
            what, fix = "the workflow uses an environment, and none is set", "set agent.environment"
            raise AgentError(what, code="agent.environment", expected="agent.environment", fix=fix)
        episode: Episode = self._wrap(self._environment)
        return episode

    def agent(self, name: str) -> Policy:
        """Return the policy as another agent of this rollout, with conversations of its own."""
        policy: Policy = self._wrap(Policy(self._conversations, name))
        return policy

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """Give a reward to an answer, by default to the newest one. Rewards of one answer add up.

        A sequence without any reward is scored by the run's reward agent.
        """
        self._conversations.reward(float(value), reply)

    def leave_out(self, reply: Reply) -> None:
        """Do not train on the sequence that an answer is in."""
        self._conversations.leave_out(reply)

    def bind(
        self,
        context: AgentContext,
        conversations: Conversations,
        environment: Episode | None,
        metric: Callable[[str, float], None],
        wrap: Callable[[Any], Any] = lambda service: service,
    ) -> None:
        """Give the object the services of a rollout, each through ``wrap``. The agent calls it."""
        self.context, self._conversations, self._environment, self._wrap = context, conversations, environment, wrap
        self.model, self.models, self.tools = (
            wrap(Policy(conversations)),
            wrap(Models(context)),
            wrap(Tools(context, conversations)),
        )
        self.seed, self.event, self.metric = context.seed, context.event, metric
