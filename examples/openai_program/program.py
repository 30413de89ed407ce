"""Answers word problems with a language model. It uses OpenAI's client, and knows of nothing else.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python program.py "Tom has 3 apples and finds 4. ..."
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai

client: openai.AsyncOpenAI | None = None


async def answer(question: str, client: openai.AsyncOpenAI) -> str:
    """Return the model's answer: the text after the last ####."""
    messages: list[Any] = [{"role": "user", "content": question}]
    completion = await client.chat.completions.create(model="policy", messages=messages)
    return (completion.choices[0].message.content or "").rpartition("####")[2].strip()


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return 1 if the answer to a task is right, else 0."""
    global client
    client = client or openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    own = client.with_options(base_url=base_url, api_key=api_key)
    return float(await answer(task["question"], own) == task["answer"].rpartition("####")[2].strip())


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[1], openai.AsyncOpenAI())))
