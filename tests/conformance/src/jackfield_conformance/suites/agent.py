"""What an agent loop must keep, looked at on running ones with a scripted model and a tokenizer of the suite's own.

The plugin's fixture may give, beside ``settings``, ``tasks``: a list of mappings with ``fields`` (the task's fields,
``messages`` among them) and ``answers`` (what the model says, call by call; the last is repeated). At least two, with
different prompts; one that takes several turns where the plugin declares ``multi_turn``. Without it two sums are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, AgentSequence
from jackfield_conformance.registry import Capability, check
from jackfield_conformance.subject import Subject
from jackfield_conformance.support.agent import END, SAMPLING, Block, Letters, Model, ScriptedTask, Trial, play, tasks
from jackfield_conformance.support.leaks import assert_nothing_left, other_tasks
from jackfield_conformance.support.processes import adopting, descendants, names, remaining

_PAGE = "docs/plugins/agent.md#"

#: Seconds until a run that was cancelled has ended.
_GRACE = 5.0

#: Sampling parameters that reach every request as they are; a budget of tokens and a seed may be divided over turns.
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
        assert output.sequences, f"the model answered {task.answers}, and there is no sequence"
        assert isinstance(output.num_turns, int), f"num_turns is {output.num_turns!r}, expected a number"
        assert output.num_turns >= 1, f"num_turns is {output.num_turns!r}, expected 1 or more"
        for name, value in output.metrics.items():
            assert _finite(value), f"the metric {name} is {value!r}, expected a finite number"
        for sequence in output.sequences:
            _assert_well_formed(sequence)


@check("AGT-011", page=_PAGE + "mask")
async def the_mask_is_exact(subject: Subject) -> None:
    """The mask is 1 exactly on the tokens that the model generated."""
    for _, sequence, blocks in await _played(subject):
        expected = [0] * len(sequence.response_ids)
        for block in blocks:
            expected[block.start : block.end] = [1] * (block.end - block.start)
        found = list(sequence.response_mask)
        wrong = [place for place, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"expected the mask {_bits(expected)}, found {_bits(found)}: wrong at {wrong[:8]}"


@check("AGT-012", page=_PAGE + "append-only")
async def tokens_are_append_only(subject: Subject) -> None:
    """What the model was shown at each turn is what the sequence has before its answer, token for token."""
    for _, sequence, blocks in await _played(subject):
        for turn, block in enumerate(blocks):
            history = (*sequence.prompt_ids, *sequence.response_ids[: block.start])
            shown = tuple(block.request.prompt_ids)
            if history == shown:
                continue
            pairs = zip(history, shown, strict=False)
            place = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(history), len(shown)))
            raise AssertionError(
                f"at turn {turn} the model was shown {len(shown)} tokens, the sequence has {len(history)} before"
                f" the answer; they differ from token {place} on: text that was tokenised twice, or changed history"
            )


@check("AGT-013", page=_PAGE + "sequences")
async def what_the_server_told_is_passed_on(subject: Subject) -> None:
    """Log-probabilities and weight versions of the model's tokens are the server's; others have 0.0 and -1."""
    for _, sequence, blocks in await _played(subject):
        log_probs = [0.0] * len(sequence.response_ids)
        versions = [-1] * len(sequence.response_ids)
        for block in blocks:
            log_probs[block.start : block.end] = block.result.log_probs
            versions[block.start : block.end] = block.result.weight_versions
        found = list(sequence.response_log_probs)
        assert log_probs == found, f"expected the log-probabilities {log_probs[:8]}…, found {found[:8]}…"
        told = list(sequence.weight_versions)
        assert versions == told, f"expected the weight versions {versions[:8]}…, found {told[:8]}…"


@check("AGT-014", page=_PAGE + "sampling")
async def sampling_parameters_reach_the_model(subject: Subject) -> None:
    """The run's sampling parameters are those of every request, and all turns together keep to its token budget."""
    other = {**SAMPLING, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 40}
    for sampling in (SAMPLING, other):
        for task in tasks(subject):
            model = (await play(subject, task, sampling=sampling)).model
            for request in model.requests:
                given = {name: value for name, value in sampling.items() if name in _PASSED_ON}
                found = {name: getattr(request.sampling, name) for name in given}
                assert given == found, f"expected {given} in every request, found {found}"
            _assert_budget(model, sampling["max_new_tokens"])
            for budget in _tight_budgets(model):
                _assert_budget(
                    (await play(subject, task, sampling={**sampling, "max_new_tokens": budget})).model, budget
                )


@check("AGT-015", page=_PAGE + "prompts")
async def long_prompts_are_refused(subject: Subject) -> None:
    """A prompt beyond the limit is refused and the model is not asked; one within it is whole."""
    for task in tasks(subject):
        whole = (await play(subject, task)).model.requests[0].prompt_ids
        fitting = (await play(subject, task, max_prompt_tokens=len(whole))).model.requests[0].prompt_ids
        assert whole == fitting, f"a prompt of {len(whole)} tokens was changed under a limit of {len(whole)}"
        tokenizer = Letters()
        model = Model(tokenizer, task.answers)
        output = None
        limit = len(whole) - 1
        with contextlib.suppress(Exception):
            output = await play(subject, task, model=model, tokenizer=tokenizer, max_prompt_tokens=limit)
        assert not model.requests, f"the model was asked, with a prompt of {len(whole)} tokens and a limit of {limit}"
        assert output is None or not output.output.sequences, "a task that was refused yields a sequence"


@check("AGT-016", page=_PAGE + "prompts")
async def prompts_are_of_the_task(subject: Subject) -> None:
    """The prompt is made of the task: other tasks have other prompts, and the same task always has the same."""
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
    """A task's further fields, which the loop does not know, change nothing."""
    for task in tasks(subject):
        plain = await play(subject, task)
        more = await play(subject, task, fields={"conformance_unknown": {"list": [1, None]}, "level": "hard"})
        assert _outline(plain) == _outline(more), "with further fields the run went another way"


@check("AGT-018", page=_PAGE + "prompts")
async def arguments_are_left_alone(subject: Subject) -> None:
    """The task's fields and the sampling parameters are not changed: other rollouts of the group use them, too."""
    for task in tasks(subject):
        tokenizer = Letters()
        agent = subject.make(AgentContext(generate=Model(tokenizer, task.answers), tokenizer=tokenizer))
        sampling, fields = dict(SAMPLING), copy.deepcopy(dict(task.fields))
        await agent.run(sampling, **fields)
        changed = [name for name, value in task.fields.items() if fields[name] != value]
        assert not changed, f"the run changed the task's {changed}"
        assert dict(SAMPLING) == sampling, f"the run changed the sampling parameters to {sampling}"


@check("AGT-019", page=_PAGE + "cancellation")
async def a_cancelled_run_leaves_nothing_running(subject: Subject) -> None:
    """A run that is cancelled ends at once; no generation, task or process of it goes on."""
    with adopting():
        for task in tasks(subject):
            calls = len((await play(subject, task)).model.requests)
            for call in range(calls):
                await _cancel_at(subject, task, call)


@check("AGT-020", page=_PAGE + "failures")
async def failures_are_raised(subject: Subject) -> None:
    """When the model cannot answer, the run raises; a failure is never a sequence, nor silence."""
    for task in tasks(subject):
        tokenizer = Letters()
        try:
            trial = await play(subject, task, model=Model(tokenizer, task.answers, fails=True), tokenizer=tokenizer)
        except Exception:
            continue
        count = len(trial.output.sequences)
        raise AssertionError(f"every call of the model failed; the run returned {count} sequences")


@check("AGT-021", page=_PAGE + "failures")
async def aborted_generation_ends_the_run(subject: Subject) -> None:
    """After an aborted answer the model is not asked again, and what there is of it is reported as aborted."""
    for task in tasks(subject):
        calls = len((await play(subject, task)).model.requests)
        for call in range(calls):
            for tokens in (0, 1):
                tokenizer = Letters()
                model = Model(tokenizer, task.answers, abort_at=call, abort_tokens=tokens)
                trial = await play(subject, task, model=model, tokenizer=tokenizer)
                more = len(model.requests) - call - 1
                assert not more, f"call {call} was aborted, and the model was asked {more} times more"
                _assert_aborted(trial, tokens)


@check("AGT-022", page=_PAGE + "concurrency")
async def runs_do_not_mix(subject: Subject) -> None:
    """Many rollouts at once, each on an object of its own, have requests and tokens of their own."""
    scripted = tasks(subject)
    alone = [_outline(await play(subject, task)) for task in scripted]
    order = [number % len(scripted) for number in range(32)]
    trials = await asyncio.gather(*(play(subject, scripted[index], request_prefix="step/0") for index in order))
    for index, trial in zip(order, trials, strict=True):
        assert alone[index] == _outline(trial), "a run among others went another way than alone"
    _assert_unique(trials)


@check("AGT-023", page=_PAGE + "concurrency")
async def runs_leave_nothing_to_the_next(subject: Subject) -> None:
    """An object that has done a run does the next as a new one would."""
    scripted = tasks(subject)
    for first in scripted:
        for second in scripted:
            expected = _outline(await play(subject, second))
            tokenizer = Letters()
            model = Model(tokenizer, first.answers)
            switch = _Switch(model)
            agent = subject.make(AgentContext(generate=switch, tokenizer=tokenizer))
            await play(subject, first, agent=agent, model=model, tokenizer=tokenizer)
            tokenizer.turns.clear()
            switch.model = Model(tokenizer, second.answers)
            again = await play(subject, second, agent=agent, model=switch.model, tokenizer=tokenizer)
            assert expected == _outline(again), "the second run of an object went another way than a first one"


@check("AGT-024", page=_PAGE + "capabilities")
async def what_runs_show_is_declared(subject: Subject) -> None:
    """A run in which the model answers several times, or that brings a reward, shows a capability that is declared."""
    for _, sequence, blocks in await _played(subject):
        several = len(blocks) > 1
        assert not several or subject.has("multi_turn"), f"the model answered {len(blocks)} times: declare multi_turn"
        rewarded = sequence.reward is not None
        assert not rewarded or subject.has("environment_reward"), "a sequence has a reward: declare environment_reward"


@check("AGT-025", page=_PAGE + "cancellation")
def runs_leave_nothing_behind(subject: Subject) -> None:
    """Runs leave no task, thread, process, socket, shared memory or file behind."""

    async def life(_: object) -> list[str]:
        before = descendants()
        for task in tasks(subject):
            await play(subject, task)
            await _cancel_at(subject, task, 0)
        left = await asyncio.to_thread(remaining, descendants() - before, _GRACE)
        assert not left, f"processes that run on: {names(left)}"
        return other_tasks()

    with adopting():
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
    """A loop that declares several turns takes them: some task is answered twice or more in one sequence."""
    most = 0
    for trial, _, blocks in await _played(subject):
        if len(blocks) > 1:
            assert trial.output.num_turns > 1, f"{len(blocks)} answers in one sequence, and num_turns is 1"
        most = max(most, len(blocks))
    assert most > 1, "multi_turn is declared, and no task of the fixture took a second turn"


@check("AGT-031", capability="multi_turn", page=_PAGE + "turns")
async def turns_are_rendered_once(subject: Subject) -> None:
    """Between two answers is what the tokenizer made of the new messages, and nothing else."""
    for trial, sequence, blocks in await _played(subject):
        for one, other in itertools.pairwise(blocks):
            between = tuple(sequence.response_ids[one.end : other.start])
            known = between in trial.tokenizer.turns
            assert known, f"between two answers are {len(between)} tokens that encode_turn did not make: {between[:8]}…"


@check("AGT-032", capability="environment_reward", page=_PAGE + "sequences")
async def environment_rewards_are_there(subject: Subject) -> None:
    """A loop that declares rewards of its environment gives one to each sequence of a finished run."""
    for _, sequence, _ in await _played(subject):
        assert sequence.reward is not None, "environment_reward is declared, and a sequence has no reward"


@check("AGT-050", tier="stress", page=_PAGE + "concurrency", deadline_seconds=120.0)
async def hundreds_of_runs_with_cancellations(subject: Subject) -> None:
    """Of hundreds of rollouts at once, some of them cancelled, each other one goes its way, and nothing is left."""
    scripted = tasks(subject)
    alone = [_outline(await play(subject, task)) for task in scripted]
    runs = [asyncio.create_task(play(subject, scripted[number % len(scripted)])) for number in range(300)]
    await asyncio.sleep(0)
    for run in runs[::5]:
        run.cancel()
    ended = await asyncio.gather(*runs, return_exceptions=True)
    for number, trial in enumerate(ended):
        if number % 5 == 0:
            continue
        assert isinstance(trial, Trial), f"run {number} was not cancelled, and raised {trial!r}"
        assert alone[number % len(scripted)] == _outline(trial), f"run {number} of 300 went another way than alone"
    _assert_unique([trial for trial in ended if isinstance(trial, Trial)])
    assert not other_tasks(), f"tasks that are left: {other_tasks()}"


@attrs.define
class _Switch:
    """A model that can be exchanged under an agent."""

    model: Model

    async def __call__(self, request: Any) -> Any:
        return await self.model(request)


async def _played(subject: Subject) -> list[tuple[Trial, AgentSequence, list[Block]]]:
    """All sequences of all tasks, each with its run and the calls that made it."""
    found = []
    for task in tasks(subject):
        trial = await play(subject, task)
        found += [(trial, sequence, trial.blocks(sequence)) for sequence in trial.output.sequences]
    assert found, "no task yields a sequence"
    return found


def _tight_budgets(model: Model) -> list[int]:
    """Budgets that end within the first answer, just after it, and just before the end of the last one."""
    lengths = [len(result.token_ids) for _, result in model.calls]
    return sorted({1, lengths[0], lengths[0] + 1, sum(lengths) - 1} - {0, sum(lengths)})


def _assert_budget(model: Model, budget: int) -> None:
    """No request asks for more tokens than the run has left."""
    left = budget
    for turn, (request, result) in enumerate(model.calls):
        asked = request.sampling.max_new_tokens
        assert asked <= left, (
            f"turn {turn} asks for {asked} tokens, and the run has {left} left of max_new_tokens={budget}: the budget"
            " holds for all turns together"
        )
        left -= len(result.token_ids)


async def _cancel_at(subject: Subject, task: ScriptedTask, call: int) -> None:
    """Run until the model's ``call``-th answer is waited for, cancel, and look at what goes on."""
    tokenizer = Letters()
    model = Model(tokenizer, task.answers, hang_at=call)
    tasks_before, processes_before = set(asyncio.all_tasks()), descendants()
    run = asyncio.create_task(play(subject, task, model=model, tokenizer=tokenizer))
    hangs = asyncio.create_task(model.hangs.wait())
    await asyncio.wait({run, hangs}, timeout=_GRACE, return_when=asyncio.FIRST_COMPLETED)
    hangs.cancel()
    assert model.hangs.is_set(), f"the model was not asked for the {call}-th time within {_GRACE:g} s"
    run.cancel()
    await asyncio.wait({run}, timeout=_GRACE)
    if not run.done():
        run.cancel()
        raise AssertionError(f"the run went on for {_GRACE:g} s after it was cancelled")
    assert run.cancelled(), "a cancelled run returned, expected asyncio.CancelledError to leave it"
    assert not model.running, "the run has ended, and its generation goes on"
    left = [each.get_name() for each in asyncio.all_tasks() - tasks_before - {hangs} if not each.done()]
    assert not left, f"tasks that go on after the run was cancelled: {left}"
    processes = await asyncio.to_thread(remaining, descendants() - processes_before, _GRACE)
    assert not processes, f"processes that go on after the run was cancelled: {names(processes)}"


def _assert_well_formed(sequence: AgentSequence) -> None:
    lengths = {
        name: len(getattr(sequence, name))
        for name in ("response_ids", "response_mask", "response_log_probs", "weight_versions")
    }
    assert len(set(lengths.values())) == 1, f"expected one length, found {lengths}"
    assert sequence.prompt_ids, "a sequence has no prompt"
    assert sequence.response_ids, "a sequence has an empty response"
    for name in ("prompt_ids", "response_ids", "response_mask", "weight_versions"):
        values = getattr(sequence, name)
        assert all(type(value) is int for value in values), f"{name} holds something else than numbers: {values[:8]}"
    assert set(sequence.response_mask) <= {0, 1}, f"the mask holds {sorted(set(sequence.response_mask))}"
    assert sequence.reward is None or _finite(sequence.reward), f"the reward is {sequence.reward!r}"


def _assert_aborted(trial: Trial, tokens: int) -> None:
    aborted = trial.model.calls[-1][1]
    for sequence in trial.output.sequences:
        _assert_well_formed(sequence)
        own = [token for token in aborted.token_ids if token in sequence.response_ids]
        if own:
            told = sequence.finish_reason
            assert "abort" == told, f"a sequence ends with an aborted answer of {tokens} tokens, reported as {told!r}"


def _assert_unique(trials: list[Trial]) -> None:
    ids = [request.request_id for trial in trials for request in trial.model.requests]
    twice = sorted({id for id in ids if ids.count(id) > 1}) if len(ids) != len(set(ids)) else []
    assert not twice, f"{len(twice)} request ids are used by several requests, such as {twice[0]!r}"


def _outline(trial: Trial) -> Mapping[str, Any]:
    """A run without the ids of its model's tokens, which are others each time."""

    def plain(ids: tuple[int, ...]) -> str:
        return trial.tokenizer.decode(ids)

    return {
        "asked": [plain(tuple(request.prompt_ids)) for request in trial.model.requests],
        "sequences": [
            (
                plain(tuple(each.prompt_ids)),
                plain(tuple(each.response_ids)),
                tuple(each.response_mask),
                repr(each.reward),
            )
            for each in trial.output.sequences
        ],
        "num_turns": trial.output.num_turns,
    }


def _bits(mask: list[int]) -> str:
    text = "".join(map(str, mask))
    return text if len(text) <= 40 else f"{text[:40]}…"


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
