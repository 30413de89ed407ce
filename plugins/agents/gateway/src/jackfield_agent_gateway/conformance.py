"""A fixture for ``jackfield plugins check``: a program in the worker that converses as its task says."""

from __future__ import annotations

from pathlib import Path
from typing import Any


async def converse(task: dict[str, Any], base_url: str, api_key: str) -> float | None:
    """Send the task's messages to the model, then the texts ``further``; begin once more with each of ``others``."""
    import aiohttp

    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                response.raise_for_status()
                return [*messages, (await response.json())["choices"][0]["message"]]

        messages = await ask(task["messages"])
        for text in task.get("further", ()):
            messages = await ask([*messages, {"role": "user", "content": text}])
        for text in task.get("others", ()):
            await ask([*task["messages"][:-1], {"role": "user", "content": text}])
    reward: float | None = task.get("reward")
    return reward


def program(folder: Path) -> dict[str, Any]:
    """Return settings of a gateway whose program converses, and its tasks."""
    brief = {"role": "system", "content": "Be brief."}

    def task(question: str, *answers: str, **fields: Any) -> dict[str, Any]:
        return {"fields": {"messages": [brief, {"role": "user", "content": question}], **fields}, "answers": answers}

    return {
        "settings": {"program": {"call": "jackfield_agent_gateway.conformance:converse", "process": False}},
        "tasks": [
            task("What is two and two?", "4", reward=0.0),
            task("What is three and three?", "6", "Yes, 6.", further=["Are you sure?"], reward=0.5),
            task("What is four and four?", "8", "Ten.", others=["What is five and five?"], reward=1.0),
        ],
    }


def images(folder: Path) -> dict[str, Any]:
    """Return the same tasks, those of one conversation about an image, which the suite's tokenizer does not open."""
    made = program(folder)
    for task in made["tasks"]:
        if "others" in task["fields"]:
            continue
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        *before, last = task["fields"]["messages"]
        content = [image, {"type": "text", "text": last["content"]}]
        task["fields"]["messages"] = [*before, {**last, "content": content}]
    return made
