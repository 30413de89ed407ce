"""When a run's curriculum chooses and learns, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.curriculum import Curriculum, CurriculumTasks
from jackfield.errors import RunError
from jackfield.queue.meta import GroupKey
from jackfield.trainer.curriculum import RunCurriculum


@attrs.define(eq=False)
class Notes(Curriculum):
    """Chooses a rolling window, moved by the sum of all rewards, and notes what it learnt before each choice."""

    learnt: list[Any] = attrs.field(factory=list)
    choices: list[tuple[int, int, float]] = attrs.field(factory=list)
    wrong: Sequence[int] | None = None

    def begin(self, tasks: CurriculumTasks) -> None:
        raise AssertionError

    def choose(self, batch: int, count: int, random: np.random.Generator) -> Sequence[int]:
        self.choices.append((batch, len(self.learnt), float(random.random())))
        moved = round(sum(sum(own) for step in self.learnt for _, own in step))
        return self.wrong or [(batch + moved + place) % 50 for place in range(count)]

    def learn(self, rewards: Sequence[tuple[int, Sequence[float]]]) -> None:
        self.learnt.append([[number, [*own]] for number, own in rewards])

    def state_dict(self) -> Mapping[str, Any]:
        return {"learnt": self.learnt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learnt = state["learnt"]


def made(lag: int = 0, **options: Any) -> tuple[RunCurriculum, Notes]:
    notes = Notes()
    return RunCurriculum(curriculum=notes, size=50, seed=3, groups=4, retries=2, lag=lag, **options), notes


def key(batch: int, index: int, retry: int = 0) -> GroupKey:
    return GroupKey("train", batch, index, retry)


def test_a_batch_is_chosen_once_and_retries_have_tasks_of_their_own() -> None:
    run, notes = made()
    first = [run.number(key(0, index)) for index in range(4)]
    again = [run.number(key(0, index, retry)) for retry in (1, 2) for index in range(4)]
    assert ([0, 1, 2, 3], [0, 1, 2, 3] * 2) == (first, again)
    assert 3 == len(notes.choices), "once for the batch, and once for each retry"
    run.number(key(3, 0))
    batches = [batch for batch, *_ in notes.choices]
    assert [0, 1, 2, 3] == batches[::3], "in order, also those that were not asked for"
    assert 12 == len({draw for *_, draw in notes.choices}), "each call has random numbers of its own"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_it_learns_what_has_ended_for_certain(lag: int) -> None:
    """Batch b knows the steps below b - lag, however many have ended."""
    run, notes = made(lag)
    for step in range(6):
        run.number(key(step, 0))
        for index in range(4):
            run.hear(str(key(step, index)), [1.0, 0.0])
        run.end(step)
    known = [learnt for _, learnt, _ in notes.choices][::3]
    assert [max(batch - lag, 0) for batch in range(6 + lag)] == known


def test_retries_count_and_other_batches_wait() -> None:
    """A group that was dropped for equal rewards tells something; what belongs to a later step is learnt with it."""
    run, notes = made(lag=1)
    run.number(key(1, 0))
    run.hear(str(key(0, 2)), [1.0, 1.0])
    run.hear(str(key(1, 0)), [0.0])
    run.hear(str(key(0, 2, 1)), [1.0, 0.0])
    found = run.end(0)
    assert {"curriculum/tasks": 1.0, "curriculum/reward": 0.75} == found
    run.end(1)
    assert [[[2, [1.0, 1.0]], [2, [1.0, 0.0]]], [[1, [0.0]]]] == notes.learnt
    loose, _ = made(in_order=False)
    loose.number(key(1, 0))
    loose.hear(str(key(1, 0)), [0.5])
    assert 1.0 == loose.end(0)["curriculum/tasks"], "asynchronous steps take any groups"


@given(orders=st.permutations([(0, 0), (0, 1), (1, 3), (0, 2), (1, 1)]))
def test_the_order_in_which_rewards_come_does_not_matter(orders: list[tuple[int, int]]) -> None:
    run, notes = made(lag=1)
    for batch, index in orders:
        run.hear(str(key(batch, index)), [float(index)])
    run.end(0)
    run.end(1)
    assert [[[0, [0.0]], [1, [1.0]], [2, [2.0]]], [[2, [1.0]], [4, [3.0]]]] == notes.learnt


@given(stop=st.integers(0, 5), lag=st.integers(0, 2))
def test_a_saved_state_makes_the_same_choices(stop: int, lag: int) -> None:
    """Rewards that came before the state was saved may come again, as after a kill."""

    def play(run: RunCurriculum, steps: range) -> list[int | None]:
        chosen = list[int | None]()
        for step in steps:
            chosen += [run.number(key(step + lag, index, index % 3)) for index in range(4)]
            for index in range(4):
                run.hear(str(key(step, index)), [float(step + index) % 3])
            run.end(step)
        return chosen

    whole, _ = made(lag)
    expected = play(whole, range(8))
    first, _ = made(lag)
    chosen = play(first, range(stop))
    first.hear(str(key(stop, 0)), [float(stop) % 3])
    second, notes = made(lag)
    second.restore(json.loads(json.dumps(first.state())))
    assert expected == chosen + play(second, range(stop, 8))
    assert notes.learnt


@pytest.mark.parametrize("wrong", [[1], [50] * 4, [-1] * 4])
def test_a_wrong_choice_is_refused(wrong: list[int]) -> None:
    run, notes = made()
    notes.wrong = wrong
    with pytest.raises(RunError) as caught:
        run.number(key(0, 0))
    assert ("data.curriculum", "batch 0") == (caught.value.code, caught.value.where)


def test_rewards_per_token_are_refused() -> None:
    run, _ = made()
    with pytest.raises(RunError) as caught:
        run.hear(str(key(0, 0)), [None, 1.0])
    assert "data.curriculum" == caught.value.code


def test_batches_that_ended_long_ago_are_forgotten() -> None:
    run, _ = made()
    for step in range(70):
        run.number(key(step, 0))
        run.end(step)
    assert run.number(key(0, 0)) is None
    assert run.number(key(69, 1)) is not None
