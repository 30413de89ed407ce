"""The agent that runs a workflow."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentWorkerContext
from jackfield.errors import AgentError
from jackfield_agent_workflow.blocking import Blocking, Caller, run_in_thread
from jackfield_agent_workflow.conversations import Conversations, RolloutEnded
from jackfield_agent_workflow.settings import Config
from jackfield_agent_workflow.shared import Shared, close_workflow
from jackfield_agent_workflow.workflow import Task, Workflow
from jackfield_environments import Episode


class WorkflowAgent(AgentLoopBase):
    """An agent that runs a user's class, and returns the sequences of its conversations."""

    def __init__(self, config: Config, context: AgentContext) -> None:
        super().__init__(config, context)
        self._own: Shared | None = None  #: where the host has no life of workers
        self._workflow: Workflow | None = None
        self._episode: Episode | None = None

    @classmethod
    async def start(cls, config: Config, context: AgentWorkerContext) -> Shared:
        """Import the class, make one object of it, and open the first environment."""
        shared = Shared(
            config,
            clock=context.clock,
            name=context.name,
            logs=None if context.logs is None else f"{context.logs}-environment",
            heartbeat_seconds=context.heartbeat_seconds,
        )
        try:
            await shared.start()
        except BaseException:
            await shared.close()
            raise
        return shared

    @classmethod
    async def close(cls, shared: Shared) -> None:
        """Close workflows and environments."""
        await shared.close()

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Run the workflow on one task; ``environment`` failures raise ``agent.environment``."""
        task, metrics = Task(fields), dict[str, float]()
        if not fields.get("messages"):
            what, expected = "the task has no messages", "a field 'messages': a list of role and content"
            raise AgentError(what, where=f"task {task.id}", expected=expected)
        conversations = Conversations(self.config, self.context, sampling_params, task.id)

        def metric(name: str, value: float) -> None:
            metrics[name] = metrics.get(name, 0.0) + float(value)

        shared = self._shared()
        try:
            self._episode = shared.episode(f"task {task.id}")
            self._workflow = workflow = shared.take()
            reason = await self._run(shared, workflow, conversations, task, metric)
            shared.give(workflow)
            self._workflow = None
        finally:
            await self.finish()
        return AgentLoopOutput(
            sequences=conversations.sequences(),
            num_turns=max(1, conversations.turns),
            metrics=metrics,
            tool_calls=tuple(conversations.tool_calls),
            end_reason=reason,
        )

    async def finish(self) -> None:
        """Give back the environment, and close the workflow of a rollout that failed. Idempotent."""
        workflow, self._workflow = self._workflow, None
        episode, self._episode = self._episode, None
        own, self._own = self._own, None
        try:
            if episode is not None:
                await episode.release()
            if workflow is not None:
                with suppress(Exception):
                    await close_workflow(workflow)
        finally:
            if own is not None:
                await own.close()

    def _shared(self) -> Shared:
        if isinstance(self.context.shared, Shared):
            return self.context.shared
        self._own = Shared(self.config, clock=self.context.clock, name="agent")
        return self._own

    async def _run(
        self, shared: Shared, workflow: Workflow, conversations: Conversations, task: Task, metric: Any
    ) -> str:
        """Run the workflow in the event loop or in a thread; return why it ended."""
        is_async = inspect.iscoroutinefunction(type(workflow).run)
        caller = None if is_async else Caller()
        wrap = {} if caller is None else {"wrap": lambda service: Blocking(service, caller)}
        workflow.bind(self.context, conversations, self._episode, metric, **wrap)
        try:
            if (prepared := workflow.reset(task)) is not None:
                await prepared
            if caller is None:
                value = await workflow.run(task)
            else:
                async with shared.threads:
                    run = functools.partial(workflow.run, task)
                    name = f"{type(workflow).__name__}, {task.id}"
                    value = await run_in_thread(run, caller, name)
        except RolloutEnded as ended:
            return conversations.ended or ended.reason
        if isinstance(value, int | float):  # also a bool
            conversations.reward(float(value), None)
        return self._reason()

    def _reason(self) -> str:
        if self._episode is not None and self._episode.steps:
            return "ended" if self._episode.ended else "turns"
        return "answered"
