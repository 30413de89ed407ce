"""Runs whose operators are in a service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jackfield_commands import CommandServer

from .conftest import Run
from .test_mixing import SMALL
from .test_modes import INVARIANT, without_times

#: Operators that read and change rewards, of which the last one learns.
TASKS = [{"name": "difficulty_rules"}, {"name": "exact_duplicates"}]
NOVELTY = {"name": "novelty", "weight": 0.5, "only_positive": False, "embedder": {"name": "hashed"}}
EXPERIENCES = [
    {"name": "length_reward", "high": 9, "width": 4, "weight": 0.2},
    {"name": "diversity", "weight": 0.2, "last_weight": 0.2},
    NOVELTY,
]


@pytest.fixture
def service(jackfield: CommandServer, tmp_path: Path) -> Iterator[Path]:
    """The folder of a service, which ends with the test."""
    folder = tmp_path / "service"
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({"folder": str(folder)}))
    command = jackfield.start("data", "serve", str(tmp_path / "serve.yaml"), "--json")
    while not command.out.endswith("\n"):
        assert command.running, command.error
        time.sleep(0.01)
    yield folder
    command.kill()
    command.wait()


def pipeline(**more: Any) -> str:
    return f"data.pipeline={json.dumps({'tasks': TASKS, 'experiences': EXPERIENCES, **more})}"


def rewards(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What operators have shaped, by step."""
    return [{key: value for key, value in line.items() if key.startswith("reward/")} for line in without_times(lines)]


def test_a_run_is_the_same_with_a_service_and_without(small_run: Run, service: Path) -> None:
    """All metrics but times are equal to the last bit, and the rewards of another run that is resumed, too."""
    settings = ("schedule.steps=4", "checkpoint.every=2", INVARIANT, *SMALL)
    _, expected = small_run("alone", *settings, pipeline())
    _, served = small_run("served", *settings, pipeline(service=str(service)))
    small_run("parts", "schedule.steps=2", *settings[1:], pipeline(service=str(service)))
    parts, again = small_run("parts", *settings, pipeline(service=str(service)))
    assert any("reward/novelty/mean" in line for line in expected)
    assert without_times(expected) == without_times(served)
    assert rewards(expected) == rewards(again)
    assert all(each.is_symlink() for each in (parts.folder / "data").glob("[0-9]*"))
