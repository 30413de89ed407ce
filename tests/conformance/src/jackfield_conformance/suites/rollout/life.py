"""Checks of rollout servers: start, health, sleep, stop, and the OpenAI-compatible address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import (
    AbortRequest,
    BaseRolloutServer,
    GenerateResult,
    PauseRequest,
    ResumeRequest,
    RolloutContext,
    ServerInfo,
    SleepRequest,
    WakeUpRequest,
)
from jackfield.errors import JackfieldError, RolloutError
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.expecting import refused
from jackfield_conformance.support.processes import assert_nothing_left
from jackfield_conformance.support.rollout import (
    LONG,
    PAGE,
    PROMPT,
    Reader,
    assert_counted,
    assert_served,
    breathe,
    calling,
    checked,
    ended,
    greedy,
    push,
    reading,
    request,
    serving,
    standing_still,
    started,
)
from jackfield_conformance.support.rollout_model import (
    assert_greedy,
    assert_log_probs,
    model_folder,
    named_weights,
    tolerance,
)


@check("ROL-090", page=PAGE + "life")
async def starting_says_who(subject: Subject) -> None:
    """``start`` returns the replica's number and its number of workers; it is then healthy, idle and of version 0."""
    async with started(subject, replica=5) as (server, info):
        health = await server.health()
    assert 5 == info.replica, f"replica 5 says that it is replica {info.replica}"
    assert info.workers >= 1, f"a replica has at least one worker, this says {info.workers}"
    found = health.healthy, health.running, health.waiting, health.weight_version
    assert (True, 0, 0, 0) == found, f"a started replica is healthy, idle and of version 0, this says {health}"


@check("ROL-091", page=PAGE + "life", using=serving)
async def health_counts(subject: Subject, server: BaseRolloutServer) -> None:
    """``health`` counts running and waiting requests, and reports the weight version."""
    readers = [Reader(server, greedy(f"running-{n}", LONG, PROMPT[n:])) for n in range(3)]
    for reader in readers:
        await reader.at_least(2)
    await assert_counted(server, 3, 0, "three requests run")
    await server.abort(AbortRequest(request_ids=("running-1",)))
    await assert_counted(server, 2, 0, "one of three was aborted")
    await server.abort(AbortRequest())
    for reader in readers:
        await reader.result()
    await assert_counted(server, 0, 0, "nothing runs")
    await push(subject, server, 7)
    version = (await server.health()).weight_version
    assert 7 == version, f"version 7 was loaded, health says {version}"


@check("ROL-092", page=PAGE + "life")
async def missing_models_are_refused(subject: Subject) -> None:
    """A missing model folder makes ``start`` raise an error that names it, and ``stop`` still works."""
    folder = subject.folder / "no-model-here"
    server: BaseRolloutServer = subject.make(RolloutContext(model=ModelSpec(path=str(folder))))
    try:
        with refused(JackfieldError, naming="no-model-here"):
            await server.start()
    finally:
        await server.stop()


@check("ROL-093", capability="sleep", page=PAGE + "sleep", using=serving)
async def level_1_keeps_weights(subject: Subject, server: BaseRolloutServer) -> None:
    """After sleep of level 1 and waking, results are the same as before, and paused requests continue."""
    sent = greedy("greedy", 12)
    before = await server.generate(sent)
    await server.sleep(SleepRequest(level=1))
    await server.wake_up(WakeUpRequest())
    assert before == await server.generate(sent), "results have changed over sleep of level 1"
    reader = await reading(server, greedy("kept", 20), 3)
    await server.pause(PauseRequest())
    await server.sleep(SleepRequest(level=1))
    await server.wake_up(WakeUpRequest())
    await server.resume(ResumeRequest())
    kept = await reader.result()
    assert 20 == len(kept.token_ids), f"a request paused over a sleep has {len(kept.token_ids)} of 20 tokens"
    assert_greedy(reader.sent, kept)
    assert_log_probs(subject, reader.sent, kept)


@check("ROL-094", capability="sleep", page=PAGE + "sleep", using=serving)
async def level_2_needs_weights(subject: Subject, server: BaseRolloutServer) -> None:
    """After sleep of level 2 requests are refused with ``rollout.stale`` until an update; then results are correct."""
    await server.sleep(SleepRequest(level=2))
    await server.wake_up(WakeUpRequest(tags=("weights",)))
    with refused(RolloutError, "rollout.stale"):
        await ended(server.generate(greedy("too early", 3)), "the refusal of a server without weights")
    await push(subject, server, 1)
    await server.wake_up(WakeUpRequest(tags=("kv_cache",)))
    await checked(subject, server, greedy("awake", 10), "other")
    await server.sleep(SleepRequest(level=2))
    await server.wake_up(WakeUpRequest())
    with refused(RolloutError, "rollout.stale"):
        await ended(server.generate(greedy("again too early", 3)), "the refusal of a server without weights")
    await push(subject, server, 2, named_weights("base"))
    await checked(subject, server, greedy("awake again", 10))


@check("ROL-095", capability="sleep", page=PAGE + "sleep", using=serving)
async def asleep_nothing_runs(subject: Subject, server: BaseRolloutServer) -> None:
    """A request that comes while the server sleeps waits until it is awake, and no forward pass runs until then."""
    slept = await server.sleep(SleepRequest(level=1))
    assert slept.freed_bytes >= 0, f"{slept.freed_bytes} bytes cannot have been freed"
    sent = greedy("early", 5)
    caller = calling(server, sent)
    with standing_still("the model runs although the server sleeps"):
        await breathe()
        partly = await server.wake_up(WakeUpRequest(tags=("weights",)))
        await breathe()
    assert not caller.done(), "a request was answered although the server sleeps"
    assert ("weights",) == partly.awake, f"the weights alone were woken, wake_up says {partly.awake}"
    woken = await server.wake_up(WakeUpRequest())
    assert ["kv_cache", "weights"] == sorted(woken.awake), f"everything was woken, wake_up says {woken.awake}"
    await assert_served(caller, sent)


@check("ROL-096", capability="sleep", page=PAGE + "sleep", using=serving)
async def decoding_does_not_sleep(subject: Subject, server: BaseRolloutServer) -> None:
    """``sleep`` is refused while requests run and the server is not paused, and does not harm them."""
    reader = await reading(server, greedy("running", LONG))
    with refused(RolloutError):
        await server.sleep(SleepRequest(level=2))
    result = await reader.result()
    assert LONG == len(result.token_ids), f"a refused sleep has cut a request: {len(result.token_ids)} of {LONG} tokens"
    assert_greedy(reader.sent, result)


async def _assert_stopped(call: Awaitable[GenerateResult]) -> None:
    with refused(RolloutError, "rollout.stopped"):
        await ended(call, "the error of a stopped server")


@check("ROL-097", page=PAGE + "life")
async def stopping_fails_requests(subject: Subject) -> None:
    """``stop`` makes every running or waiting request fail with ``rollout.stopped``; no caller waits for ever."""
    async with serving(subject) as server:
        caller = calling(server, greedy("running", LONG, PROMPT[1:]))
        reader = await reading(server, greedy("streamed", LONG))
        await server.stop()
        await _assert_stopped(caller)
        await _assert_stopped(reader.result())
    async with serving(subject) as server:
        await server.pause(PauseRequest())
        waiting = calling(server, greedy("waiting", 4))
        await breathe()
        await server.stop()
        await _assert_stopped(waiting)


@check("ROL-098", page=PAGE + "life", using=serving)
async def stopped_is_stopped(subject: Subject, server: BaseRolloutServer) -> None:
    """A stopped server refuses requests with ``rollout.stopped`` and reports that it is not healthy."""
    await server.generate(request("before", max_new_tokens=2))
    await server.stop()
    await _assert_stopped(server.generate(greedy("after", 2)))
    with refused(RolloutError, "rollout.stopped"):
        async for _ in server.generate_stream(greedy("after, streamed", 2)):
            pass
    health = await server.health()
    assert not health.healthy, "a stopped server says that it is healthy"


@check("ROL-099", page=PAGE + "life", using=serving)
async def stopping_twice(subject: Subject, server: BaseRolloutServer) -> None:
    """Stopping is idempotent, also before ``start``."""
    await server.stop()
    await server.stop()
    never: BaseRolloutServer = subject.make(RolloutContext(model=ModelSpec(path=model_folder())))
    await never.stop()


@check("ROL-100", page=PAGE + "life", deadline_seconds=60.0)
def nothing_is_left(subject: Subject) -> None:
    """A stopped server leaves nothing: no task, thread, process, open file, socket, shared memory or file elsewhere."""

    async def life(folder: Path) -> None:
        async with serving(subject.at(folder)) as server:
            await asyncio.gather(*(server.generate(greedy(f"whole-{n}", 4)) for n in range(3)))
            readers = [Reader(server, greedy(f"streamed-{n}", LONG)) for n in range(2)]
            for reader in readers:
                await reader.at_least(2)
            await push(subject, server, 1)
            await server.abort(AbortRequest(request_ids=("streamed-0",)))
            await readers[0].result()
            await server.stop()
            with refused(RolloutError, "rollout.stopped"):
                await readers[1].result()

    assert_nothing_left(life, subject.folder)


_PAGE = "docs/plugins/rollout.md#the-openai-compatible-address"
_SECONDS = 20.0


@asynccontextmanager
async def _listening(subject: Subject) -> AsyncIterator[tuple[BaseRolloutServer, ServerInfo]]:
    settings = subject.fixture.get("openai", {"openai": {}})
    async with started(subject, settings=settings) as (server, info):
        assert info.openai_base_url is not None, f"start returns no openai_base_url with the settings {settings}"
        yield server, info


@check("ROL-110", capability="openai", page=_PAGE, using=_listening)
async def the_address_serves_the_same_tokens(subject: Subject, found: tuple[BaseRolloutServer, ServerInfo]) -> None:
    """A request of token ids to the endpoint yields the tokens and log-probabilities of ``generate``."""
    server, info = found
    sampling: dict[str, Any] = {"seed": 7, "temperature": 0.7, "top_k": 20}
    expected = await server.generate(request("direct", max_new_tokens=6, **sampling))
    models = await _ask(info, "/models")
    assert models["data"], "/models lists no model"
    body = {"model": models["data"][0]["id"], "prompt": list(PROMPT), "max_tokens": 6, "logprobs": 0, **sampling}
    answer = await _ask(info, "/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    [choice] = answer["choices"]
    told = choice.get("token_ids")
    assert told == list(expected.token_ids), f"generate: {list(expected.token_ids)}; the address: {told}"
    pairs = zip(expected.log_probs, choice["logprobs"]["token_logprobs"], strict=True)
    worst = max(abs(direct - told) for direct, told in pairs)
    assert worst <= tolerance(subject), f"log-probabilities of the address differ from generate's by {worst:.2g}"
    assert choice["finish_reason"] == "length", f"it ended at its limit, and says {choice['finish_reason']!r}"


@check("ROL-111", capability="openai", page=_PAGE)
async def the_address_closes_with_the_server(subject: Subject) -> None:
    """After ``stop`` no server listens at the address."""
    async with _listening(subject) as (_, info):
        await _ask(info, "/models")
    try:
        await _ask(info, "/models")
    except (URLError, OSError):
        return
    raise AssertionError(f"{info.openai_base_url} answers after stop")


async def _ask(info: ServerInfo, path: str, body: Mapping[str, Any] | None = None) -> Any:
    def ask() -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = Request(f"{info.openai_base_url}{path}", data, {"Content-Type": "application/json"})
        with urlopen(asked, timeout=_SECONDS) as answer:
            return json.load(answer)

    return await asyncio.to_thread(ask)
