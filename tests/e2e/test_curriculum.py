"""A run's curriculum chooses tasks by rewards, goes on after a resume, and is refused where it cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jackfield.errors import JackfieldError

from .conftest import Run
from .test_mixing import SMALL
from .test_modes import INVARIANT, steps

LEVELS = 4
#: The reward is 1 or 0 by the task's level, whatever the policy answers: in level 1 alone it differs between answers.
REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    level = extra_info["level"]
    return float(level < 1 or (level == 1 and zlib.crc32(solution_str.encode()) % 2))
"""


@pytest.fixture
def levels(tmp_path: Path, made: Path) -> tuple[str, ...]:
    """Tasks of four levels, and a reward by level, as overrides."""
    problems = [json.loads(line) for line in (made / "problems.jsonl").read_text().splitlines()[:64]]
    file = tmp_path / "levels.jsonl"
    lines = [json.dumps({**each, "id": f"{n % LEVELS}-{n}", "level": n % LEVELS}) for n, each in enumerate(problems)]
    file.write_text("\n".join(lines))
    (tmp_path / "graded.py").write_text(REWARD)
    reward = f"reward={{name: function, path: '{tmp_path}/graded.py:compute_score'}}"
    return (f"data.train={file}", reward, "data.groups_per_batch=4", "data.rollouts_per_group=4", "schedule.steps=8")


def curriculum(name: str, **options: object) -> str:
    return f"data.curriculum={json.dumps({'name': name, 'options': options})}"


@pytest.mark.parametrize("name", ["pass_rate_window", "thompson", "ability_mixing"])
def test_tasks_with_signal_come_more_often(small_run: Run, levels: tuple[str, ...], name: str) -> None:
    """After some steps most tasks are of the only level where rewards differ."""
    _, lines = small_run("run", *levels[:1], *SMALL, *levels, curriculum(name, by="level", bins=LEVELS))
    found = list(steps(lines))
    assert {0.0 < line["curriculum/tasks"] <= 4.0 for line in found} == {True}
    rates = {name: value for name, value in found[-1].items() if name.startswith("curriculum/pass_rate/")}
    assert 1.0 == rates["curriculum/pass_rate/0_to_0"]
    assert 0.2 < rates["curriculum/pass_rate/1_to_1"] < 0.8
    signal = [line["groups/without_signal"] for line in found]
    assert sum(signal[-3:]) < sum(signal[:3])


def test_a_resumed_run_makes_the_same_choices(small_run: Run, levels: tuple[str, ...]) -> None:
    settings = (*SMALL, *levels, INVARIANT, "checkpoint.every=4", "data.pipeline.tasks=[{name: difficulty_rules}]")
    settings += (curriculum("adaptive_difficulty", start=0.5, rate=0.2),)
    whole, lines = small_run("whole", *settings)
    small_run("parts", *settings, "schedule.steps=4")
    parts, again = small_run("parts", *settings)
    chosen = [[line["curriculum/difficulty"] for line in steps(each)] for each in (lines, again)]
    assert chosen[0] == chosen[1]
    weights = [load_file(result.model / "model.safetensors") for result in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (("mode=explore",), "data.curriculum"),
        (("data.order=file",), "data.order"),
        (("queue.durable=true", "transfer_queue={name: sql}"), "queue.durable"),
        (("data.curriculum={name: nothing}",), "data.curriculum.name"),
        (("data.curriculum={name: thompson, options: {by: hardness}}",), "data.curriculum"),
        (("data.curriculum={name: thompson, options: {bins: 1}}",), "data.curriculum.options.bins"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    small_run: Run, settings: tuple[str, ...], where: str
) -> None:
    with pytest.raises(JackfieldError) as caught:
        small_run("refused", *SMALL, curriculum("thompson"), *settings)
    assert where == caught.value.where
