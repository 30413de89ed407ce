"""The same command again: it goes on, says that it is done, or says why it cannot go on."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.errors import RunError
from jackfield.plugins import hookimpl

from .conftest import Run
from .test_modes import GRADED, INVARIANT, steps, without_times


def traced(folder: Path) -> set[tuple[str, int]]:
    events = json.loads((folder / "trace.json").read_text())
    spans = {(event["name"], event["args"]["step"]) for event in events if event["ph"] == "X"}
    return {(name, step) for name, step in spans if not name.startswith("wait_for")}  # they depend on time


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "algorithm",
    [
        ("algorithm.mini_batches=2",),
        ("algorithm.name=ppo", "algorithm.kl={coefficient: 0.1, target: 0.01, horizon: 50}"),
    ],
    ids=["grpo", "ppo"],
)
def test_a_longer_schedule_goes_on_as_if_it_had_been_one_run(small_run: Run, algorithm: tuple[str, ...]) -> None:
    """Weights and metrics, evaluations included, are those of a run that was never interrupted.

    The second one has a critic, and a KL controller with a state.
    """
    settings = (INVARIANT, *GRADED, "evaluation.every=2", "evaluation.tasks=4", *algorithm)
    whole, whole_lines = small_run("whole", *settings, "schedule.steps=4")
    small_run("parts", *settings, "schedule.steps=2")
    parts, lines = small_run("parts", *settings, "schedule.steps=4")
    assert (4, False) == (parts.steps, parts.finished_before)
    assert [1, 2, 3, 4] == [line["step"] for line in steps(lines)]
    assert without_times(whole_lines) == without_times(lines)
    kinds = [[(line["kind"], line["step"]) for line in each] for each in (whole_lines, lines)]
    assert kinds[0] == kinds[1]
    weights = [(each.model / "model.safetensors").read_bytes() for each in (whole, parts)]
    assert weights[0] == weights[1]
    stages = [traced(each.folder) for each in (whole, parts)]
    assert stages[0] | {("checkpoint", 1), ("checkpoint_files", 1)} == stages[1]


def test_a_finished_run_says_so(small_run: Run) -> None:
    first, _ = small_run("done", "schedule.steps=1")
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.name != ".lock"}
    again, _ = small_run("done", "schedule.steps=1")
    assert (1, True) == (again.steps, again.finished_before)
    assert before == {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.name != ".lock"}


def test_a_run_with_other_settings_or_other_data_is_refused_and_resume_false_begins_anew(
    small_run: Run, made: Path, tmp_path: Path
) -> None:
    small_run("changed", "schedule.steps=1")
    tasks = tmp_path / "tasks.jsonl"
    shutil.copy(made / "problems.jsonl", tasks)
    small_run("changed", "schedule.steps=2", f"data.train={tasks}", "deadlines.batch=77")  # nothing that counts
    with tasks.open("a") as file:
        file.write('{"question": "1 + 1", "answer": "2"}\n')
    for override, where in (
        ("optimizer.lr=0.5", "optimizer.lr"),
        ("rollout.max_batch_size=3", "rollout.max_batch_size"),
        ("schedule.steps=1", "schedule.steps"),
        (f"data.train={tasks}", "data.train"),
    ):
        with pytest.raises(RunError) as caught:
            small_run("changed", "schedule.steps=3", override)
        assert "run.changed" == caught.value.code
        assert where == str(caught.value.where).partition(",")[0]
    _, lines = small_run("changed", "schedule.steps=1", "optimizer.lr=0.5", "checkpoint.resume=false")
    assert [1] == [line["step"] for line in steps(lines)]


def test_a_second_run_in_the_same_folder_is_refused(small_run: Run) -> None:
    caught: list[RunError] = []

    def second() -> None:
        with pytest.raises(RunError) as refused:
            small_run("mine", "schedule.steps=1")
        caught.append(refused.value)

    class Second:
        @hookimpl
        def step_ended(self, event: Any) -> None:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join(30)

    small_run("mine", "schedule.steps=1", hooks=[Second()])
    assert [("run.folder-in-use", True)] == [
        (error.code, f"process {os.getpid()}" in str(error.found)) for error in caught
    ]


def test_checkpoints_are_listed_and_exported(small_run: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = ("schedule.steps=3", "checkpoint.every=2", "checkpoint.background=1", "optimizer.ema_decay=0.5")
    result, _ = small_run("export", *GRADED, *settings)
    listed = CliRunner().invoke(main, ["checkpoint", "list", str(result.folder), "--json"])
    assert [2, 3] == [row["step"] for row in json.loads(listed.output)]
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["checkpoint", "export", str(result.folder), str(out)])
    assert f"model of step 3 in {out}\n" == done.output
    assert (result.model / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(out, local_files_only=True).config.vocab_size == len(
        AutoTokenizer.from_pretrained(out, local_files_only=True)
    )
    earlier = result.folder / "checkpoints" / "step_00000002"
    assert 0 == CliRunner().invoke(main, ["checkpoint", "export", str(earlier), str(tmp_path / "two")]).exit_code
    assert (tmp_path / "two" / "model.safetensors").read_bytes() != (out / "model.safetensors").read_bytes()
    done = CliRunner().invoke(main, ["checkpoint", "export", str(result.folder), str(tmp_path / "mean"), "--averaged"])
    assert 0 == done.exit_code
    assert (tmp_path / "mean" / "model.safetensors").read_bytes() != (out / "model.safetensors").read_bytes()
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "| steps | 3 |" in card
    assert "the average of the trained weights" in card
    assert card.replace("the average of the trained", "the trained") == (result.model / "README.md").read_text()
    for arguments, code in (
        (["export", str(earlier), str(out)], "engine.failed"),
        (["list", str(out)], "run.no-checkpoint"),
    ):
        refused = CliRunner().invoke(main, ["checkpoint", *arguments])
        assert 1 == refused.exit_code
        assert code in refused.output
