"""Checks of agents, which run them with a scripted model and the suite's own tokenizer.

The fixture may have, beside ``settings``, ``tasks``: a list of at least two mappings with ``fields`` (of the task,
including ``messages``) and ``answers`` (of the model, call by call; the last is repeated). Prompts must differ, and one
task must take several turns if the plugin declares ``multi_turn``. The default is two sums.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools

from jackfield.abc.agent import AgentContext
from jackfield_conformance.registry import Capability, Subject, check
from jackfield_conformance.support.agent import (
    END,
    SAMPLING,
    Model,
    Switch,
    Trial,
    assert_aborted,
    assert_budget,
    assert_unique,
    assert_well_formed,
    bits,
    cancel_at,
    outline,
    play,
    played,
    tasks,
    tight_budgets,
)
from jackfield_conformance.support.expecting import finite
from jackfield_conformance.support.processes import adopting, assert_nothing_left, other_tasks

_PAGE = "docs/plugins/agent.md#"

#: Sampling parameters that reach every request unchanged; the token budget and the seed may be divided over turns.
_PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "log_probs")

CAPABILITIES = {
    "multi_turn": Capability(what="the model answers several times in one sequence"),
    "environment_reward": Capability(what="sequences carry the reward that the environment gave"),
}


@check("AGT-010", page=_PAGE + "sequences")
async def sequences_are_well_formed(subject: Subject) -> None:
    """An answered task yields sequences whose ids, mask, log-probabilities and versions have one length."""
    for task in tasks(subject):
        output = (await play(subject, task)).output
        assert output.sequences, f"the model answered {task.answers}, but there is no sequence"
        assert isinstance(output.num_turns, int), f"num_turns is {output.num_turns!r}, expected a number"
        assert output.num_turns >= 1, f"num_turns is {output.num_turns!r}, expected 1 or more"
        for name, value in output.metrics.items():
            assert finite(value), f"the metric {name} is {value!r}, expected a finite number"
        for sequence in output.sequences:
            assert_well_formed(sequence)


@check("AGT-011", page=_PAGE + "mask")
async def the_mask_is_exact(subject: Subject) -> None:
    """The mask is 1 exactly on the tokens that the model generated."""
    for _, sequence, blocks in await played(subject):
        expected = [0] * len(sequence.response_ids)
        for block in blocks:
            expected[block.start : block.end] = [1] * (block.end - block.start)
        found = list(sequence.response_mask)
        wrong = [place for place, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"expected the mask {bits(expected)}, found {bits(found)}: wrong at {wrong[:8]}"


@check("AGT-012", page=_PAGE + "append-only")
async def tokens_are_append_only(subject: Subject) -> None:
    """The tokens that the model is shown at each turn are exactly those before its answer in the sequence."""
    for _, sequence, blocks in await played(subject):
        for turn, block in enumerate(blocks):
            history = (*sequence.prompt_ids, *sequence.response_ids[: block.start])
            shown = tuple(block.request.prompt_ids)
            if history == shown:
                continue
            pairs = zip(history, shown, strict=False)
            place = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(history), len(shown)))
            raise AssertionError(
                f"at turn {turn} the model was shown {len(shown)} tokens, the sequence has {len(history)} before"
                f" the answer; they differ from token {place} on: text was tokenised twice, or the history was changed"
            )


@check("AGT-013", page=_PAGE + "sequences")
async def log_probs_and_versions_are_passed_on(subject: Subject) -> None:
    """Log-probabilities and weight versions of the model's tokens are the server's; other tokens have 0.0 and -1."""
    for _, sequence, blocks in await played(subject):
        log_probs = [0.0] * len(sequence.response_ids)
        versions = [-1] * len(sequence.response_ids)
        for block in blocks:
            log_probs[block.start : block.end] = block.result.log_probs
            versions[block.start : block.end] = block.result.weight_versions
        found = list(sequence.response_log_probs)
        assert log_probs == found, f"expected the log-probabilities {log_probs[:8]}…, found {found[:8]}…"
        reported = list(sequence.weight_versions)
        assert versions == reported, f"expected the weight versions {versions[:8]}…, found {reported[:8]}…"


@check("AGT-014", page=_PAGE + "sampling")
async def sampling_parameters_reach_the_model(subject: Subject) -> None:
    """Every request has the run's sampling parameters, and all turns together stay within its token budget."""
    other = {**SAMPLING, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 40}
    for sampling in (SAMPLING, other):
        for task in tasks(subject):
            model = (await play(subject, task, sampling=sampling)).model
            for request in model.requests:
                given = {name: value for name, value in sampling.items() if name in _PASSED_ON}
                found = {name: getattr(request.sampling, name) for name in given}
                assert given == found, f"expected {given} in every request, found {found}"
            assert_budget(model, sampling["max_new_tokens"])
            for budget in tight_budgets(model):
                trial = await play(subject, task, sampling={**sampling, "max_new_tokens": budget})
                assert_budget(trial.model, budget)


@check("AGT-015", page=_PAGE + "prompts")
async def long_prompts_are_refused(subject: Subject) -> None:
    """A prompt beyond the limit is refused before the model is asked; one within the limit is not cut."""
    for task in tasks(subject):
        whole = (await play(subject, task)).model.requests[0].prompt_ids
        fitting = (await play(subject, task, max_prompt_tokens=len(whole))).model.requests[0].prompt_ids
        assert whole == fitting, f"a prompt of {len(whole)} tokens was changed under a limit of {len(whole)}"
        model = Model(task.answers)
        output = None
        limit = len(whole) - 1
        with contextlib.suppress(Exception):
            output = await play(subject, task, model=model, max_prompt_tokens=limit)
        assert not model.requests, f"the model was asked, with a prompt of {len(whole)} tokens and a limit of {limit}"
        assert output is None or not output.output.sequences, "a task that was refused yields a sequence"


@check("AGT-016", page=_PAGE + "prompts")
async def prompts_are_of_the_task(subject: Subject) -> None:
    """Different tasks have different prompts, and the same task always has the same prompt."""
    prompts = []
    for task in tasks(subject):
        first = (await play(subject, task)).model.requests[0].prompt_ids
        again = (await play(subject, task)).model.requests[0].prompt_ids
        assert first == again, f"task {task.fields['task_id']} was shown to the model in two ways"
        prompts.append(first)
    assert len(prompts) >= 2, "the fixture gives one task, expected two with different prompts"
    assert len(prompts) == len(set(prompts)), f"{len(prompts)} tasks have {len(set(prompts))} different prompts"


@check("AGT-017", page=_PAGE + "prompts")
async def further_fields_are_tolerated(subject: Subject) -> None:
    """Fields of a task that the agent does not know change nothing."""
    for task in tasks(subject):
        plain = await play(subject, task)
        more = await play(subject, task, fields={"conformance_unknown": {"list": [1, None]}, "level": "hard"})
        assert outline(plain) == outline(more), "with further fields the rollout is another"


@check("AGT-018", page=_PAGE + "prompts")
async def arguments_are_left_alone(subject: Subject) -> None:
    """The agent does not change the task's fields and the sampling parameters, which other rollouts use, too."""
    for task in tasks(subject):
        model = Model(task.answers)
        agent = subject.make(AgentContext(generate=model, tokenizer=model.tokenizer))
        sampling, fields = dict(SAMPLING), copy.deepcopy(dict(task.fields))
        await agent.run(sampling, **fields)
        changed = [name for name, value in task.fields.items() if fields[name] != value]
        assert not changed, f"the rollout changed the task's {changed}"
        assert dict(SAMPLING) == sampling, f"the rollout changed the sampling parameters to {sampling}"


@check("AGT-019", page=_PAGE + "cancellation")
async def a_cancelled_rollout_leaves_nothing_running(subject: Subject) -> None:
    """A cancelled rollout ends at once; no generation, task or process of it continues."""
    with adopting():
        for task in tasks(subject):
            calls = len((await play(subject, task)).model.requests)
            for call in range(calls):
                await cancel_at(subject, task, call)


@check("AGT-020", page=_PAGE + "failures")
async def failures_are_raised(subject: Subject) -> None:
    """If the model cannot answer, ``run`` raises; a failure never becomes a sequence or an empty result."""
    for task in tasks(subject):
        try:
            trial = await play(subject, task, model=Model(task.answers, fails=True))
        except Exception:
            continue
        count = len(trial.output.sequences)
        raise AssertionError(f"every call of the model failed; it returned {count} sequences")


@check("AGT-021", page=_PAGE + "failures")
async def aborted_generation_ends_the_rollout(subject: Subject) -> None:
    """After an aborted answer the model is not asked again, and the tokens so far are reported as aborted."""
    for task in tasks(subject):
        calls = len((await play(subject, task)).model.requests)
        for call in range(calls):
            for tokens in (0, 1):
                model = Model(task.answers, abort_at=call, abort_tokens=tokens)
                trial = await play(subject, task, model=model)
                more = len(model.requests) - call - 1
                assert not more, f"call {call} was aborted, and the model was asked {more} times more"
                assert_aborted(trial, tokens)


@check("AGT-022", page=_PAGE + "concurrency")
async def rollouts_do_not_mix(subject: Subject) -> None:
    """Concurrent rollouts, each with its own object, have their own requests and tokens."""
    scripted = tasks(subject)
    alone = [outline(await play(subject, task)) for task in scripted]
    order = [number % len(scripted) for number in range(32)]
    trials = await asyncio.gather(*(play(subject, scripted[index], request_prefix="step/0") for index in order))
    for index, trial in zip(order, trials, strict=True):
        assert alone[index] == outline(trial), "a concurrent rollout is not as it is alone"
    assert_unique(trials)


@check("AGT-023", page=_PAGE + "concurrency")
async def rollouts_leave_nothing_to_the_next(subject: Subject) -> None:
    """An object that has finished a rollout does the next one like a new object."""
    scripted = tasks(subject)
    for first in scripted:
        for second in scripted:
            expected = outline(await play(subject, second))
            switch = Switch(Model(first.answers))
            tokenizer = switch.model.tokenizer
            agent = subject.make(AgentContext(generate=switch, tokenizer=tokenizer))
            await play(subject, first, agent=agent, model=switch.model)
            tokenizer.turns.clear()
            switch.model = Model(second.answers, tokenizer=tokenizer)
            again = await play(subject, second, agent=agent, model=switch.model)
            assert expected == outline(again), "the second rollout of an object is not as a first one"


@check("AGT-024", page=_PAGE + "capabilities")
async def capabilities_of_rollouts_are_declared(subject: Subject) -> None:
    """An agent whose model answers several times, or that gives a reward, declares this capability."""
    for _, sequence, blocks in await played(subject):
        several = len(blocks) > 1
        assert not several or subject.has("multi_turn"), f"the model answered {len(blocks)} times: declare multi_turn"
        rewarded = sequence.reward is not None
        assert not rewarded or subject.has("environment_reward"), "a sequence has a reward: declare environment_reward"


@check("AGT-025", page=_PAGE + "cancellation")
def rollouts_leave_nothing_behind(subject: Subject) -> None:
    """Rollouts leave no task, thread, process, socket, shared memory or file behind."""

    async def life(_: object) -> None:
        for task in tasks(subject):
            await play(subject, task)
            await cancel_at(subject, task, 0)

    assert_nothing_left(life, subject.folder / "lives")


@check("AGT-026", page=_PAGE + "sampling")
async def end_tokens_stop_the_model(subject: Subject) -> None:
    """Every request has the tokenizer's end tokens among its stop tokens, beside those of the run."""
    for task in tasks(subject):
        for given in ((), (77,)):
            model = (await play(subject, task, sampling={**SAMPLING, "stop_token_ids": given})).model
            for turn, request in enumerate(model.requests):
                expected, found = {END, *given}, set(request.sampling.stop_token_ids)
                assert expected <= found, (
                    f"the request of turn {turn} has the stop tokens {sorted(found)}, expected {sorted(expected)}:"
                    " the run's and tokenizer.end_token_ids"
                )


@check("AGT-030", capability="multi_turn", page=_PAGE + "turns")
async def several_turns_are_there(subject: Subject) -> None:
    """An agent that declares several turns takes them: some task is answered twice or more in one sequence."""
    most = 0
    for trial, _, blocks in await played(subject):
        if len(blocks) > 1:
            assert trial.output.num_turns > 1, f"{len(blocks)} answers in one sequence, and num_turns is 1"
        most = max(most, len(blocks))
    assert most > 1, "multi_turn is declared, and no task of the fixture took a second turn"


@check("AGT-031", capability="multi_turn", page=_PAGE + "turns")
async def turns_are_rendered_once(subject: Subject) -> None:
    """The tokens between two answers are exactly those that the tokenizer made from the new messages."""
    for trial, sequence, blocks in await played(subject):
        for one, other in itertools.pairwise(blocks):
            between = tuple(sequence.response_ids[one.end : other.start])
            known = between in trial.model.tokenizer.turns
            assert known, f"between two answers are {len(between)} tokens that encode_turn did not make: {between[:8]}…"


@check("AGT-032", capability="environment_reward", page=_PAGE + "sequences")
async def environment_rewards_are_there(subject: Subject) -> None:
    """An agent that declares rewards of its environment gives one to each sequence of a finished rollout."""
    for _, sequence, _ in await played(subject):
        assert sequence.reward is not None, "environment_reward is declared, and a sequence has no reward"


@check("AGT-050", tier="stress", page=_PAGE + "concurrency", deadline_seconds=120.0)
async def hundreds_of_rollouts_with_cancellations(subject: Subject) -> None:
    """If some of hundreds of concurrent rollouts are cancelled, the others end as alone, and nothing is left."""
    scripted = tasks(subject)
    alone = [outline(await play(subject, task)) for task in scripted]
    rollouts = [asyncio.create_task(play(subject, scripted[number % len(scripted)])) for number in range(300)]
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
    assert not other_tasks(), f"tasks that are left: {other_tasks()}"
