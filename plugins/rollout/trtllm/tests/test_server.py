"""The plugin's logic, on an LLM of the tests': nothing here says what TensorRT-LLM itself does."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch

from jackfield.abc.rollout import AbortRequest, PauseRequest, ResumeRequest, SleepRequest, WakeUpRequest
from jackfield.errors import PluginError, RolloutError, WeightsError
from jackfield_huggingface.shaping import ShapedRequest, Shaping
from jackfield_testing import in_loop

from .conftest import SLOW, Serve, make_request, sync, weights_of


@in_loop
async def test_tokens_come_with_log_probs_and_versions(serve: Serve) -> None:
    async with serve() as server:
        result = await server.generate(make_request("a", max_new_tokens=3, stop_token_ids=(9,)))
        assert ((100,) * 3, (0.0,) * 3, (0,) * 3, "length") == (
            result.token_ids, result.log_probs, result.weight_versions, result.finish_reason
        )  # fmt: skip
        chunks = [chunk async for chunk in server.generate_stream(make_request("b", max_new_tokens=2, temperature=0))]
        assert [((100,), None), ((100,), None), ((), "length")] == [(c.token_ids, c.finish_reason) for c in chunks]
        first, second = server.fake.asked
        assert ([5, 6], 3, 1.0, None, [9]) == (
            first.prompt, *(first.arguments[name] for name in ("max_tokens", "temperature", "top_k", "stop_token_ids"))
        )  # fmt: skip
        assert 1 == second.arguments["top_k"]
        assert first.arguments["seed"] != second.arguments["seed"]


@in_loop
async def test_an_update_in_the_middle_of_a_request_asks_for_the_rest_with_the_new_weights(serve: Serve) -> None:
    """One budget of tokens, and each token knows its weights; what workers have read is what was sent."""
    async with serve() as server:
        tensors = weights_of(server)
        for _ in range(2):
            server.fake.steps.put_nowait(None)
        stream = server.generate_stream(make_request("slow", SLOW, max_new_tokens=5))
        early = [await anext(stream), await anext(stream)]
        await sync(server, 1, tensors)
        for _ in range(3):
            server.fake.steps.put_nowait(None)
        late = [chunk async for chunk in stream]
        versions = [version for chunk in (*early, *late) for version in chunk.weight_versions]
        assert ([0, 0, 1, 1, 1], "length") == (versions, late[-1].finish_reason)
        assert [-1.0] * 3 == [value for chunk in late for value in chunk.log_probs]
        assert ([SLOW, 100, 100], 3) == (server.fake.asked[1].prompt, server.fake.asked[1].arguments["max_tokens"])
        assert ["jackfield_load", "update_weights"] == server.fake.called
        assert set(tensors) == set(server.fake.loaded)
        assert all(torch.equal(tensor, server.fake.loaded[name]) for name, tensor in tensors.items())


@in_loop
async def test_weights_that_are_not_loaded_leave_it_stale(serve: Serve) -> None:
    async with serve() as server:
        server.fake.fails = True
        with pytest.raises(WeightsError) as caught:
            await sync(server, 1, weights_of(server))
        assert "no such tensor" in caught.value.message
        with pytest.raises(RolloutError) as stale:
            await server.generate(make_request("a"))
        assert "rollout.stale" == stale.value.code
        server.fake.fails = False
        await sync(server, 1, weights_of(server))
        assert (1,) == (await server.generate(make_request("a", max_new_tokens=1))).weight_versions


@in_loop
async def test_pauses_and_aborts(serve: Serve) -> None:
    """A pause takes requests out and resume asks again; what is aborted keeps its tokens."""
    async with serve() as server:
        server.fake.steps.put_nowait(None)
        stream = server.generate_stream(make_request("slow", SLOW, max_new_tokens=3))
        chunks = [await anext(stream)]
        assert 1 == (await server.pause(PauseRequest())).running
        assert server.fake.asked[0].aborted.is_set()
        server.fake.steps.put_nowait(None)
        await server.resume(ResumeRequest())
        chunks.append(await anext(stream))
        await server.abort(AbortRequest())
        chunks += [chunk async for chunk in stream]
        assert ([100, 100], "abort") == ([token for c in chunks for token in c.token_ids], chunks[-1].finish_reason)
        assert server.fake.asked[1].aborted.is_set()


@in_loop
async def test_memory_is_given_back_and_taken(serve: Serve) -> None:
    async with serve() as server:
        await server.sleep(SleepRequest(level=1))
        await sync(server, 1, weights_of(server))
        assert ("weights", "kv_cache") == (await server.wake_up(WakeUpRequest())).awake
        await server.sleep(SleepRequest(level=2))
        await server.wake_up(WakeUpRequest(tags=("weights",)))
        assert [
            ("release", ["kv_cache"]),
            ("resume", ["kv_cache"]),
            ("release", ["model", "kv_cache"]),
            ("resume", ["model"]),
        ] == server.fake.memory
        assert not (await server.health()).healthy


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_log_probs_of_unknown_meaning_are_refused(serve: Serve, sampling: dict[str, Any]) -> None:
    async def main() -> None:
        async with serve() as server:
            with pytest.raises(PluginError) as caught:
                await server.generate(make_request("a", **sampling))
            assert "plugin.capability" == caught.value.code
            assert [] == server.fake.asked

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["adapter", "delta"])
def test_other_updates_are_refused_and_change_nothing(serve: Serve, kind: Any) -> None:
    from jackfield.abc.rollout import UpdateWeightsRequest

    async def main() -> None:
        async with serve() as server:
            with pytest.raises(PluginError) as caught:
                await server.update_weights(UpdateWeightsRequest(version=1, checkpoint_engine="in_process", kind=kind))
            assert "plugin.capability" == caught.value.code
            await server.generate(make_request("a", max_new_tokens=1))

    asyncio.run(main())


@in_loop
async def test_a_model_that_cannot_be_served_is_named(serve: Serve) -> None:
    with pytest.raises(RolloutError) as caught:
        async with serve(fails=True):
            pass
    assert "engine.model" == caught.value.code
    assert "no room" in caught.value.message


@in_loop
async def test_clients_of_openai_are_served(serve: Serve) -> None:
    """What TensorRT-LLM is told is what they say, and what it cannot do is refused."""
    async with serve(openai={}) as server:
        assert server.info is not None
        async with openai.AsyncOpenAI(base_url=server.info.openai_base_url, api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = {"frequency_penalty": 0.5}
            fields["extra_body"] = {"min_tokens": 2, "repetition_penalty": 1.1}
            stream = await client.completions.create(model="any", prompt=[5, 6], max_tokens=4, **fields, stream=True)
            pieces = [each async for each in stream]
            assert [None, None, None, None, "length"] == [piece.choices[0].finish_reason for piece in pieces]
            told = server.fake.asked[0].arguments
            assert (0.5, 1.1, 2) == (told["frequency_penalty"], told["repetition_penalty"], told["min_tokens"])
            assert "presence_penalty" not in told
            for name, value in (("logit_bias", {"7": 1}), ("response_format", {"type": "json_object"})):
                with pytest.raises(openai.BadRequestError, match=f"{name} is not served by this server") as caught:
                    await client.completions.create(model="any", prompt=[5, 6], extra_body={name: value})
                assert ("unsupported_parameter", name) == (caught.value.code, caught.value.param)


@in_loop
async def test_an_update_ends_a_request_that_needs_one_whole_answer(serve: Serve) -> None:
    """Penalties count the answer's own tokens, and a later part would begin to count again."""
    async with serve() as server:
        asked = make_request("slow", SLOW, max_new_tokens=5)
        request = ShapedRequest(
            request_id="slow", prompt_ids=(SLOW,), sampling=asked.sampling, shaping=Shaping(presence_penalty=1.0)
        )
        server.fake.steps.put_nowait(None)
        stream = server.generate_stream(request)
        await anext(stream)
        await sync(server, 3, weights_of(server))
        with pytest.raises(RolloutError) as caught:
            await anext(stream)
        assert ("rollout.stale", "slow") == (caught.value.code, caught.value.where)
