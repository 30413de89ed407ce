"""Checks of how an agent asks the model: sampling, prompts, budgets, failures, concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from pathlib import Path

import attrs

from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.agent import (
    PAGE,
    SAMPLING,
    Host,
    Switch,
    Trial,
    assert_aborted,
    assert_budget,
    assert_unique,
    opened,
    outline,
    tight_budgets,
)
from jackfield_conformance.support.agent_model import END
from jackfield_conformance.support.processes import adopting, assert_nothing_left, other_tasks

#: Sampling parameters that reach every request unchanged; the token budget and the seed may be divided over turns.
_PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "log_probs")


@check("AGT-014", page=PAGE + "sampling", using=opened)
async def sampling_parameters_reach_the_model(subject: Subject, host: Host) -> None:
    """Every request has the run's sampling parameters, and all turns together stay within its token budget.

    Of a rollout with several sequences, each has the budget.
    """
    several = subject.has("several_sequences")
    other = {**SAMPLING, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 40}
    for sampling in (SAMPLING, other):
        for task in host.tasks:
            whole = await host.play(task, sampling=sampling)
            for request in whole.model.requests:
                given = {name: value for name, value in sampling.items() if name in _PASSED_ON}
                found = {name: getattr(request.sampling, name) for name in given}
                assert given == found, f"expected {given} in every request, found {found}"
            assert_budget(whole, sampling["max_new_tokens"], several)
            for budget in tight_budgets(whole.model):
                trial = await host.play(task, sampling={**sampling, "max_new_tokens": budget})
                assert_budget(trial, budget, several)


@check("AGT-015", page=PAGE + "prompts", using=opened)
async def long_prompts_are_refused(subject: Subject, host: Host) -> None:
    """A prompt beyond the limit is refused before the model is asked; one within the limit is not cut."""
    for task in host.tasks:
        whole = (await host.play(task)).model.requests[0].prompt_ids
        fitting = (await host.play(task, max_prompt_tokens=len(whole))).model.requests[0].prompt_ids
        assert whole == fitting, f"a prompt of {len(whole)} tokens was changed under a limit of {len(whole)}"
        model = host.model(task)
        output = None
        limit = len(whole) - 1
        with contextlib.suppress(Exception):
            output = await host.play(task, model=model, max_prompt_tokens=limit)
        assert not model.requests, f"the model was asked, with a prompt of {len(whole)} tokens and a limit of {limit}"
        assert output is None or not output.output.sequences, "a task that was refused yields a sequence"


@check("AGT-016", page=PAGE + "prompts", using=opened)
async def prompts_are_of_the_task(subject: Subject, host: Host) -> None:
    """Different tasks have different prompts, and the same task always has the same prompt."""
    prompts = []
    for task in host.tasks:
        first = (await host.play(task)).model.requests[0].prompt_ids
        again = (await host.play(task)).model.requests[0].prompt_ids
        assert first == again, f"task {task.fields['task_id']} was shown to the model in two ways"
        prompts.append(first)
    assert len(prompts) >= 2, "the fixture gives one task, expected two with different prompts"
    assert len(prompts) == len(set(prompts)), f"{len(prompts)} tasks have {len(set(prompts))} different prompts"


@check("AGT-017", page=PAGE + "prompts", using=opened)
async def further_fields_are_tolerated(subject: Subject, host: Host) -> None:
    """Fields of a task that the agent does not know change nothing."""
    for task in host.tasks:
        plain = await host.play(task)
        more = await host.play(task, fields={"conformance_unknown": {"list": [1, None]}, "level": "hard"})
        assert outline(plain) == outline(more), "with further fields the rollout is another"


@check("AGT-018", page=PAGE + "prompts", using=opened)
async def arguments_are_left_alone(subject: Subject, host: Host) -> None:
    """The agent does not change the task's fields and the sampling parameters, which other rollouts use, too."""
    for task in host.tasks:
        sampling, fields = dict(SAMPLING), copy.deepcopy(dict(task.fields))
        await host.rollout(task).run_with(sampling, fields)
        changed = [name for name, value in task.fields.items() if fields[name] != value]
        assert not changed, f"the rollout changed the task's {changed}"
        assert dict(SAMPLING) == sampling, f"the rollout changed the sampling parameters to {sampling}"


@check("AGT-019", page=PAGE + "cancellation", using=opened)
async def a_cancelled_rollout_leaves_nothing_running(subject: Subject, host: Host) -> None:
    """A cancelled rollout ends at once; no generation, task or process of it continues."""
    with adopting():
        for task in host.tasks:
            calls = len((await host.play(task)).model.requests)
            for call in range(calls):
                await host.cancel_at(task, call)


@check("AGT-020", page=PAGE + "failures", using=opened)
async def failures_are_raised(subject: Subject, host: Host) -> None:
    """If the model cannot answer, ``run`` raises; a failure never becomes a sequence or an empty result."""
    for task in host.tasks:
        try:
            trial = await host.play(task, model=host.model(task, fails=True))
        except Exception:
            continue
        count = len(trial.output.sequences)
        raise AssertionError(f"every call of the model failed; it returned {count} sequences")


@check("AGT-021", page=PAGE + "failures", using=opened)
async def aborted_generation_ends_the_rollout(subject: Subject, host: Host) -> None:
    """After an aborted answer the model is not asked again, and the tokens so far are reported as aborted."""
    for task in host.tasks:
        calls = len((await host.play(task)).model.requests)
        for call in range(calls):
            for tokens in (0, 1):
                model = host.model(task, abort_at=call, abort_tokens=tokens)
                trial = await host.play(task, model=model)
                more = model.asked_after_abort
                assert not more, f"call {call} was aborted, and the model was asked {more} times more"
                assert_aborted(trial, tokens)


@check("AGT-022", page=PAGE + "concurrency", using=opened)
async def rollouts_do_not_mix(subject: Subject, host: Host) -> None:
    """Concurrent rollouts, each with its own object, have their own requests and tokens."""
    scripted = host.tasks
    alone = [outline(await host.play(task)) for task in scripted]
    order = [number % len(scripted) for number in range(32)]
    trials = await asyncio.gather(*(host.play(scripted[index], request_prefix="step/0") for index in order))
    for index, trial in zip(order, trials, strict=True):
        assert alone[index] == outline(trial), "a concurrent rollout is not as it is alone"
    assert_unique(trials)


@check("AGT-023", page=PAGE + "concurrency", using=opened)
async def rollouts_leave_nothing_to_the_next(subject: Subject, host: Host) -> None:
    """An object that has finished a rollout does the next one like a new object."""
    scripted = host.tasks
    for first in scripted:
        for second in scripted:
            expected = outline(await host.play(second))
            switch = Switch(host.model(first))
            rollout = host.rollout(first, model=switch.model, generate=switch)
            await rollout.run()
            switch.model = host.model(second)
            rollout.services.begin(switch.model)
            again = await attrs.evolve(rollout, task=second, model=switch.model).run()
            assert expected == outline(again), "the second rollout of an object is not as a first one"


@check("AGT-025", page=PAGE + "cancellation")
def rollouts_leave_nothing_behind(subject: Subject) -> None:
    """Rollouts leave no task, thread, process, socket, shared memory or file behind."""

    async def life(folder: Path) -> None:
        async with opened(subject.at(folder)) as host:
            for task in host.tasks:
                await host.play(task)
                await host.cancel_at(task, 0)

    assert_nothing_left(life, subject.folder / "lives")


@check("AGT-026", page=PAGE + "sampling", using=opened)
async def end_tokens_stop_the_model(subject: Subject, host: Host) -> None:
    """Every request has the tokenizer's end tokens among its stop tokens, beside those of the run."""
    for task in host.tasks:
        for given in ((), (77,)):
            model = (await host.play(task, sampling={**SAMPLING, "stop_token_ids": given})).model
            for turn, request in enumerate(model.requests):
                expected, found = {END, *given}, set(request.sampling.stop_token_ids)
                assert expected <= found, (
                    f"the request of turn {turn} has the stop tokens {sorted(found)}, expected {sorted(expected)}:"
                    " the run's and tokenizer.end_token_ids"
                )


@check("AGT-050", tier="stress", page=PAGE + "concurrency", deadline_seconds=120.0, using=opened)
async def hundreds_of_rollouts_with_cancellations(subject: Subject, host: Host) -> None:
    """If some of hundreds of concurrent rollouts are cancelled, the others end as alone, and nothing is left."""
    scripted = host.tasks
    alone = [outline(await host.play(task)) for task in scripted]
    rollouts = [asyncio.create_task(host.play(scripted[number % len(scripted)])) for number in range(300)]
    await asyncio.sleep(0)
    for rollout in rollouts[::5]:
        rollout.cancel()
    ended = await asyncio.gather(*rollouts, return_exceptions=True)
    for number, trial in enumerate(ended):
        if number % 5 == 0:
            continue
        assert isinstance(trial, Trial), f"rollout {number} was not cancelled, and raised {trial!r}"
        assert alone[number % len(scripted)] == outline(trial), f"rollout {number} of 300 is not as it is alone"
    assert_unique([trial for trial in ended if isinstance(trial, Trial)])
    if not subject.has("worker_life"):  # what the worker keeps is another check's subject
        assert not other_tasks(), f"tasks that are left: {other_tasks()}"
