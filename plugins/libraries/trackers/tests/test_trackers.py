"""Each tracker's own library reads back what a run of three steps, resumed after the first, has reported."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import JackfieldError
from jackfield.observe import ObserveSettings
from jackfield.observe.trackers import check_trackers
from jackfield.plugins import discover
from jackfield_testing import TRACKERS

REPORT = Path(__file__).with_name("report.py")


def read_back(name: str, folder: Path) -> dict[str, Any]:
    """Report in the environment of the trackers' libraries, whose versions do not fit the rest."""
    packages = (find_spec(each) for each in ("jackfield", "jackfield_trackers"))
    paths = [str(Path(str(each.origin)).parents[1]) for each in packages if each is not None]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}
    variables |= {"WANDB_SILENT": "true", "MPLCONFIGDIR": str(folder / "matplotlib")}
    command = [str(TRACKERS / "bin" / "python"), str(REPORT), name, str(folder)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=150)
    assert 0 == done.returncode, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(180)
@pytest.mark.needs("trackers")
@pytest.mark.parametrize(
    ("name", "tables", "ends"), [("wandb", 4, [0, 1]), ("trackio", 4, []), ("mlflow", 3, ["FAILED"])]
)
def test_a_resumed_run_is_one_run_of_the_tracker(name: str, tables: int, ends: list[object], tmp_path: Path) -> None:
    """Configuration, metrics by step, samples and the end are there; MLflow writes the table of a step once."""
    found = read_back(name, tmp_path)
    assert [[1, 0.25], [2, 0.5], [2, 0.5], [3, 0.75]] == found["points"]
    assert (1, 0.5, tables, ends) == tuple(found[each] for each in ("ids", "lr", "tables", "ends"))


def test_they_come_from_a_package_of_hooks() -> None:
    record = discover().resolve("trackers", "hooks")
    assert (None, "jackfield-trackers") == (record.error, record.distribution)


def test_a_library_that_is_not_installed_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from jackfield.compose.parts import register_installed

    assert {} == register_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JackfieldError) as caught:
        check_trackers(ObserveSettings(report_to=("wandb",)))
    assert ("plugin.requirement", "observe.report_to") == (caught.value.code, caught.value.where)
    with pytest.raises(JackfieldError) as caught:
        check_trackers(ObserveSettings(report_to=("wandb",), trackers={"wandb": {"projct": "x"}}))
    assert ("config.unknown-key", "observe.trackers.wandb.projct") == (caught.value.code, caught.value.where)
