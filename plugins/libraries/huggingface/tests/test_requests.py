"""The handling of requests that all rollout servers share."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateChunk, GenerateRequest, RolloutContext, SamplingParams
from jackfield.errors import RolloutError
from jackfield_huggingface.relay import RelayServer, Running


def request(*prompt: int, **sampling: Any) -> GenerateRequest:
    with attrs.validators.disabled():  # as of a caller that does not know the ranges
        return GenerateRequest(request_id="some", prompt_ids=prompt, sampling=SamplingParams(**sampling))


def server() -> RelayServer:
    """A server of a model with 64 token ids and 10 positions; it has no engine."""
    cls: Any = type("Server", (RelayServer,), dict.fromkeys(RelayServer.__abstractmethods__))
    made: RelayServer = cls(None, RolloutContext(model=ModelSpec(path="")))
    made._vocabulary, made._max_model_len = 64, 10
    return made


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        (request(5, 64), "token id 64"),
        (request(-1), "token id -1"),
        (request(), "an empty prompt"),
        (request(*range(10)), "a prompt of 10 tokens"),
        (request(5, top_p=0.0), "top_p is out of range: 0.0"),
        (request(5, temperature=float("nan")), "temperature is out of range: nan"),
        (request(5, max_new_tokens=0), "max_new_tokens is out of range: 0"),
        (request(5, stop=("",)), "stop is out of range: ('',)"),
    ],
)
def test_a_bad_request_is_refused_by_name(refused: GenerateRequest, found: str) -> None:
    with pytest.raises(RolloutError) as caught:
        server()._check(refused)
    code = "rollout.context-length" if len(refused.prompt_ids) >= 10 else "rollout.request"
    assert (code, "some", found) == (caught.value.code, caught.value.where, caught.value.found)


def test_what_runs_keeps_its_tokens_and_ends_once() -> None:
    """Each token has its weight version; a stream ends with the reason."""

    async def main() -> list[GenerateChunk]:
        chunks: asyncio.Queue[GenerateChunk | None] = asyncio.Queue()
        running = Running(request(5), stream=chunks)
        running.append([1, 2], [-0.1, -0.2], 3)
        running.append([], [], 4)
        running.append([7], [-0.3], 4)
        running.end("stop")
        await running.ended
        result = running.result()
        assert ((1, 2, 7), (-0.1, -0.2, -0.3), (3, 3, 4)) == (
            result.token_ids,
            result.log_probs,
            result.weight_versions,
        )
        return [chunk async for chunk in _until_none(chunks)]

    chunks = asyncio.run(main())
    assert [((1, 2), None), ((7,), None), ((), "stop")] == [(chunk.token_ids, chunk.finish_reason) for chunk in chunks]


async def _until_none(chunks: asyncio.Queue[GenerateChunk | None]) -> Any:
    while chunk := await chunks.get():
        yield chunk
