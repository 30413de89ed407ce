"""Evaluation during training: which weights it is of, what goes on meanwhile, and what failures count as."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import attrs
import pytest

from jackfield.config.evaluation import EvaluationConfig, EvaluationSampling, EvaluationSet
from jackfield.data.formats import Task
from jackfield.errors import JackfieldError
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import EvaluationEnded, SamplesRecorded, StageEnded
from jackfield.trainer.role import Role, Schedule

from .simulation import Simulation

HELD_OUT = "held-out"


class Listener:
    """Records evaluations, and the stages of the run."""

    def __init__(self) -> None:
        self.evaluations: list[EvaluationEnded] = []
        self.samples: list[SamplesRecorded] = []
        self.stages: list[StageEnded] = []

    @hookimpl
    def evaluation_ended(self, event: EvaluationEnded) -> None:
        self.evaluations.append(event)

    @hookimpl
    def samples_recorded(self, event: SamplesRecorded) -> None:
        if event.partition != "train":
            self.samples.append(event)

    @hookimpl
    def stage_ended(self, event: StageEnded) -> None:
        self.stages.append(event)


@attrs.define(eq=False, slots=False)
class Evaluated(Simulation):
    """A simulated run with sets of held-out tasks."""

    evaluation: EvaluationConfig = attrs.field(factory=lambda: EvaluationConfig(every=1))
    tasks: int = 3
    listener: Listener = attrs.field(factory=Listener)

    def _role(self, hooks: Any) -> Role:
        hooks.register(self.listener)
        role = super()._role(hooks)
        config = attrs.evolve(role.config, evaluation=self.evaluation)
        names = ("eval", *self.evaluation.sets)
        sets: Any = {name: [_task(f"{HELD_OUT}-{name}-{number}") for number in range(self.tasks)] for name in names}
        return attrs.evolve(role, config=config, tasks=sets)


def _task(name: str) -> Task:
    return Task(id=name, messages=({"role": "user", "content": name},))


def evaluated(steps: int = 4, o: int = 0, **settings: Any) -> Evaluated:
    run = Evaluated(Schedule(steps=steps, sync_interval=1, sync_offset=o), **settings)
    run.run()
    return run


SAMPLED = EvaluationSampling(temperature=1.0)


@pytest.mark.parametrize(("offset", "overlap"), [(0, False), (1, True)])
def test_training_rollouts_go_on_while_one_version_is_evaluated(offset: int, overlap: bool) -> None:
    """One step off-policy: while the trainer waits for its evaluation, rollouts of the next batch end.

    On-policy none may. Each evaluation is of the version that it names: a token of another one would end the run.
    """
    ended: list[tuple[str, float]] = []
    run = Evaluated(Schedule(steps=4, sync_offset=offset), generate_seconds=10, update_seconds=1)

    def answer(task: str, seed: int) -> str:
        ended.append((task, run.clock.time()))
        return "ab"[seed % 2]

    run.answer = answer
    run.run()
    assert [0, 1, 2, 3, 4] == [event.step for event in run.listener.evaluations]
    spans = [(each.start, each.end) for each in run.listener.stages if each.name == "evaluate"]
    during = [sum(start < at < end for task, at in ended if not task.startswith(HELD_OUT)) for start, end in spans]
    assert [overlap] * 3 == [count > 0 for count in during[1:-1]], during
    assert 4 == len(run.recorder.steps)


def test_a_sample_of_other_weights_is_refused() -> None:
    """A replica takes weights that nothing announced, while the first set is evaluated."""
    run = Evaluated(Schedule(steps=1), evaluation=EvaluationConfig(every=1, sets={"hard": EvaluationSet(file="none")}))

    def answer(task: str, seed: int) -> str:
        run.synchronizer.loaded = 5
        return "a"

    run.answer = answer
    with pytest.raises(JackfieldError) as caught:
        run.run()
    assert ("weights.version", True) == (caught.value.code, str(caught.value.where).startswith("hard/0/"))


def test_several_sets_and_rollouts_are_reported_as_one_evaluation() -> None:
    letters: dict[str, list[str]] = defaultdict(lambda: list("aabb"))
    further = EvaluationSet(file="hard.jsonl", rollouts=4, sampling=SAMPLED)
    run = evaluated(
        steps=1,
        evaluation=EvaluationConfig(every=1, sets={"hard": further}),
        answer=lambda task, seed: letters[task].pop() if "hard" in task and letters[task] else "a",
    )
    first = run.listener.evaluations[0].metrics
    assert (1.0, 1.0, 3.0) == (first["score"], first["mean@1"], first["tasks"])
    expected = {"mean@4": 0.5, "pass@1": 0.5, "pass@2": 1 - 1 / 6, "pass@4": 1.0, "best@4": 1.0, "worst@4": 0.0}
    assert expected == pytest.approx({name: first[f"hard/{name}"] for name in expected})
    assert 0.5 == first["hard/maj@4"], "two answers have two votes each"
    assert {"eval": 3, "hard": 12} == {event.partition: len(event.samples) for event in run.listener.samples[:2]}


def test_failures_are_counted_and_have_no_score() -> None:
    """One of four rollouts of each task cannot be scored: the others alone make the metrics."""
    letters: dict[str, list[str]] = defaultdict(lambda: list("aabx"))
    run = evaluated(
        steps=1,
        tasks=2,
        evaluation=EvaluationConfig(every=1, rollouts=4, sampling=SAMPLED),
        answer=lambda task, seed: letters[task].pop() if task.startswith(HELD_OUT) and letters[task] else "a",
    )
    first = run.listener.evaluations[0].metrics
    assert (0.25, 2 / 3) == pytest.approx((first["failed"], first["mean@4"]))
    assert {"pass@1": 2 / 3, "pass@2": 1.0} == pytest.approx({name: first[name] for name in ("pass@1", "pass@2")})
    assert "pass@4" not in first, "no task has four scores"
    errors = [sample.tags.get("error") for sample in run.listener.samples[0].samples]
    assert 2 == sum(error is not None for error in errors)


def test_answers_vote_by_their_pattern() -> None:
    """With a pattern that matches the letter ``a`` alone, the rest does not vote."""
    letters: dict[str, list[str]] = defaultdict(lambda: list("abbb"))
    run = evaluated(
        steps=1,
        tasks=1,
        evaluation=EvaluationConfig(every=1, rollouts=4, sampling=SAMPLED, answer="(a)"),
        answer=lambda task, seed: letters[task].pop() if task.startswith(HELD_OUT) and letters[task] else "a",
    )
    first = run.listener.evaluations[0].metrics
    assert (1.0, 0.25) == (first["maj@4"], first["mean@4"])
