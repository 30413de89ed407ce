"""A fixture for ``jackfield plugins check``: a workflow that does what workflows can do, and its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackfield_agent_workflow.multi_turn import MultiTurnWorkflow
from jackfield_agent_workflow.workflow import Task


class Countdown:
    """An environment that asks for the numbers before a first one, down to 1."""

    def reset(self, *, seed: int | None = None, first: int = 3) -> str:
        """Begin with the first number."""
        self._next = first - 1
        return f"Count down from {first}."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the next number; a wrong one ends it."""
        right = action == str(self._next)
        self._next -= 1
        ended = not right or self._next == 0
        return ("Go on." if right else "Wrong."), float(right), ended, False, {"won": right and ended}


class Anything(MultiTurnWorkflow):
    """Counts down, asks a tool or another model, or has two agents, as the task's field ``kind`` says."""

    async def run(self, task: Task) -> None:
        """Work on a task."""
        kind = task.get("kind")
        if kind is None:
            await super().run(task)
            return
        reply = await self.model.chat(task.messages)
        if kind == "team":
            self.reward(0.5, reply)
            reply = await self.agent("solver").chat([{"role": "user", "content": f"Follow the plan: {reply.text}"}])
        elif kind == "model":
            said = (await self.models["policy"].chat(reply.text)).text
            reply = await self.model.chat([*task.messages, reply.message, {"role": "user", "content": said}])
        elif kind == "tool":
            result = await self.tools.call("lookup", {"query": reply.text}, reply)
            if not result.ends:
                turn = {"role": "tool", "content": result.text}
                reply = await self.model.chat([*task.messages, reply.message, turn])
        self.reward(1.0, reply)


def workflow(folder: Path) -> dict[str, Any]:
    """Return settings, and a task for each capability."""

    def task(text: str, *answers: str, **fields: Any) -> dict[str, Any]:
        return {"fields": {"messages": [{"role": "user", "content": text}], **fields}, "answers": answers}

    environment = {"name": f"{__name__}:Countdown", "run": "inline"}
    tasks = [
        task("A short one.", "1", first=2),
        task("Begin.", "3", "2", "1", first=4),
        task("And again.", "3", "1", first=4),
        task("Make a plan.", "add them", "4", kind="team"),
        task("Ask the other one.", "what is it?", "4", kind="model"),
        task("Look it up.", "two and two", "4", kind="tool"),
    ]
    settings = {"workflow": f"{__name__}:Anything", "environment": environment}
    return {"settings": settings, "tasks": tasks, "tools": [{"name": "lookup"}]}


def images(folder: Path) -> dict[str, Any]:
    """Return the same tasks, those of one agent about an image, which the suite's tokenizer does not open."""
    made = workflow(folder)
    for task in made["tasks"]:
        if task["fields"].get("kind") in ("team", "model"):
            continue
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        *before, last = task["fields"]["messages"]
        content = [image, {"type": "text", "text": last["content"]}]
        task["fields"]["messages"] = [*before, {**last, "content": content}]
    return made
