"""Checks of an agent's life in a worker, its clean-up, and its limits: context, deadline, seed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jackfield.abc.agent import AgentWorkerContext
from jackfield.clock import Clock
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import agent as support
from jackfield_conformance.support.agent import PAGE, Host, Rollout, Trial, assert_well_formed, opened, outline
from jackfield_conformance.support.agent_model import Letters
from jackfield_conformance.support.expecting import cancelled, finite
from jackfield_conformance.support.processes import adopting, assert_nothing_left, descendants

_ROUNDS = 5  #: of rollouts in one worker; what grows in each of the last three is a leak
_SECONDS = 0.05  #: that a rollout has in the check of deadlines
_ROOM = 10_000  #: tokens beyond a rollout, for what an agent inserts at its end
_MOST_CALLS = 3  #: of a rollout at which it reaches its deadline


@check("AGT-027", since="1.1", page=PAGE + "clean-up", using=opened)
async def finish_without_run_is_harmless(subject: Subject, host: Host) -> None:
    """``finish`` of an object that has not run does nothing, and raises nothing."""
    rollout = host.rollout(host.tasks[0])
    await rollout.agent.finish()
    assert not rollout.model.requests, "finish asked the model"


@check("AGT-028", since="1.1", page=PAGE + "clean-up")
async def nothing_grows_in_a_worker(subject: Subject) -> None:
    """Rollouts leave nothing in their worker after ``finish``, whether they ended, failed or were cancelled."""
    with adopting():
        async with opened(subject) as host:
            found = []
            for _ in range(_ROUNDS):
                for task in host.tasks:
                    await host.play(task)
                    with contextlib.suppress(Exception):
                        await host.play(task, model=host.model(task, fails=True))
                    await host.cancel_at(task, 0)
                found.append(await _held(host))
    for name in found[0]:
        counts = [each[name] for each in found][-4:]
        grows = all(one < other for one, other in itertools.pairwise(counts))
        assert not grows, f"after each round of rollouts the worker has more {name}: {counts}"


@check("AGT-029", since="1.1", page=PAGE + "context-budget", using=opened)
async def the_context_budget_holds(subject: Subject, host: Host) -> None:
    """No request and no sequence goes beyond ``max_model_len``, and a rollout that it ends says so."""
    for task in host.tasks:
        whole = await host.play(task)
        sizes = [(len(request.prompt_ids), len(result.token_ids)) for request, result in whole.model.calls]
        most = max(prompt + answer for prompt, answer in sizes)
        roomy = await host.play(task, max_model_len=most + _ROOM)
        same = outline(whole) == outline(roomy)
        assert same, f"a rollout of {most} tokens is another one with max_model_len={most + _ROOM}"
        tight = {limit for prompt, answer in sizes for limit in (prompt, prompt + 1, prompt + answer - 1)}
        for limit in sorted(tight - {most}):
            rollout = host.rollout(task, max_model_len=limit)
            output = None
            with contextlib.suppress(Exception):
                output = await rollout.run()
            _assert_within(rollout, limit)
            if output is not None:
                _assert_said(output, whole, limit)


@check("AGT-033", since="1.1", page=PAGE + "deadlines", using=opened)
async def a_deadline_is_kept(subject: Subject, host: Host) -> None:
    """A rollout that reaches ``context.deadline`` ends then, or when it is cancelled, and says why if it returns."""
    for task in host.tasks:
        calls = len((await host.play(task)).model.requests)
        for call in range(min(calls, _MOST_CALLS)):
            model = host.model(task, hang_at=call)
            rollout = host.rollout(task, model=model, deadline=Clock().time() + _SECONDS)
            running = asyncio.create_task(rollout.run())
            await asyncio.wait({running}, timeout=_SECONDS)
            if not running.done():
                await cancelled(running, support.GRACE_SECONDS, "the rollout")
            assert not model.running, "the rollout has ended at its deadline, but its generation continues"
            if running.cancelled() or running.exception() is not None:
                continue
            output = running.result().output
            assert output.end_reason, "a rollout that was ended by its deadline has no end_reason"
            for sequence in output.sequences:
                assert_well_formed(sequence)


@check("AGT-034", since="1.1", page=PAGE + "context", using=opened)
async def a_seed_repeats_the_rollout(subject: Subject, host: Host) -> None:
    """With the same seed and the same answers of the model, a rollout is the same."""
    for task in host.tasks:
        for seed in (5, 2**40 + 1):
            found = []
            for other in (1, 2):
                with _global_seed(other):
                    found.append(outline(await host.play(task, seed=seed)))
            assert found[0] == found[1], f"two rollouts with the seed {seed} differ: use context.seed for every choice"


@check("AGT-035", since="1.1", page=PAGE + "metrics-and-events", using=opened)
async def what_is_reported_is_json(subject: Subject, host: Host) -> None:
    """Metrics are finite numbers with a name; events and tool calls are JSON values."""
    for task in host.tasks:
        trial = await host.play(task)
        for name, number in [*trial.services.metrics, *trial.output.metrics.items()]:
            assert isinstance(name, str), f"a metric is named {name!r}, expected a text"
            assert name, "a metric has an empty name"
            assert finite(number), f"the metric {name} is {number!r}, expected a finite number"
        for name, fields in trial.services.events:
            assert isinstance(name, str), f"an event is named {name!r}, expected a text"
            _assert_json(fields, f"the event {name}")
        for number, call in enumerate(trial.output.tool_calls):
            assert isinstance(call, Mapping), f"tool call {number} is {type(call).__name__}, expected a mapping"
            _assert_json(call, f"tool call {number}")


@check("AGT-041", since="1.1", capability="worker_life", page=PAGE + "worker-life")
async def workers_share_nothing(subject: Subject) -> None:
    """Two workers of one process share nothing: one works as before after the other has closed."""
    async with contextlib.AsyncExitStack() as stack:
        host = await stack.enter_async_context(opened(subject))
        alone = [outline(await host.play(task)) for task in host.tasks]
        async with opened(subject) as other:
            await other.play(other.tasks[0])
        again = [outline(await host.play(task)) for task in host.tasks]
        assert alone == again, "after another worker has closed, a rollout is another one"


@check("AGT-042", since="1.1", capability="worker_life", page=PAGE + "worker-life")
def close_ends_what_start_opened(subject: Subject) -> None:
    """``close`` ends what ``start`` has opened: without rollouts, and after failed and cancelled ones."""

    async def life(folder: Path) -> None:
        async with opened(subject.at(folder)):
            pass
        async with opened(subject.at(folder)) as host:
            task = host.tasks[0]
            with contextlib.suppress(Exception):
                await host.play(task, model=host.model(task, fails=True))
            await host.cancel_at(task, 0)

    assert_nothing_left(life, subject.folder / "lives")


@check("AGT-043", since="1.1", capability="worker_life", page=PAGE + "worker-life")
def a_cancelled_start_leaves_nothing(subject: Subject) -> None:
    """A ``start`` that is cancelled ends what it has opened so far."""

    async def life(folder: Path) -> None:
        for turns in (1, 2, 5, 20):
            place = folder / f"start-{turns}"
            place.mkdir()
            context = AgentWorkerContext(tokenizer=Letters(), folder=place, seed=1)
            starting = asyncio.create_task(subject.cls.start(subject.config, context))
            for _ in range(turns):
                await asyncio.sleep(0)
            await cancelled(starting, support.GRACE_SECONDS, "start")
            if not starting.cancelled() and starting.exception() is None:
                await subject.cls.close(starting.result())

    assert_nothing_left(life, subject.folder / "lives")


async def _held(host: Host) -> dict[str, int]:
    """Count what this process holds."""
    for _ in range(10):
        await asyncio.sleep(0)
    gc.collect()
    descriptors = Path("/proc/self/fd")
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "processes": len(descendants()),
        "open files and sockets": len(os.listdir(descriptors)) if descriptors.exists() else 0,
        "files": sum(1 for _ in host.folder.parent.rglob("*")),
    }


def _assert_within(rollout: Rollout, limit: int) -> None:
    for turn, request in enumerate(rollout.model.requests):
        prompt, asked = len(request.prompt_ids), request.sampling.max_new_tokens
        assert prompt + asked <= limit, (
            f"the request of turn {turn} has {prompt} tokens and asks for {asked}, and max_model_len is {limit}"
        )


def _assert_said(trial: Trial, whole: Trial, limit: int) -> None:
    """Require that a shorter rollout names a reason, and that a cut answer is reported as one."""
    for sequence in trial.output.sequences:
        size = len(sequence.prompt_ids) + len(sequence.response_ids)
        assert size <= limit, f"a sequence has {size} tokens, and max_model_len is {limit}"
        for block in trial.blocks(sequence)[-1:]:
            expected, found = block.result.finish_reason, sequence.finish_reason
            assert expected == found, f"the last answer ended by {expected!r}, the sequence says {found!r}"
    cut = any(each.finish_reason == "length" for each in trial.output.sequences)
    fewer = len(trial.model.calls) < len(whole.model.calls)
    assert not fewer or cut or trial.output.end_reason, (
        f"with max_model_len={limit} the model was asked {len(trial.model.calls)} times instead of"
        f" {len(whole.model.calls)}, and neither end_reason nor finish_reason says so"
    )


def _assert_json(value: Any, what: str) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what} is no JSON: {error}") from None


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore their states."""
    python = random.getstate()
    generator = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numpy = None if generator is None else generator.get_state()
    random.seed(seed)
    if generator is not None:
        generator.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        if generator is not None:
            generator.set_state(numpy)
