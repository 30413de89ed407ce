"""Tests of what an agent worker reports about a task in addition to samples."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from jackfield.abc.agent import ChatTokenizer
from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.queue import Values
from jackfield.runtime.workers import AgentWorker


class Letters:
    """A tokenizer with one token per letter."""

    def encode_chat(self, messages: Any) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in messages[-1]["content"])


@pytest.mark.parametrize(("most", "limit", "expected"), [(3, None, "abc"), (3, 2, "ab"), (9, 8, "abcd")])
def test_a_canary_is_no_longer_than_a_prompt_may_be(most: int, limit: int | None, expected: str) -> None:
    worker = AgentWorker(cast(Values, None), cast(ChatTokenizer, Letters()), Clock(), None, max_prompt_tokens=limit)
    task = Task(id="one", messages=({"role": "user", "content": "abcd"},))
    assert tuple(map(ord, expected)) == asyncio.run(worker.prompt_ids(task, most))
