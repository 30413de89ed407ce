"""Checks of what an agent uses beside the model: tools, and other models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.abc.agent import ToolCall
from jackfield.abc.rollout import SamplingParams
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.agent import PAGE, Host, ScriptedTask, Trial, opened, outline
from jackfield_conformance.support.agent_model import FIRST_MODEL_TOKEN
from jackfield_conformance.support.processes import adopting

_SAMPLING = frozenset(field.name for field in attrs.fields(SamplingParams))
_REWARD = 0.25  #: of each tool call in the check of their rewards


@check("AGT-044", since="1.1", capability="tools", page=PAGE + "tools", using=opened)
async def tool_calls_are_reported(subject: Subject, host: Host) -> None:
    """Tools are called by ``context.tools`` with JSON arguments, and each call is in the output's ``tool_calls``."""
    for _, trial in await _calling(host):
        for call in trial.services.tools.asked:
            assert isinstance(call, ToolCall), f"a tool was called with {type(call).__name__}, expected a ToolCall"
            fits = isinstance(call.name, str) and isinstance(call.arguments, Mapping)
            assert fits, f"expected a name and a mapping of arguments, found {call!r}"
            json.dumps(dict(call.arguments), allow_nan=False)
        made = Counter(call.name for call in trial.services.tools.asked)
        reported = Counter(str(each.get("name")) for each in trial.output.tool_calls)
        assert made <= reported, f"called were {dict(made)}, tool_calls of the output has {dict(reported)}"


@check("AGT-045", since="1.1", capability="tools", page=PAGE + "tools", using=opened)
async def results_reach_the_model(subject: Subject, host: Host) -> None:
    """The text of each result is in the model's next prompt."""
    seen = 0
    for _, trial in await _calling(host):
        for called in trial.services.tools.calls:
            seen += _assert_shown(subject, trial, called.result.text, called.after)
    assert seen, "after no tool call the model was asked again: give a task in which it goes on"


@check("AGT-046", since="1.1", capability="tools", page=PAGE + "tools", using=opened)
async def errors_of_tools_go_back_to_the_model(subject: Subject, host: Host) -> None:
    """A result with ``is_error`` does not fail the rollout: its text is in the model's next prompt."""
    for task, whole in await _calling(host):
        trial = await host.play(task, tools={"fails": True})
        first = trial.services.tools.calls[0]
        if len(whole.model.requests) > whole.services.tools.calls[0].after:
            shown = _assert_shown(subject, trial, first.result.text, first.after)
            assert shown, f"a tool call was an error ({first.result.text!r}), and the model was not asked again"


@check("AGT-047", since="1.1", capability="tools", page=PAGE + "tools", using=opened)
async def parallel_calls_keep_their_order(subject: Subject, host: Host) -> None:
    """The order in which parallel calls end does not change the rollout."""
    for task, whole in await _calling(host):
        trial = await host.play(task, tools={"backwards": True})
        assert outline(whole) == outline(trial), "where later tool calls end first, the rollout is another one"


@check("AGT-048", since="1.1", capability="tools", page=PAGE + "tools", using=opened)
async def rewards_of_tools_go_to_their_turns(subject: Subject, host: Host) -> None:
    """The reward of a tool call is added to the turn of the model that made the call."""
    for task, whole in await _calling(host):
        trial = await host.play(task, tools={"reward": _REWARD})
        expected: Counter[int] = Counter(called.before - 1 for called in trial.services.tools.calls)
        before, after = _rewards(whole), _rewards(trial)
        found = {turn: after[turn] - before.get(turn, 0.0) for turn in after}
        if subject.has("several_sequences"):  # several conversations may take turns at the same time
            wanted, given = sum(expected.values()) * _REWARD, sum(found.values())
            assert abs(wanted - given) < 1e-6, f"tool calls gave a reward of {wanted:g}, the sequences have {given:g}"
            continue
        for turn, reward in found.items():
            wanted = expected[turn] * _REWARD
            assert abs(wanted - reward) < 1e-6, f"tool calls gave turn {turn} {wanted:g}, the sequence has {reward:g}"


@check("AGT-049", since="1.1", capability="tools", page=PAGE + "tools", using=opened)
async def cancelled_rollouts_cancel_their_calls(subject: Subject, host: Host) -> None:
    """A rollout that is cancelled during a tool call ends at once, with the call and everything else."""
    with adopting():
        for task, whole in await _calling(host):
            for call in range(min(len(whole.services.tools.asked), 3)):
                rollout = host.rollout(task, tools={"hang_at": call})
                await host.cancel(rollout, rollout.services.tools.hangs, f"tool call {call}")


@check("AGT-051", since="1.1", capability="tools", page=PAGE + "tools", using=opened)
async def a_tool_may_end_the_rollout(subject: Subject, host: Host) -> None:
    """After a result with ``ends`` the model is not asked again."""
    for task, _ in await _calling(host):
        trial = await host.play(task, tools={"ends_at": 0})
        [ending] = [each for each in trial.services.tools.calls if each.result.ends]
        more = len(trial.model.requests) - ending.after
        assert not more, f"a tool has ended the rollout, and the model was asked {more} times more"


@check("AGT-052", since="1.1", capability="models", page=PAGE + "models", using=opened)
async def other_models_are_asked_for_text(subject: Subject, host: Host) -> None:
    """Other models are asked by ``context.chat`` with messages, and no token of their answers is trained on."""
    for _, trial in await _chatting(host):
        for model, messages, sampling in trial.services.chat.asked:
            assert isinstance(model, str) and model, f"a model is named {model!r}, expected a text"  # noqa: PT018
            assert messages, f"the model {model} was asked without messages"
            for message in messages:
                assert {"role", "content"} <= message.keys(), (
                    f"expected messages with role and content, found {message}"
                )
            unknown = sorted(sampling.keys() - _SAMPLING)
            assert not unknown, f"the model {model} was asked with unknown sampling parameters: {unknown}"
        for sequence in trial.output.sequences:
            own = {id for id, mask in zip(sequence.response_ids, sequence.response_mask, strict=True) if mask}
            ends = set(trial.model.tokenizer.end_token_ids)
            foreign = sorted(id for id in own - ends if id < FIRST_MODEL_TOKEN)
            text = trial.model.tokenizer.decode(foreign)
            assert not foreign, f"tokens that the model has not generated are trained on, such as {text[:20]!r}"


@check("AGT-056", since="1.1", capability="models", page=PAGE + "models", using=opened)
async def cancelled_rollouts_cancel_their_questions(subject: Subject, host: Host) -> None:
    """A rollout that is cancelled while it asks another model ends at once, with the request."""
    with adopting():
        for task, whole in await _chatting(host):
            for call in range(min(len(whole.services.chat.asked), 3)):
                rollout = host.rollout(task, chat={"hang_at": call})
                await host.cancel(rollout, rollout.services.chat.hangs, f"request {call} to another model")


async def _calling(host: Host) -> list[tuple[ScriptedTask, Trial]]:
    """Return rollouts of the tasks in which tools are called; require some."""
    found = [(task, await host.play(task)) for task in host.tasks]
    found = [(task, trial) for task, trial in found if trial.services.tools.asked]
    assert found, "tools is declared, and no task of the fixture calls one: give 'tools' and an answer that calls them"
    return found


async def _chatting(host: Host) -> list[tuple[ScriptedTask, Trial]]:
    """Return rollouts of the tasks in which another model is asked; require some."""
    found = [(task, await host.play(task)) for task in host.tasks]
    found = [(task, trial) for task, trial in found if trial.services.chat.asked]
    assert found, "models is declared, and no task of the fixture asks another model"
    return found


def _assert_shown(subject: Subject, trial: Trial, text: str, after: int) -> bool:
    """Require the text in the next prompt, or of several conversations in a later one; return whether there is one."""
    later = (
        trial.model.requests[after:] if subject.has("several_sequences") else trial.model.requests[after : after + 1]
    )
    prompts = [trial.model.tokenizer.decode(request.prompt_ids) for request in later]
    shown = any(text in prompt for prompt in prompts)
    assert shown or not prompts, f"a tool said {text!r}, and the model's next prompt ends with {prompts[0][-60:]!r}"
    return shown


def _rewards(trial: Trial) -> dict[int, float]:
    """Return what the environment gave to each of the model's answers, by their numbers."""
    numbers = {id(result): number for number, (_, result) in enumerate(trial.model.calls)}
    found: dict[int, Any] = {}
    for sequence in trial.output.sequences:
        blocks = trial.blocks(sequence)
        turns = iter(sequence.turn_rewards or ())
        for block in blocks:
            given = sum((sequence.token_rewards or ())[block.start : block.end]) + next(turns, 0.0)
            last = (sequence.reward or 0.0) if block is blocks[-1] else 0.0
            found[numbers[id(block.result)]] = given + last
    return found
