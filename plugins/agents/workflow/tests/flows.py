"""Workflows for tests, and a host that runs them as a worker does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from jackfield.abc.agent import AgentContext, AgentLoopOutput, AgentWorkerContext
from jackfield_agent_workflow import Task, Workflow
from jackfield_agent_workflow.agent import WorkflowAgent
from jackfield_agent_workflow.settings import Config
from jackfield_conformance.support.agent_model import Letters, Model
from jackfield_environments import EnvironmentConfig

MESSAGES = [{"role": "user", "content": "ask"}]


class Host:
    """An agent worker with one workflow."""

    def __init__(self, config: Config, shared: Any) -> None:
        self.config, self.shared = config, shared

    async def run(
        self, model: Model, sampling: Mapping[str, Any] | None = None, context: Any = None, **fields: Any
    ) -> AgentLoopOutput:
        given = AgentContext(generate=model, tokenizer=model.tokenizer, shared=self.shared, **(context or {}))
        agent = WorkflowAgent(self.config, given)
        task = {"messages": MESSAGES, "task_id": "t:1", "ground_truth": "4", **fields}
        try:
            return await agent.run({"max_new_tokens": 200, **(sampling or {})}, **task)
        finally:
            await agent.finish()


@contextlib.asynccontextmanager
async def hosting(workflow: Any, folder: Path, *, environment: Any = None, **options: Any) -> AsyncIterator[Host]:
    name = workflow if isinstance(workflow, str) else f"{workflow.__module__}:{workflow.__name__}"
    made = None if environment is None else EnvironmentConfig(**environment)
    config = Config(workflow=name, environment=made, **options)
    shared = await WorkflowAgent.start(config, AgentWorkerContext(tokenizer=Letters(), folder=folder))
    try:
        yield Host(config, shared)
    finally:
        await WorkflowAgent.close(shared)
        assert {asyncio.current_task()} == asyncio.all_tasks()


def said(model: Model, number: int) -> str:
    """Return what the model was shown at a call, as text."""
    return model.tokenizer.decode(model.requests[number].prompt_ids)


def shown_before(model: Model, number: int) -> tuple[int, ...]:
    """Return the tokens of a request and of its answer."""
    request, result = model.calls[number]
    return (*request.prompt_ids, *result.token_ids)


class Ask(Workflow):
    """Asks once; the reward is what the last character says."""

    async def run(self, task: Task) -> float:
        reply = await self.model.chat(task.messages)
        return float(reply.text[-1])
