"""Tasks of verifiers (``verifiers.v1``), each answered once. It needs only the standard library until one is made."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from pathlib import Path
from typing import Any


def make(taskset: str, settings: dict[str, Any] | None = None, most: int = 100_000) -> Verifiers:
    """Make the tasks of a taskset: an installed id, ``file.py:Class`` or ``module:Class``; the first ``most`` of them.

    ``settings`` are those of its configuration.
    """
    import verifiers.v1

    return Verifiers(verifiers.v1, taskset, settings or {}, most)


class Verifiers:
    """A prompt, and the task's own rewards of the answer, without a runtime: those that need one are left out."""

    def __init__(self, library: Any, taskset: str, settings: dict[str, Any], most: int) -> None:
        self._library, given = library, {"id": "" if ":" in taskset else taskset, **settings}
        if ":" in taskset:
            cls = _named(taskset)
            generic = importlib.import_module("verifiers.v1.utils.generic")
            config = generic.concrete_type(cls, library.TasksetConfig) or library.TasksetConfig
            made = cls(config(**given))
        else:
            loaders = importlib.import_module("verifiers.v1.utils.loaders")
            made = loaders.load_taskset(library.TasksetConfig(**given))
        self._tasks = list(itertools.islice(made, most))
        if not self._tasks:
            raise ValueError(f"the taskset {taskset} has no tasks")

    def reset(self, *, seed: int | None = None, task_index: int | None = None) -> tuple[str, dict[str, Any]]:
        """Return the prompt of the task of this index, or else of the one that the seed chooses."""
        index = seed or 0 if task_index is None else task_index
        self._task = self._tasks[index % len(self._tasks)]
        data = self._task.data
        text = "\n\n".join(part for part in (data.system_prompt, data.prompt_text) if part)
        return text, {"task_index": index % len(self._tasks), "key": self._task.key}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer."""
        library, task = self._library, self._task
        graph = importlib.import_module("verifiers.v1.graph")
        question = library.UserMessage(content=task.data.prompt_text)
        nodes = [
            graph.MessageNode(message=question),
            graph.MessageNode(parent=0, message=library.AssistantMessage(content=action), sampled=True),
        ]
        about = library.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = library.AgentInfo(config=library.AgentConfig())
        trace = library.Trace(task=about, agent=agent, nodes=nodes)
        await task.score(trace)
        if not trace.rewards:
            raise ValueError("the task has no reward that can be computed without a runtime")
        info = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return "", float(trace.reward), True, False, {"rewards": info, "metrics": dict(trace.metrics)}


def _named(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"there is no file {place}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
