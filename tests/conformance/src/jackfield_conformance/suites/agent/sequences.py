"""Checks of what a rollout yields: tokens, masks, rewards and sequences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.agent import (
    PAGE,
    Host,
    assert_well_formed,
    bits,
    opened,
    turns_of,
)
from jackfield_conformance.support.agent_model import FIRST_MODEL_TOKEN, image_parts
from jackfield_conformance.support.expecting import finite

_RELATIONS = ("sub_agent", "branch", "compaction", "template")
_WORD = re.compile(r"[a-z_]+")


@check("AGT-010", page=PAGE + "sequences", using=opened)
async def sequences_are_well_formed(subject: Subject, host: Host) -> None:
    """An answered task yields sequences whose ids, mask, log-probabilities and versions have one length."""
    for task in host.tasks:
        output = (await host.play(task)).output
        assert output.sequences, f"the model answered {task.answers}, but there is no sequence"
        assert isinstance(output.num_turns, int), f"num_turns is {output.num_turns!r}, expected a number"
        assert output.num_turns >= 1, f"num_turns is {output.num_turns!r}, expected 1 or more"
        for name, value in output.metrics.items():
            assert finite(value), f"the metric {name} is {value!r}, expected a finite number"
        for sequence in output.sequences:
            assert_well_formed(sequence)


@check("AGT-011", page=PAGE + "mask", using=opened)
async def the_mask_is_exact(subject: Subject, host: Host) -> None:
    """The mask is 1 exactly on the tokens that the model generated."""
    for _, sequence, blocks in await host.played():
        expected = [0] * len(sequence.response_ids)
        for block in blocks:
            expected[block.start : block.end] = [1] * (block.end - block.start)
        found = list(sequence.response_mask)
        wrong = [place for place, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"expected the mask {bits(expected)}, found {bits(found)}: wrong at {wrong[:8]}"


@check("AGT-012", page=PAGE + "append-only", using=opened)
async def tokens_are_append_only(subject: Subject, host: Host) -> None:
    """The tokens that the model is shown at each turn are exactly those before its answer in the sequence."""
    for _, sequence, blocks in await host.played():
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


@check("AGT-013", page=PAGE + "sequences", using=opened)
async def log_probs_and_versions_are_passed_on(subject: Subject, host: Host) -> None:
    """Log-probabilities and weight versions of the model's tokens are the server's; other tokens have 0.0 and -1."""
    for _, sequence, blocks in await host.played():
        log_probs = [0.0] * len(sequence.response_ids)
        versions = [-1] * len(sequence.response_ids)
        for block in blocks:
            log_probs[block.start : block.end] = block.result.log_probs
            versions[block.start : block.end] = block.result.weight_versions
        found = list(sequence.response_log_probs)
        assert log_probs == found, f"expected the log-probabilities {log_probs[:8]}…, found {found[:8]}…"
        reported = list(sequence.weight_versions)
        assert versions == reported, f"expected the weight versions {versions[:8]}…, found {reported[:8]}…"


@check("AGT-024", page=PAGE + "capabilities", using=opened)
async def capabilities_of_rollouts_are_declared(subject: Subject, host: Host) -> None:
    """An agent whose model answers several times, or that gives a reward, declares this capability."""
    for _, sequence, blocks in await host.played():
        several = len(blocks) > 1
        assert not several or subject.has("multi_turn"), f"the model answered {len(blocks)} times: declare multi_turn"
        rewarded = sequence.reward is not None
        assert not rewarded or subject.has("environment_reward"), "a sequence has a reward: declare environment_reward"


@check("AGT-030", capability="multi_turn", page=PAGE + "turns", using=opened)
async def several_turns_are_there(subject: Subject, host: Host) -> None:
    """An agent that declares several turns takes them: some task is answered twice or more in one sequence."""
    most = 0
    for trial, _, blocks in await host.played():
        if len(blocks) > 1:
            assert trial.output.num_turns > 1, f"{len(blocks)} answers in one sequence, and num_turns is 1"
        most = max(most, len(blocks))
    assert most > 1, "multi_turn is declared, and no task of the fixture took a second turn"


@check("AGT-031", capability="multi_turn", page=PAGE + "turns", using=opened)
async def turns_are_rendered_once(subject: Subject, host: Host) -> None:
    """The tokens between two answers are exactly those that the tokenizer made from new messages and texts."""
    for trial, sequence, blocks in await host.played():
        for one, other in itertools.pairwise(blocks):
            between = tuple(sequence.response_ids[one.end : other.start])
            known = trial.model.tokenizer.made(between)
            assert known, f"between two answers are {len(between)} tokens that encode_turn did not make: {between[:8]}…"


@check("AGT-032", capability="environment_reward", page=PAGE + "sequences", using=opened)
async def environment_rewards_are_there(subject: Subject, host: Host) -> None:
    """An agent that declares rewards of its environment gives one to each sequence of a finished rollout."""
    for _, sequence, _ in await host.played():
        assert sequence.reward is not None, "environment_reward is declared, and a sequence has no reward"


@check("AGT-036", since="1.1", page=PAGE + "rewards", using=opened)
async def rewards_have_one_number_each(subject: Subject, host: Host) -> None:
    """Token rewards have one finite number per response token, turn rewards one per turn of the model."""
    for _, sequence, _ in await host.played():
        expected = {"token_rewards": len(sequence.response_ids), "turn_rewards": len(turns_of(sequence.response_mask))}
        for name, count in expected.items():
            rewards = getattr(sequence, name)
            if rewards is None:
                continue
            assert count == len(rewards), f"{name} has {len(rewards)} numbers, expected {count}"
            wrong = [value for value in rewards if not finite(value)]
            assert not wrong, f"{name} holds {wrong[0]!r}, expected finite numbers"


@check("AGT-037", since="1.1", page=PAGE + "end-reasons", using=opened)
async def end_reasons_are_words(subject: Subject, host: Host) -> None:
    """The end reason is a word of lower-case letters and ``_``, or empty."""
    for task in host.tasks:
        reason = (await host.play(task)).output.end_reason
        assert isinstance(reason, str), f"the end reason is {reason!r}, expected a text"
        assert not reason or _WORD.fullmatch(reason), f"the end reason is {reason!r}, expected a word like 'answered'"


@check("AGT-038", since="1.1", page=PAGE + "several-sequences", using=opened)
async def parents_come_first(subject: Subject, host: Host) -> None:
    """A sequence's parent is an earlier sequence of the output, and a relation is set exactly with a parent."""
    for task in host.tasks:
        for number, sequence in enumerate((await host.play(task)).output.sequences):
            parent, relation = sequence.parent, sequence.relation
            fits = parent is None or (type(parent) is int and 0 <= parent < number)
            assert fits, f"sequence {number} has the parent {parent!r}, expected None or an earlier sequence"
            named = relation in _RELATIONS if parent is not None else relation is None
            expected = "None" if parent is None else f"one of {', '.join(_RELATIONS)}"
            assert named, (
                f"sequence {number} has the parent {parent} and the relation {relation!r}, expected {expected}"
            )
            assert isinstance(sequence.name, str), f"sequence {number} has the name {sequence.name!r}, expected a text"


@check("AGT-039", since="1.1", page=PAGE + "several-sequences", using=opened)
async def no_token_is_trained_twice(subject: Subject, host: Host) -> None:
    """A token that the model generated is in one sequence at most with mask 1, once."""
    for task in host.tasks:
        seen: dict[int, int] = {}
        for number, sequence in enumerate((await host.play(task)).output.sequences):
            for token, own in zip(sequence.response_ids, sequence.response_mask, strict=True):
                if not own or token < FIRST_MODEL_TOKEN:
                    continue
                assert token not in seen, f"a token of sequence {seen[token]} is trained again in sequence {number}"
                seen[token] = number


@check("AGT-040", since="1.1", page=PAGE + "capabilities", using=opened)
async def capabilities_since_1_1_are_declared(subject: Subject, host: Host) -> None:
    """An agent that uses tools, other models, several sequences, rewards of turns or images declares it."""
    for task in host.tasks:
        trial = await host.play(task)
        sequences = trial.output.sequences
        rewarded = [each for each in sequences if each.token_rewards is not None or each.turn_rewards is not None]
        used = {
            "tools": ("called a tool", trial.services.tools.asked),
            "models": ("asked another model", trial.services.chat.asked),
            "several_sequences": ("yields several sequences", sequences[1:]),
            "turn_rewards": ("yields rewards of turns or tokens", rewarded),
            "multi_modal": ("yields inputs beside tokens", [each for each in sequences if each.multi_modal_inputs]),
        }
        for name, (what, found) in used.items():
            assert not found or subject.has(name), f"a rollout {what}: declare {name}"


@check("AGT-053", since="1.1", capability="several_sequences", page=PAGE + "several-sequences", using=opened)
async def several_sequences_are_there(subject: Subject, host: Host) -> None:
    """An agent that declares several sequences yields them: some task has two or more."""
    found = [len((await host.play(task)).output.sequences) for task in host.tasks]
    assert max(found) > 1, f"several_sequences is declared, and the tasks of the fixture yield {found}"


@check("AGT-054", since="1.1", capability="turn_rewards", page=PAGE + "rewards", using=opened)
async def turn_rewards_are_there(subject: Subject, host: Host) -> None:
    """An agent that declares rewards of turns gives some: a sequence has rewards of its turns or tokens."""
    found = [
        sequence
        for _, sequence, _ in await host.played()
        if sequence.turn_rewards is not None or sequence.token_rewards is not None
    ]
    assert found, "turn_rewards is declared, and no sequence has turn_rewards or token_rewards"


@check("AGT-055", since="1.1", capability="multi_modal", page=PAGE + "images", using=opened)
async def images_reach_the_model_and_the_sequences(subject: Subject, host: Host) -> None:
    """The arrays of a task's images are in every request and, the same, in the sequence."""
    seen = 0
    for task in host.tasks:
        messages = task.fields["messages"]
        if not list(image_parts(messages)):
            continue
        expected = host.tokenizer.encode_multi_modal(messages)[1]["pixel_values"]
        trial = await host.play(task)
        for sequence in trial.output.sequences:
            for turn, block in enumerate(trial.blocks(sequence)):
                _assert_images(expected, block.request.multi_modal_data, f"the request of turn {turn}")
                seen += 1
            if trial.blocks(sequence):
                _assert_images(expected, sequence.multi_modal_inputs, "the sequence")
    assert seen, "multi_modal is declared, and no task of the fixture with an image was answered"


def _assert_images(expected: Any, found: Mapping[str, Any], where: str) -> None:
    """Require the task's images, before any that came later."""
    pixels = found.get("pixel_values")
    assert pixels is not None, f"{where} has no pixel_values, expected those of encode_multi_modal"
    same = pixels[: len(expected)].tolist() == expected.tolist()
    assert same, f"{where} has other pixel_values than encode_multi_modal returned"
