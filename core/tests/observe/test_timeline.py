from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import RunError


def read(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def stages(folder: Path) -> list[tuple[str, str, float, float]]:
    """Return (lane as shown, name, start, end) of each stage, in seconds."""
    events = read(folder)
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        (lanes[event["tid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]


def test_each_lane_has_its_stages_after_every_event(make_run):
    run = make_run(timeline=True).start()
    assert [] == stages(run.folder)
    run.stage("rollout", "explorer", 0, 2)
    assert [("explorer", "rollout", 0, 2)] == stages(run.folder)
    run.stage("update_actor", "trainer", 2, 3, step=4)
    run.end()

    assert [("explorer", "rollout", 0, 2), ("trainer", "update_actor", 2, 3)] == stages(run.folder)
    assert {"step": 4} == read(run.folder)[-1]["args"]
    assert {"M", "X"} == {event["ph"] for event in read(run.folder)}
    for event in read(run.folder):
        assert event.keys() >= {"name", "ph", "pid", "tid"}


def test_stages_of_a_lane_that_overlap_get_a_lane_of_their_own(make_run):
    run = make_run(timeline=True).start()
    run.stage("first", "trainer", 0, 3)
    run.stage("next", "trainer", 3, 4)
    run.stage("late", "trainer", 2.5, 5)  # overlaps both
    run.stage("later", "trainer", 4.5, 6)  # overlaps late, not next

    assert ["trainer", "trainer", "trainer (2)", "trainer"] == [lane for lane, *_ in stages(run.folder)]


def test_a_run_that_recovers_in_its_process_keeps_the_names_of_lanes(make_run):
    run = make_run(timeline=True).start()
    run.stage("update_actor", "trainer", 0, 1)
    run.end()
    run.stage("late", "explorer", 1, 2)
    run.start(first_step=1).stage("update_actor", "trainer", 1, 2)

    assert ["trainer", "trainer"] == [lane for lane, *_ in stages(run.folder)]


def test_a_resumed_run_keeps_the_completed_steps_and_follows_them(make_run):
    first = make_run(timeline=True).start()
    for step in range(3):
        first.stage("update_actor", "trainer", step, step + 1, step=step)
    second = make_run(timeline=True)
    second.clock.now = 500.0
    second.start(first_step=2)
    second.stage("update_actor", "trainer", 400, 401, step=2)

    assert [(0, 1), (1, 2), (2, 3)] == [(start, end) for _, _, start, end in stages(second.folder)]


def test_a_full_disk_leaves_a_whole_trace(make_run, full_disk):
    run = make_run(timeline=True).start()
    run.stage("rollout", "explorer", 0, 2)
    with (
        full_disk((run.folder / "trace.json").stat().st_size + 20),
        pytest.raises(RunError) as caught,
    ):
        run.stage("update", "explorer", 2, 3)
    assert ("run.failed", str(run.folder / "trace.json")) == (caught.value.code, caught.value.where)
    run.end()

    assert [("explorer", "rollout", 0, 2)] == stages(run.folder)


def test_a_killed_run_leaves_files_that_load(tmp_path):
    program = """
import os, signal, sys
from pathlib import Path
from jackfield.observe import ObserveSettings, observers
from jackfield.plugins import hooks
config = ObserveSettings(report_to=(), curve=False)
made = observers(config, Path(sys.argv[1]))
def tell(hook, event):
    for listener in made:
        getattr(listener, hook, lambda event: None)(event)
tell("run_started", hooks.RunStarted(name="", folder="", total_steps=9, first_step=0, config={}))
for step in range(3):
    tell("stage_ended", hooks.StageEnded(name="update_actor", lane="trainer", start=step, end=step + 1, step=step))
    tell("step_ended", hooks.StepEnded(step=step + 1, metrics={"policy/loss": 1.0}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=50)

    assert -signal.SIGKILL == done.returncode
    assert 3 == len(stages(tmp_path))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [1, 2, 3] == [json.loads(line)["step"] for line in lines]
    assert "step 1/9: loss 1.000" in done.stderr
