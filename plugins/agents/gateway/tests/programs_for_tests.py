"""Programs that know nothing of Jackfield, for the tests of the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def ask(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Ask once with OpenAI's client that blocks."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.chat.completions.create(model="m", messages=task["messages"])
    return {"reward": float(len(answer.choices[0].message.content)), "metrics": {"length": 2}}


def send(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Ask once with nothing but the standard library, which starts fast."""
    body = json.dumps({"model": "m", "messages": task["messages"]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        content = json.load(response)["choices"][0]["message"]["content"]
    return {"reward": float(len(content)), "metrics": {"length": 2}}


async def converse(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Ask twice with OpenAI's client for asyncio, and give no reward."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = list(task["messages"])
        for text in ("more", None):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": text}]


def fail(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Ask once, then raise."""
    send(task, base_url, api_key)
    raise ValueError("bad day")


def crash(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Ask once, then end the process, unless the task is ``well``."""
    send(task, base_url, api_key)
    if task["messages"][0]["content"] != "well":
        os._exit(3)


def hang(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Ask once, then block."""
    send(task, base_url, api_key)
    time.sleep(600)


_asked = asyncio.Event()


async def share(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Ask, give a reward and wait; or, if the task is ``crash``, end the process of all that wait.

    The task is a file. If it is there, an earlier attempt has been made, and this one comes to its end.
    """
    question = task["messages"][0]["content"]
    if question == "crash":
        await _asked.wait()
        os._exit(3)
    found = await asyncio.to_thread(send, task, base_url, api_key)
    file = Path(question)
    if not file.exists():
        body = json.dumps({"reward": 99.0, "metrics": {"dead": 1}}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/rollouts/{api_key}/reward", body, headers)
        (await asyncio.to_thread(urllib.request.urlopen, request)).close()
        file.write_text(api_key)
        _asked.set()
        await asyncio.Event().wait()
    return {"metrics": found["metrics"]}


def misspell(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Ask once, and return a field that there is not."""
    return {**send(task, base_url, api_key), "metrcs": {}}


def silent(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Ask nothing, and return what is no reward."""
    return "no reward"


if __name__ == "__main__":
    given = json.load(sys.stdin)
    run = ask if sys.argv[1] == "file" else send
    found = run(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    if sys.argv[1] == "file":
        with open(os.environ["JACKFIELD_REWARD_FILE"], "w", encoding="utf-8") as file:
            json.dump(found, file)
    elif sys.argv[1] == "last_line":
        print("log\n", found["reward"])
    elif sys.argv[1] == "talk":
        print("on output")
        print("on errors", file=sys.stderr)
    elif sys.argv[1] == "fail":
        sys.exit("bad day")
    elif sys.argv[1] == "hang":
        time.sleep(600)
