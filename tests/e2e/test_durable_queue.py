"""A run whose queue keeps its rows, in a folder where another run has been."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from jackfield.errors import RunError
from jackfield.plugins import hookimpl
from jackfield_testing import refused

from .conftest import Run
from .test_modes import GRADED, INVARIANT, steps, without_times

SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=3", *GRADED)
DURABLE = ("transfer_queue={name: sql}", "checkpoint.every=0", "checkpoint.at_end=false", INVARIANT, *SMALL)


class Stop:
    """Ends a run after its first step, before any checkpoint."""

    @hookimpl
    def step_ended(self, event: Any) -> None:
        raise RunError("stop")


def rows(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "queue" / "samples.sqlite")) as database:
        return int(database.execute("select count(distinct key) from jackfield_cells").fetchone()[0])


def test_a_run_that_begins_anew_does_not_see_the_rows_of_the_one_before(small_run: Run, tmp_path: Path) -> None:
    """They have the keys that this run will give to others."""
    folder = f"folder={tmp_path / 'run'}"
    with refused("run.failed", "stop"):
        small_run("run", "seed=3", "schedule.steps=4", "schedule.sync_offset=1", folder, *DURABLE, hooks=[Stop()])
    left = rows(tmp_path / "run")
    assert left >= 8
    again, lines = small_run("run", "schedule.steps=1", folder, *DURABLE)
    fresh, expected = small_run("fresh", "schedule.steps=1", *DURABLE)
    assert without_times(expected) == without_times(lines)
    assert 1 == len(steps(lines))
    assert rows(fresh.folder) == rows(again.folder), "none of the earlier run's rows is left"
    assert not (again.folder / "queue" / "empty").exists()
