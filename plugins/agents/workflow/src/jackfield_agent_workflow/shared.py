"""What the rollouts of one worker share: objects of the workflow, and the pool of environments."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import ConfigError, described
from jackfield_agent_workflow.settings import Config
from jackfield_agent_workflow.workflow import Workflow
from jackfield_environments import EnvironmentPool, Episode, load


class Shared:
    """Free objects of the workflow, which are used again, and the environments."""

    def __init__(
        self, config: Config, *, clock: Clock, name: str, logs: str | None = None, heartbeat_seconds: float = 30.0
    ) -> None:
        self._config, self._free = config, list[Workflow]()
        self.threads = asyncio.Semaphore(config.threads)
        self.environments: EnvironmentPool | None = None
        if config.environment is not None:
            self.environments = EnvironmentPool(
                config.environment, clock=clock, name=name, logs=logs, heartbeat_seconds=heartbeat_seconds
            )

    async def start(self) -> None:
        """Make the first object, and open the first environment, so that wrong settings end the run at its start."""
        self.give(self.take())
        if self.environments is not None:
            await self.environments.start()

    def take(self) -> Workflow:
        """Return a free object, or a new one."""
        return self._free.pop() if self._free else self._make()

    def give(self, workflow: Workflow) -> None:
        """Take back an object whose rollout has succeeded."""
        self._free.append(workflow)

    def episode(self, task: str) -> Episode | None:
        """Return an episode, which takes an environment when it is reset; None: there are no environments."""
        return None if self.environments is None else self.environments.episode(task)

    async def close(self) -> None:
        """Close everything that is free. Idempotent."""
        free, self._free = self._free, []
        for workflow in free:
            with suppress(Exception):
                await close_workflow(workflow)
        if self.environments is not None:
            await self.environments.close()

    def _make(self) -> Workflow:
        config = self._config
        cls: Any = load(config.workflow, "agent.workflow")
        if not (inspect.isclass(cls) and issubclass(cls, Workflow)):
            what, expected = f"{config.workflow} is not a workflow", "a subclass of jackfield_agent_workflow.Workflow"
            raise ConfigError(what, where="agent.workflow", expected=expected, found=repr(cls), fix="derive the class")
        try:
            made: Workflow = cls(**config.settings)
        except Exception as error:
            what, expected = f"{config.workflow} cannot be made", str(inspect.signature(cls))
            details: Any = {"expected": expected, "found": described(error), "fix": "correct agent.settings"}
            raise ConfigError(what, where="agent.settings", **details) from error
        return made


async def close_workflow(workflow: Workflow) -> None:
    """Call ``close``, which may be a plain function."""
    closing: Any = workflow.close()
    if inspect.isawaitable(closing):
        await closing
