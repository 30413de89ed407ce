from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jackfield.errors import RunError


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(scalar.step, scalar.value) for scalar in accumulator.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_each_scalar_while_the_run_goes_on(make_run):
    run = make_run(report_to=("tensorboard",)).start()
    run.evaluate(0, score=0.25)
    run.sync(1)
    run.step(1, loss=0.5)
    run.step(2, loss=0.25)

    assert {
        "evaluation/score": [(0, 0.25)],
        "weights/seconds": [(1, 0.5)],
        "train/loss": [(1, 0.5), (2, 0.25)],
    } == read(run.folder)


def test_a_resumed_run_replaces_the_later_steps(make_run):
    first = make_run(report_to=("tensorboard",)).start()
    for step in (1, 2, 3):
        first.step(step, loss=float(step))
    second = make_run(report_to=("tensorboard",)).start(first_step=2)
    second.step(3, loss=30.0)
    second.end()
    third = make_run(report_to=("tensorboard",)).start(first_step=2)  # within the same second, too
    third.step(3, loss=300.0)

    assert {"train/loss": [(1, 1.0), (2, 2.0), (3, 300.0)]} == read(third.folder)


def test_a_run_that_starts_again_replaces_everything(make_run):
    first = make_run(report_to=("tensorboard",)).start()
    first.evaluate(0, score=0.5)
    first.step(1, loss=1.0)
    second = make_run(report_to=("tensorboard",)).start()
    second.step(1, loss=2.0)

    assert [(1, 2.0)] == read(second.folder)["train/loss"]
    assert [] == read(second.folder).get("evaluation/score", [])


def test_a_clock_that_went_back_puts_no_file_before_an_earlier_one(make_run):
    first = make_run(report_to=("tensorboard",)).start()
    first.step(3, loss=3.0)
    first.end()
    (path,) = (first.folder / "tensorboard").iterdir()
    path.rename(path.with_name("events.out.tfevents.9999999990.otherhost"))
    second = make_run(report_to=("tensorboard",)).start(first_step=2)
    second.step(3, loss=30.0)

    assert {"train/loss": [(3, 30.0)]} == read(second.folder)


def test_a_full_disk_leaves_whole_records(make_run, full_disk):
    run = make_run(report_to=("tensorboard",)).start()
    run.step(1, loss=1.0)
    (path,) = (run.folder / "tensorboard").iterdir()
    with full_disk(path.stat().st_size + 20), pytest.raises(RunError) as caught:
        run.step(2, loss=1.0)
    assert ("run.failed", str(run.folder / "tensorboard")) == (caught.value.code, caught.value.where)

    assert {"train/loss": [(1, 1.0)]} == read(run.folder)
    assert path.read_bytes()[-4:] != bytes(4)


def test_writing_needs_neither_torch_nor_tensorflow(tmp_path):
    program = """
import sys
from pathlib import Path
from jackfield.observe import ObserveSettings, observers
from jackfield.plugins.hooks import RunStarted, StepEnded
config = ObserveSettings(metrics_file=False, sample_table=False, timeline=False, curve=False, progress=False)
(listener,) = observers(config, Path(sys.argv[1]))
listener.run_started(RunStarted(name="", folder="", total_steps=1, first_step=0, config={}))
listener.step_ended(StepEnded(step=1, metrics={"loss": 2.0}))
print([name for name in ("torch", "tensorflow", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True, timeout=50
    )

    assert "[]" == done.stdout.strip()
    assert {"train/loss": [(1, 2.0)]} == read(tmp_path)
