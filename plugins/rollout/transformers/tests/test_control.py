"""Aborting, pausing, sleeping, stopping, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
import torch

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import (
    AbortRequest,
    GenerateRequest,
    PauseRequest,
    ResumeRequest,
    RolloutContext,
    SamplingParams,
    SleepRequest,
    WakeUpRequest,
)
from jackfield.errors import RolloutError
from jackfield_huggingface.generating import generating
from jackfield_rollout_transformers import model as model_module
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.server import TransformersServer


async def take(stream: Any, count: int) -> list[Any]:
    """The first chunks of a stream: so the request is known to run."""
    return [await anext(stream) for _ in range(count)]


def endless(make_request: Any, name: object, **sampling: Any) -> GenerateRequest:
    request: GenerateRequest = make_request(name, max_new_tokens=100, ignore_eos=True, **sampling)
    return request


def visits(server: TransformersServer) -> list[int]:
    """A counter of the visits to the worker thread, in which passes run, updated while the server runs."""
    counter, run = [0], server._loop.decoder.run

    def counting(*args: Any) -> Any:
        counter[0] += 1
        return run(*args)

    server._loop.decoder.run = counting  # type: ignore[method-assign]
    return counter


def test_abort_returns_what_there_is(serve: Any, make_request: Any) -> None:
    """A running and a waiting request; the others go on, and no pass computes the aborted ones any more."""

    async def main() -> None:
        async with serve(max_batch_size=2) as server:
            stream = server.generate_stream(endless(make_request, "stream", seed=1))
            running = asyncio.create_task(server.generate(endless(make_request, "running", seed=2)))
            await take(stream, 4)
            waiting = asyncio.create_task(server.generate(endless(make_request, "waiting", seed=3)))
            await take(stream, 1)
            ended = await server.abort(AbortRequest(request_ids=("running", "waiting", "unknown")))
            assert ended.request_ids == ("running", "waiting")
            result, nothing = await running, await waiting
            assert (result.finish_reason, nothing.finish_reason) == ("abort", "abort")
            assert len(nothing.token_ids) == 0
            assert 4 <= len(result.token_ids) < 100
            assert len(result.token_ids) == len(result.log_probs) == len(result.weight_versions)
            whole = await server.generate(endless(make_request, "running", seed=2))
            assert whole.token_ids[: len(result.token_ids)] == result.token_ids
            assert 5 + len([token async for chunk in stream for token in chunk.token_ids]) == 100

    asyncio.run(main())


def test_abort_takes_effect_after_the_pass_that_runs(serve: Any, make_request: Any) -> None:
    """Even in the middle of a hop of many steps."""

    async def main() -> None:
        async with serve(steps_per_hop=1000, attention="eager") as server:
            module, forward = server._model.module, server._model.module.forward
            loop, third_pass, abort_is_in = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
            count = [0]

            def watched(*args: Any, **kwargs: Any) -> Any:
                count[0] += 1
                if count[0] == 3:
                    loop.call_soon_threadsafe(third_pass.set)
                    assert abort_is_in.wait(30)
                return forward(*args, **kwargs)

            module.forward = watched
            running = asyncio.create_task(server.generate(endless(make_request, "a")))
            await third_pass.wait()
            abort = asyncio.create_task(server.abort(AbortRequest()))
            await asyncio.sleep(0)
            abort_is_in.set()
            await abort
            assert len((await running).token_ids) == 3
            assert count[0] == 3

    asyncio.run(main())


def test_abort_of_all_ends_streams(serve: Any, make_request: Any) -> None:
    """Without names all end, a stream with a last chunk that says so."""

    async def main() -> None:
        async with serve() as server:
            stream = server.generate_stream(endless(make_request, "a"))
            await take(stream, 2)
            assert (await server.abort(AbortRequest())).request_ids == ("a",)
            *_, last = [chunk async for chunk in stream]
            assert last.finish_reason == "abort"
            health = await server.health()
            assert (health.healthy, health.running, health.waiting) == (True, 0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_caller_who_leaves_ends_his_request(serve: Any, make_request: Any, how: str) -> None:
    """Cancelling the call and closing the stream leave nothing running; the name is free at once."""

    async def main() -> None:
        async with serve() as server:
            guide = server.generate_stream(endless(make_request, "guide"))
            await take(guide, 2)
            if how == "cancel":
                task = asyncio.create_task(server.generate(endless(make_request, "own", seed=1)))
                await take(guide, 3)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            else:
                stream = server.generate_stream(endless(make_request, "own", seed=1))
                await take(stream, 3)
                await stream.aclose()
            assert (await server.health()).running == 1
            again = await server.generate(make_request("own", seed=1, max_new_tokens=3))
            assert len(again.token_ids) == 3
            await guide.aclose()
            await server.pause(PauseRequest())
            assert (await server.health()).running == 0

    asyncio.run(main())


def test_pause_keeps_and_resume_goes_on(serve: Any, make_request: Any) -> None:
    """While paused no pass runs and new requests wait; afterwards the tokens are those of an unbroken run."""

    async def main() -> None:
        async with serve() as server:
            whole = await server.generate(endless(make_request, "x", seed=5))
            stream = server.generate_stream(endless(make_request, "x", seed=5))
            first = await take(stream, 5)
            assert (await server.pause(PauseRequest(mode="keep"))).running == 1
            counter = visits(server)
            late = asyncio.create_task(server.generate(make_request("late", seed=1, max_new_tokens=2)))
            await asyncio.sleep(0)
            health = await server.health()
            assert (health.running, health.waiting, health.detail) == (1, 1, "paused")
            assert counter[0] == 0
            assert (await server.resume(ResumeRequest())).running - health.waiting + 1 == 1
            assert len((await late).token_ids) == 2
            rest = [chunk async for chunk in stream]
            assert whole.token_ids == tuple(token for chunk in first + rest for token in chunk.token_ids)
            assert counter[0] > 0

    asyncio.run(main())


def test_pause_waits_for_what_runs(serve: Any, make_request: Any) -> None:
    """Mode ``wait``: what runs finishes, what waits stays."""

    async def main() -> None:
        async with serve(max_batch_size=1) as server:
            stream = server.generate_stream(make_request("a", seed=1, max_new_tokens=30, ignore_eos=True))
            await take(stream, 1)
            waiting = asyncio.create_task(server.generate(make_request("b", max_new_tokens=2, ignore_eos=True)))
            await asyncio.sleep(0)
            assert (await server.pause(PauseRequest(mode="wait"))).running == 0
            assert len([token async for chunk in stream for token in chunk.token_ids]) == 29
            health = await server.health()
            assert (health.running, health.waiting) == (0, 1)
            await server.resume(ResumeRequest())
            assert len((await waiting).token_ids) == 2

    asyncio.run(main())


def test_pause_aborts_what_runs(serve: Any, make_request: Any) -> None:
    """Mode ``abort``: what runs ends at once with what it has; a new request waits until resume."""

    async def main() -> None:
        async with serve() as server:
            stream = server.generate_stream(endless(make_request, "a"))
            await take(stream, 3)
            assert (await server.pause(PauseRequest(mode="abort"))).running == 0
            *_, last = [chunk async for chunk in stream]
            assert last.finish_reason == "abort"
            later = asyncio.create_task(server.generate(make_request("b", max_new_tokens=2, ignore_eos=True)))
            await asyncio.sleep(0)
            await server.resume(ResumeRequest())
            assert len((await later).token_ids) == 2

    asyncio.run(main())


def test_sleep_frees_and_kept_requests_go_on(serve: Any, make_request: Any) -> None:
    """Level 1 during a pause: the cache is gone, and after waking the tokens are those of an unbroken run."""

    async def main() -> None:
        async with serve() as server:
            whole = await server.generate(endless(make_request, "x", seed=5))
            stream = server.generate_stream(endless(make_request, "x", seed=5))
            first = await take(stream, 5)
            with pytest.raises(RolloutError) as caught:
                await server.sleep(SleepRequest())
            assert "rollout.request" == caught.value.code
            await server.pause(PauseRequest())
            freed = (await server.sleep(SleepRequest(level=1))).freed_bytes
            assert freed >= 3 * 2 * 2 * 8 * 8 * 4  # layers, keys and values, heads, positions, dimension, bytes
            assert all(layer.keys is None for layer in server._loop.decoder._cache.layers)
            await server.resume(ResumeRequest())
            counter = visits(server)
            assert (await server.wake_up(WakeUpRequest(tags=("weights",)))).awake == ("weights",)
            await asyncio.sleep(0)
            assert counter[0] == 0
            assert (await server.wake_up(WakeUpRequest(tags=("kv_cache",)))).awake == ("weights", "kv_cache")
            rest = [chunk async for chunk in stream]
            assert whole.token_ids == tuple(token for chunk in first + rest for token in chunk.token_ids)
            assert counter[0] > 0

    asyncio.run(main())


def test_deep_sleep_needs_new_weights(
    serve: Any, make_request: Any, send: Any, named_weights: Any, reference: Any
) -> None:
    """Level 2 frees the weights; until a full update everything is refused as stale; a waiting request survives."""

    async def main() -> None:
        async with serve() as server:
            expected = await server.generate(make_request("x", seed=5))
            await server.pause(PauseRequest())
            waiting = asyncio.create_task(server.generate(make_request("w", seed=5)))
            await asyncio.sleep(0)
            size = sum(parameter.nbytes for parameter in server._model.parameters())
            assert (await server.sleep(SleepRequest(level=2))).freed_bytes >= size
            assert sum(parameter.nbytes for parameter in server._model.parameters()) == 0
            await server.wake_up(WakeUpRequest())
            await server.resume(ResumeRequest())
            with pytest.raises(RolloutError) as caught:
                await server.generate(make_request("x"))
            assert "rollout.stale" == caught.value.code
            assert caught.value.code == "rollout.stale"
            assert not (await server.health()).healthy
            await server.update_weights(send(1, named_weights(reference)))
            assert expected.token_ids == (await waiting).token_ids
            assert expected.token_ids == (await server.generate(make_request("x", seed=5))).token_ids

    asyncio.run(main())


def test_stop_fails_what_is_left(serve: Any, make_request: Any) -> None:
    """Running, waiting and streamed requests fail with ``rollout.stopped``; no thread and no task remains."""

    async def main() -> None:
        async with serve(max_batch_size=2) as server:
            stream = server.generate_stream(endless(make_request, "s"))
            tasks = [asyncio.create_task(server.generate(endless(make_request, n))) for n in range(3)]
            await take(stream, 2)
            await server.stop()
            for task in tasks:
                with pytest.raises(RolloutError) as caught:
                    await task
                assert caught.value.code == "rollout.stopped"
            with pytest.raises(RolloutError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "rollout.stopped"
            with pytest.raises(RolloutError) as caught:
                await server.generate(make_request("late"))
            assert caught.value.code == "rollout.stopped"
            assert not (await server.health()).healthy
            await server.stop()
        assert [asyncio.current_task()] == list(asyncio.all_tasks())

    asyncio.run(main())
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("jackfield-rollout")] == []


def test_stop_ends_a_pause_that_waits(serve: Any, make_request: Any) -> None:
    """Nobody waits for a stopped server."""

    async def main() -> None:
        async with serve() as server:
            stream = server.generate_stream(endless(make_request, "s"))
            await take(stream, 1)
            pause = asyncio.create_task(server.pause(PauseRequest(mode="wait")))
            await asyncio.sleep(0)
            await server.stop()
            await pause
            with pytest.raises(RolloutError):
                await take(stream, 200)

    asyncio.run(main())


def test_a_failing_pass_fails_the_requests(
    serve: Any, make_request: Any, send: Any, named_weights: Any, reference: Any
) -> None:
    """All unfinished requests name the cause; the server is unhealthy; a full update starts it again."""

    async def main() -> None:
        async with serve(max_batch_size=1, attention="eager") as server:
            module, forward = server._model.module, server._model.module.forward

            def broken(*args: Any, **kwargs: Any) -> Any:
                raise ValueError("out of luck")

            module.forward = broken
            tasks = [asyncio.create_task(server.generate(make_request(n))) for n in range(2)]
            for task in tasks:
                with pytest.raises(RolloutError) as caught:
                    await task
                assert "rollout.failed" == caught.value.code
                assert caught.value.code == "rollout.failed"
            health = await server.health()
            assert (health.healthy, health.running, health.waiting) == (False, 0, 0)
            assert "out of luck" in health.detail
            module.forward = forward
            await server.update_weights(send(0, named_weights(reference)))
            assert (await server.health()).healthy
            assert len((await server.generate(make_request("x", max_new_tokens=3, ignore_eos=True))).token_ids) == 3

    asyncio.run(main())


def test_logits_that_are_not_finite_are_a_failure(serve: Any, make_request: Any) -> None:
    """NaN weights never yield tokens."""

    async def main() -> None:
        async with serve() as server:
            server._model.parameters()[-1].data.fill_(torch.nan)
            with pytest.raises(RolloutError) as caught:
                await server.generate(make_request("x"))
            assert "rollout.failed" == caught.value.code

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "sampling", "word"),
    [
        ((), {}, "empty prompt"),
        ((3, 61), {}, "token id 61"),
        ((-1,), {}, "token id -1"),
        ((3,) * 128, {}, "128 tokens"),
        ((3,), {"temperature": -0.1}, "temperature"),
        ((3,), {"temperature": float("nan")}, "temperature"),
        ((3,), {"top_p": 0.0}, "top_p"),
        ((3,), {"top_p": 1.5}, "top_p"),
        ((3,), {"top_k": -1}, "top_k"),
        ((3,), {"min_p": 2.0}, "min_p"),
        ((3,), {"max_new_tokens": 0}, "max_new_tokens"),
        ((3,), {"temperature": 1e-300}, "temperature"),
        ((3,), {"temperature": 1e308}, "temperature"),
        ((3,), {"seed": 1 << 64}, "seed"),
        ((3,), {"stop": ("",)}, "texts that are not empty"),
    ],
)
def test_invalid_requests_are_refused(serve: Any, make_request: Any, prompt: Any, sampling: Any, word: str) -> None:
    """With the request's name, what was found and what would be right; streams alike."""

    async def main() -> None:
        async with serve() as server:
            request = make_request("wrong-one", prompt, **sampling)
            for attempt in (server.generate(request), anext(server.generate_stream(request))):
                with pytest.raises(RolloutError) as caught:
                    await attempt
                code = "rollout.context-length" if word == "128 tokens" else "rollout.request"
                assert code == caught.value.code
                assert "wrong-one" in caught.value.message
                assert word in str(caught.value)

    asyncio.run(main())


def test_other_refusals(serve: Any, make_request: Any) -> None:
    """A name that is taken, images, newer weights than there are."""

    async def main() -> None:
        async with serve() as server:
            stream = server.generate_stream(endless(make_request, "a"))
            await take(stream, 1)
            images = GenerateRequest(request_id="i", prompt_ids=(3,), multi_modal_data={"images": [1]})
            newer = make_request("n", minimum_weight_version=1)
            for request, code in ((make_request("a"), "request"), (images, "request"), (newer, "stale")):
                with pytest.raises(RolloutError) as caught:
                    await server.generate(request)
                assert f"rollout.{code}" == caught.value.code
            await server.generate(make_request("z", minimum_weight_version=0, max_new_tokens=1))

    asyncio.run(main())


def test_stop_strings_without_a_tokenizer(serve: Any, make_request: Any, make_model: Any, home: str) -> None:
    """Refused with the fix; other requests are served."""
    make_model(0).save_pretrained(home)

    async def main() -> None:
        async with serve(path=home) as server:
            with pytest.raises(RolloutError) as caught:
                await server.generate(make_request("a", stop=("x",)))
            assert "rollout.request" == caught.value.code
            assert caught.value.code == "rollout.request"
            await server.generate(make_request("a", max_new_tokens=1))

    asyncio.run(main())


_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
    "long_factor": [4.0, 9.0, 16.0, 30.0], "short_factor": [1.0, 1.1, 1.2, 1.3],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "limit", "word"),
    [
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 128, None),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 4096, None),  # its own limit
        ({"rope_parameters": _LONGROPE}, 128, "max_model_len of at most 16"),
        ({"rope_parameters": _LONGROPE}, 16, None),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16, None),
    ],
)
def test_architectures(
    make_model: Any, make_request: Any, home: str, changes: Any, limit: int, word: str | None
) -> None:
    """What would be computed wrongly is refused at start; windows are fine."""
    make_model(0, **changes).save_pretrained(home)
    server = TransformersServer(Config(), RolloutContext(model=ModelSpec(path=home), max_model_len=limit))

    async def main() -> None:
        try:
            await server.start()
            await server.generate(make_request("a", max_new_tokens=3))
        finally:
            await server.stop()

    if word is None:
        asyncio.run(main())
        return
    with pytest.raises(RolloutError) as caught:
        asyncio.run(main())
    assert "engine.model" == caught.value.code
    assert caught.value.code == "engine.model"
    assert word in str(caught.value)


def test_an_architecture_that_nobody_knows(make_model: Any, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no rule knows it, what the loop computes wrongly is found at start (here: a window of two tokens)."""
    monkeypatch.setattr(model_module, "_layout", lambda *_: (model_module.LayerMasks(), None))
    make_model(0, use_sliding_window=True, sliding_window=2, max_window_layers=0).save_pretrained(home)
    server = TransformersServer(Config(), RolloutContext(model=ModelSpec(path=home)))
    with pytest.raises(RolloutError) as caught:
        asyncio.run(server.start())
    assert "engine.model" == caught.value.code
    assert caught.value.code == "engine.model"
    assert "they differ by" in str(caught.value)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("jackfield-rollout")]


def test_a_missing_folder(home: str) -> None:
    """Named, with what was expected; requests to a server that never started are refused."""
    server = TransformersServer(Config(), RolloutContext(model=ModelSpec(path=home)))
    with pytest.raises(RolloutError) as caught:
        asyncio.run(server.start())
    assert caught.value.code == "engine.model"
    with pytest.raises(RolloutError) as caught:
        asyncio.run(server.generate(GenerateRequest(request_id="a", prompt_ids=(1,), sampling=SamplingParams())))
    assert caught.value.code == "rollout.stopped"


def test_a_replica_generates_from_the_first_pass_to_the_last(serve: Any, make_request: Any) -> None:
    async def main() -> None:
        async with serve() as server:
            assert not generating
            stream = server.generate_stream(endless(make_request, "a"))
            await take(stream, 1)
            assert {server._loop} == generating
            await server.abort(AbortRequest())
            while generating:
                await asyncio.sleep(0)
            stream = server.generate_stream(endless(make_request, "b"))
            await take(stream, 1)
        assert not generating  # stopped

    asyncio.run(main())
