"""Several sets as one: the order of a mixture, and tasks that are left out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.config.data import DataSet, sets_of
from jackfield.data.formats import TaskFormat
from jackfield.data.tasks import SeededOrder, order_of
from jackfield.errors import DataError
from jackfield_datasets import MixedOrder, MixedSet, open_tasks
from jackfield_testing import refused

SIZES = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.1, 0.5, 0.75, 1, 2, 7])), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(sets=SIZES, seed=st.integers(0, 9))
def test_a_mixture_keeps_weights_and_the_epochs_of_each_set(sets: list[tuple[int, float]], seed: int) -> None:
    sizes, weights = [size for size, _ in sets], [weight for _, weight in sets]
    order = MixedOrder(sizes=sizes, weights=weights, seed=seed)
    period, starts = sum(order.counts), [sum(sizes[:n]) for n in range(len(sizes))]
    numbers = [order.index(position) for position in range(3 * period)]
    which = [max(n for n, start in enumerate(starts) if start <= number) for number in numbers]
    for start in range(0, len(numbers), period):  # exact within each period
        assert Counter(which[start : start + period]) == dict(enumerate(order.counts))
    for n, (size, weight) in enumerate(sets):
        assert abs(order.counts[n] / period - weight / sum(weights)) < 1e-9
        own = [number - starts[n] for number, one in zip(numbers, which, strict=True) if one == n]
        counts = Counter(own)
        often = [counts[number] for number in range(size)]
        assert max(often) - min(often) <= 1  # each set has epochs of its own


@settings(max_examples=40, deadline=None)
@given(sets=SIZES, seed=st.integers(0, 9), position=st.integers(0, 10**12))
def test_a_position_says_all(sets: list[tuple[int, float]], seed: int, position: int) -> None:
    """Every explorer, and a run that resumes, gets the same task without what came before."""
    sizes, weights = [size for size, _ in sets], [weight for _, weight in sets]
    first, again = (MixedOrder(sizes=sizes, weights=weights, seed=seed) for _ in range(2))
    first.index(0)
    number = first.index(position)
    assert 0 <= number < sum(sizes)
    assert number == again.index(position)


def written(folder: Path, name: str, size: int) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"question": f"{name} {n}", "answer": f"{n}"}) + "\n" for n in range(size)))
    return str(file)


def opened(*sets: DataSet, limit: int | None = None) -> MixedSet:
    return open_tasks(sets, TaskFormat(), limit=limit)


def test_sets_without_weights_are_one_set(tmp_path: Path) -> None:
    tasks = opened(*(DataSet(path=written(tmp_path, name, size)) for name, size in (("a", 3), ("b", 5))))
    assert SeededOrder(size=8, seed=4) == order_of(tasks, 4)
    assert [f"a:{n}" for n in range(1, 4)] + [f"b:{n}" for n in range(1, 6)] == [task.id for task in tasks]
    assert "b:5" == tasks[-1].id
    assert ["a:3", "b:1"] == [task.id for task in tasks[2:4]]
    with pytest.raises(IndexError):
        tasks[8]
    assert 4 == len(opened(DataSet(path=written(tmp_path, "a", 3)), DataSet(path=written(tmp_path, "b", 5)), limit=4))


def test_the_digest_shows_changes_of_each_file(tmp_path: Path) -> None:
    sets = [DataSet(path=written(tmp_path, name, 3)) for name in "ab"]
    before = opened(*sets).digest
    assert before == opened(*sets).digest
    written(tmp_path, "b", 4)
    assert before != opened(*sets).digest


def test_tasks_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    sets = [
        DataSet(path=written(tmp_path, name, size), weight=weight) for name, size, weight in (("a", 4, 3), ("b", 6, 1))
    ]
    tasks = opened(*sets)
    odd = tasks.fitted(lambda task: int(task.ground_truth) % 2 == 1, "prompts are left out", leaves_out=True)
    assert ["a:2", "a:4", "b:2", "b:4", "b:6"] == [task.id for task in odd]
    assert "5 of 10 prompts are left out" == odd.notes[-1]
    order = odd.order(0)
    names = Counter(odd[order.index(position)].id[0] for position in range(40))
    assert {"a": 30, "b": 10} == names
    with pytest.raises(DataError) as caught:
        tasks.fitted(lambda task: task.id.startswith("a"), "", leaves_out=True)
    assert "data.empty" == caught.value.code


def test_same_names_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    sets = []
    for name in "xy":
        (tmp_path / name).mkdir()
        sets.append(DataSet(path=written(tmp_path / name, "train", 2)))
    assert 4 == len({task.id for task in opened(*sets)})


def test_equal_ids_in_two_sets_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": "1", "question": "q", "answer": "a"}))
    with refused("data.malformed", "a.jsonl:1", "b.jsonl:1"):
        opened(*(DataSet(path=str(tmp_path / f"{name}.jsonl")) for name in "ab"))


def test_weights_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    a, b = written(tmp_path, "a", 2), written(tmp_path, "b", 2)
    with refused("config.invalid-value", "data.train"):
        sets_of((DataSet(path=a, weight=1.0), b), "data.train")
    with refused("config.invalid-value", "0.123456789"):
        opened(DataSet(path=a, weight=0.123456789), DataSet(path=b, weight=1.0))
