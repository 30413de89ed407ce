"""Curricula: what they choose, what they learn, and that a saved state continues bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.curriculum import Curriculum, CurriculumTasks
from jackfield.data.curriculum import CURRICULA, CurriculumSpec, TrainingTasks
from jackfield.data.formats import Task
from jackfield.errors import ConfigError
from jackfield_conformance import certify
from jackfield_curricula.arms import Arms, arms_of
from jackfield_curricula.hooks import register_parts

pytestmark = pytest.mark.timeout(120)
NAMES = ("pass_rate_window", "adaptive_difficulty", "thompson", "ability_mixing")
OPTIONS: Mapping[str, Mapping[str, Any]] = {"thompson": {"by": "difficulty"}, "pass_rate_window": {"by": "difficulty"}}
register_parts(lambda kind, name, make: CURRICULA.setdefault(name, make))


def tasks(size: int) -> CurriculumTasks:
    """Tasks whose difficulty rises, of three sources."""
    fields = [{"difficulty": number / size} for number in range(size)]
    made = [Task(id=str(n), messages=(), data_source=f"source-{n % 3}", fields=own) for n, own in enumerate(fields)]
    return TrainingTasks(made)


def begun(name: str, size: int = 60, **options: Any) -> Curriculum:
    made = CurriculumSpec(name=name, options={**OPTIONS.get(name, {}), **options}).make()
    made.begin(tasks(size))
    return made


def random(batch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=batch))


Feedback = Sequence[tuple[int, Sequence[float]]]
steps = st.lists(
    st.lists(st.tuples(st.integers(0, 59), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4)), max_size=6),
    max_size=6,
)


def played(made: Curriculum, told: Sequence[Feedback], first: int = 0) -> list[list[int]]:
    """Choose and learn by turns."""
    chosen = list[list[int]]()
    for batch, feedback in enumerate(told, first):
        chosen.append(list(made.choose(batch, 12, random(batch))))
        made.learn(feedback)
    return [*chosen, list(made.choose(first + len(told), 12, random(first + len(told))))]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(before=steps, after=steps)
def test_a_saved_state_continues_bit_for_bit(name: str, before: list[Feedback], after: list[Feedback]) -> None:
    whole, copy = begun(name), begun(name)
    played(whole, before)
    copy.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert dict(whole.metrics()) == dict(copy.metrics())
    chosen = [played(each, after, len(before)) for each in (whole, copy)]
    assert chosen[0] == chosen[1]
    assert json.dumps(whole.state_dict()) == json.dumps(copy.state_dict())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(told=steps, count=st.integers(1, 150))
def test_a_choice_has_distinct_tasks_while_there_are_enough(name: str, told: list[Feedback], count: int) -> None:
    made = begun(name)
    played(made, told)
    chosen = made.choose(9, count, random(9))
    times = Counter(chosen)
    assert count == len(chosen)
    assert set(times) <= set(range(60))
    if count <= 60:
        assert {1} == set(times.values())
    else:
        assert set(range(60)) == set(times)


def learner(skill: float) -> Callable[[int], float]:
    """Return the pass rate of a task by its rank in difficulty, for a learner of some skill."""
    return lambda number: float(1.0 / (1.0 + np.exp(12.0 * (number / 600 - skill))))


def signal_of(name: str, skill: float, **options: Any) -> float:
    """Return the mean p (1 - p) of what is chosen after 20 steps of a learner that stays as it is."""
    made, rate, draws = begun(name, 600, **options), learner(skill), np.random.default_rng(5)
    found = list[float]()
    for batch in range(30):
        chosen = made.choose(batch, 32, random(batch))
        made.learn([(number, (draws.random(8) < rate(number)).astype(float).tolist()) for number in chosen])
        if batch >= 20:
            found += [rate(number) * (1.0 - rate(number)) for number in chosen]
    return float(np.mean(found))


@pytest.mark.parametrize("skill", [0.15, 0.5, 0.9])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pass_rate_window", {"by": "difficulty", "bins": 12}),
        ("adaptive_difficulty", {}),
        ("thompson", {"by": "difficulty", "bins": 12}),
        ("thompson", {"by": "difficulty", "bins": 12, "aim": "target"}),
        ("ability_mixing", {"by": "difficulty", "bins": 12}),
    ],
)
def test_what_is_chosen_has_more_signal_than_chance(name: str, options: Mapping[str, Any], skill: float) -> None:
    """A third more than tasks drawn evenly, for a learner of little, medium and much skill."""
    rate = learner(skill)
    even = float(np.mean([rate(number) * (1.0 - rate(number)) for number in range(600)]))
    assert signal_of(name, skill, **options) > 1.33 * even


def test_the_window_leaves_out_what_always_passes_or_fails() -> None:
    """Of tasks that were tried, those within the bounds come again first."""
    made = begun("pass_rate_window", 30, by=None, untried=0.0, outside=0.0)
    made.learn([(number, [1.0, 0.0] if number in (3, 4, 5) else [float(number % 2)] * 2) for number in range(30)])
    assert {3, 4, 5} == set(made.choose(0, 3, random(0)))


def test_a_window_in_which_nothing_lies_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        begun("pass_rate_window", 30, by=None, low=0.9, high=0.1)
    assert "data.curriculum.options.low" == refused.value.where


def test_difficulty_moves_as_the_formula_says() -> None:
    made = begun("adaptive_difficulty", start=0.5, rate=0.1, gain=3.0, wanted=0.4)
    made.learn([(1, [1.0, 1.0, 1.0, 0.0])])
    moved = 0.5 + 0.1 * float(np.tanh(3.0 * (0.75 - 0.4)))
    assert {"difficulty": moved, "pass_rate": 0.75} == dict(made.metrics())


def test_mixing_has_its_floor() -> None:
    """Two sources are mastered, one is not: its weight is what the formula says, and the others keep the floor."""
    made = begun("ability_mixing", floor=0.3, keeps=1.0)
    made.learn([(number, [1.0] * 98) for number in (0, 1)] + [(2, [1.0, 0.0] * 49)])
    rates = [99 / 100, 99 / 100, 50 / 100]
    signal = [rate * (1 - rate) + 0.01 for rate in rates]
    expected = [0.1 + 0.7 * each / sum(signal) for each in signal]
    found = made.metrics()
    assert expected == pytest.approx([found[f"weight/source-{number}"] for number in range(3)])
    chosen = Counter(number % 3 for batch in range(40) for number in made.choose(batch, 30, random(batch)))
    assert expected == pytest.approx([chosen[kind] / 1200 for kind in range(3)], abs=0.09), "sizes bound the largest"


@given(values=st.lists(st.floats(-10, 10) | st.integers(-3, 3), min_size=1, max_size=80), bins=st.integers(2, 9))
def test_bins_are_ranges_in_order(values: list[float], bins: int) -> None:
    made = TrainingTasks([Task(id=str(n), messages=(), fields={"x": x}) for n, x in enumerate(values)])
    arms, names = arms_of(made, "x", bins)
    assert len(set(arms.tolist())) == len(names) <= bins
    pairs = sorted(zip(values, arms.tolist(), strict=True))
    assert [arm for _, arm in pairs] == sorted(arms.tolist())
    assert len({(value, arm) for value, arm in pairs}) == len(set(values)), "equal numbers are in one bin"


@given(weights=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=6), data=st.data(), count=st.integers(1, 40))
def test_shares_follow_weights_and_sizes(weights: list[float], data: st.DataObject, count: int) -> None:
    """As many as were asked for, and more than the weight's share only where other arms are used up."""
    arms = np.array(
        [*data.draw(st.lists(st.integers(0, len(weights) - 1), min_size=40, max_size=40)), *range(len(weights))]
    )
    made = Arms(arms, [])
    chosen = made.take(np.array(weights), count, np.random.default_rng(count))
    assert count == len(set(chosen))
    if sum(weights):
        ideal = np.array(weights) / sum(weights) * count
        counts = np.bincount(arms[chosen], minlength=len(weights))
        if (ideal <= made.sizes).all():
            assert (np.abs(counts - ideal) <= 1.0 + 1e-6).all()


def test_wrong_options_and_fields_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        CurriculumSpec(name="tompson").make()
    assert "thompson" in str(caught.value)
    with pytest.raises(ConfigError):
        CurriculumSpec(name="thompson", options={"binz": 3}).make()
    with pytest.raises(ConfigError) as caught:
        begun("thompson", by="hardness")
    assert "hardness" in str(caught.value)
    made = CurriculumSpec(name="adaptive_difficulty", options={"by": "level"}).make()
    with pytest.raises(ConfigError) as caught:
        made.begin(TrainingTasks([Task(id="1", messages=(), fields={"level": "hard"})]))
    assert "'hard'" in str(caught.value)
    assert "difficulty_rules" in str(caught.value.fix)


def test_texts_are_no_kinds_of_tasks() -> None:
    """A field with few values is, also where there are few tasks; of numbers there are as many as one likes."""
    given = [Task(id=str(n), messages=(), fields={"text": f"What is {n}?", "level": str(n % 4)}) for n in range(40)]
    for name in ("thompson", "pass_rate_window", "ability_mixing"):
        CurriculumSpec(name=name, options={"by": "level"}).make().begin(TrainingTasks(given))
        CurriculumSpec(name=name, options={"by": "text"}).make().begin(TrainingTasks(given[:3]))
        with pytest.raises(ConfigError) as caught:
            CurriculumSpec(name=name, options={"by": "text"}).make().begin(TrainingTasks(given))
        error = caught.value
        assert ("config.invalid-value", "data.curriculum.options.by") == (error.code, error.where)
        assert "40 kinds of 40 tasks, such as 'What is 0?'" == error.found
        assert "leave `by` out" in str(error.fix)


def test_a_million_tasks_are_chosen_from_in_time() -> None:
    """Memory is arrays, and one choice looks at each task a few times."""
    made = CurriculumSpec(name="thompson").make()
    object.__setattr__(made, "_arms", Arms(np.arange(1_000_000), []))
    made.reset(1_000_000)  # type: ignore[attr-defined]
    chosen = made.choose(0, 128, random(0))
    assert 128 == len(set(chosen))


def test_the_package_is_certified() -> None:
    assert "full" == certify("hooks:curricula").level
