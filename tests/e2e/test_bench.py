"""``jackfield bench``: checkpoints over several data sets, after a run and while it trains."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from jackfield.queue import read_ledger
from jackfield_commands import Command, CommandServer, Completed

from .conftest import QUICKSTART, metrics

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("module:jackfield_bench")]

ROLLOUTS, TASKS, HELD_OUT = 4, 10, 12


def settings(folder: Path, made: Path, *more: str) -> list[str]:
    """Arguments of a run of seconds with two sets, whose answers do not depend on their batch."""
    hard = f"{{file: {made / 'problems.jsonl'}, tasks: {TASKS}, rollouts: {ROLLOUTS}, success: 1.0, "
    return [
        str(QUICKSTART / "grpo.yaml"),
        f"folder={folder}",
        f"model.path={made / 'model'}",
        f"data.train={made / 'problems.jsonl'}",
        f"data.eval={made / 'held_out.jsonl'}",
        "data.groups_per_batch=4",
        "data.rollouts_per_group=4",
        "sampling.max_new_tokens=6",
        "schedule.steps=2",
        "optimizer.lr=1e-2",
        "optimizer.warmup_steps=0",
        f"evaluation={{every: 1, tasks: {HELD_OUT}, sampling: {{max_new_tokens: 6}}, sets: {{hard: {hard}"
        "sampling: {temperature: 1.0, max_new_tokens: 6}}}}",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "cluster.threads=1",
        "rollout.batch_invariant=true",
        "reward={name: rules, method: regex, expected: '.*[0-4].*'}",
        "observe.progress=false",
        "observe.curve=false",
        "observe.report_to=[]",
        *more,
    ]


@pytest.fixture(scope="module")
def done(jackfield: CommandServer, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints after both of its steps."""
    folder = tmp_path_factory.mktemp("bench") / "run"
    ended = jackfield("run", *settings(folder, made))
    assert 0 == ended.code, ended.error
    return folder


@pytest.fixture
def bench(jackfield: CommandServer, made: Path) -> Callable[..., Completed]:
    """``bench(FOLDER, ARGUMENT, …)``: evaluate the run in this folder."""
    return lambda folder, *more: jackfield("bench", *settings(folder, made), *more)


def snapshot(folder: Path) -> dict[str, int]:
    """When each file of a run was changed, other than those of its benches."""
    files = [path for path in folder.rglob("*") if path.is_file() and "bench" not in path.relative_to(folder).parts]
    return {str(path): path.stat().st_mtime_ns for path in files}


def compared(folder: Path, results: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Compare results of all models with the run's own evaluations, which are returned by step."""
    evaluations = {line["step"]: line for line in metrics(folder) if line["kind"] == "evaluation"}
    assert [0, 0, 1, 1, 2, 2] == [result["step"] for result in results]
    assert [0, 1, 2] == sorted(evaluations)
    for result in results:
        line, prefix = evaluations[result["step"]], "" if result["set"] == "eval" else f"{result['set']}/"
        assert {name: line[prefix + name] for name in result["metrics"]} == result["metrics"]
    return evaluations


def until(condition: Callable[[], bool], command: Command, seconds: float = 200.0) -> None:
    """Wait for what a running command does."""
    end = time.monotonic() + seconds
    while not condition():
        assert command.running, f"it has ended: {command.error}"
        assert time.monotonic() < end, f"not within {seconds:g} s: {command.error}"
        time.sleep(0.01)


def test_each_checkpoint_has_the_metrics_of_the_evaluation_at_its_step(
    done: Path, bench: Callable[..., Completed]
) -> None:
    """The run evaluated both sets at each step; the bench finds the same to the last bit."""
    before = snapshot(done)
    ended = bench(done, "--all", "--base", "--json")
    assert 0 == ended.code, ended.error
    found = json.loads(ended.out)
    evaluations = compared(done, found["results"])
    scores = {step: (line["score"] + line["hard/score"]) / 2 for step, line in evaluations.items()}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert found["best"] == ("base" if best == 0 else f"step_{best:08d}")
    assert before == snapshot(done)
    table = (done / "bench" / "bench.txt").read_text()
    assert 8 == len(table.splitlines())
    assert json.loads((done / "bench" / "bench.json").read_text()) == found


def test_adapters_and_devices_in_turns_change_nothing(made: Path, jackfield: CommandServer, tmp_path: Path) -> None:
    """A checkpoint's adapter is sent to the replicas, and engine and replicas take turns, as in the run.

    The schedule of the run, here the update pipeline, is nothing to a bench.
    """
    turns = ("cluster.offload=true", "cluster.replicas=2")
    stream = ("schedule.stream_mini_batches=true", "algorithm.mini_batches=2")
    arguments = settings(tmp_path / "run", made, "model.lora={rank: 4}", *turns, *stream)
    assert 0 == jackfield("run", *arguments).code
    ended = jackfield("bench", *arguments, "--all", "--base", "--json")
    assert 0 == ended.code, ended.error
    compared(tmp_path / "run", json.loads(ended.out)["results"])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.needs("module:ray")
def test_a_bench_in_a_cluster_has_the_metrics_of_its_run(
    made: Path,
    jackfield: CommandServer,
    tmp_path: Path,
    ray_environment: dict[str, str],
    ray_interpreters: str,
) -> None:
    cluster = f"cluster={(QUICKSTART.parent / 'guides' / 'ray_runtime.yaml').read_text()}"
    more = (cluster, "cluster.ray.object_store_bytes=200000000", ray_interpreters, "algorithm.old_log_probs=engine")
    arguments = [each for each in settings(tmp_path / "run", made, *more) if each != "cluster.threads=1"]
    run = jackfield("run", *arguments, environment=ray_environment, seconds=400)
    assert 0 == run.code, run.error
    ended = jackfield("bench", *arguments, "--all", "--base", "--json", environment=ray_environment, seconds=400)
    assert 0 == ended.code, ended.error
    compared(tmp_path / "run", json.loads(ended.out)["results"])


def test_samples_are_a_table_from_which_the_metrics_follow(done: Path, bench: Callable[..., Completed]) -> None:
    ended = bench(done, "--newest", "1", "--json")
    result = next(each for each in json.loads(ended.out)["results"] if each["set"] == "hard")
    rows = pyarrow.parquet.read_table(done / "bench" / result["samples"]).to_pylist()
    assert TASKS * ROLLOUTS == len(rows) == len({(row["task"], row["rollout"]) for row in rows})
    assert all(row["prompt"] and row["response"] and row["error"] is None for row in rows)
    tasks: dict[str, list[float]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row["score"])
    found = result["metrics"]
    assert sum(map(sum, tasks.values())) / len(rows) == pytest.approx(found["mean@4"])
    assert sum(max(each) for each in tasks.values()) / TASKS == pytest.approx(found["best@4"])
    assert sum(1.0 in each for each in tasks.values()) / TASKS == pytest.approx(found["pass@4"])


def test_what_is_done_is_not_done_again_after_a_kill(
    done: Path, made: Path, jackfield: CommandServer, bench: Callable[..., Completed], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--all", "--base", "--out", str(out)]
    command = jackfield.start("bench", *settings(done, made), *arguments)
    until(lambda: len(list((out / "results").glob("[!.]*.json"))) >= 2, command)
    command.kill()
    command.wait()
    kept = {path: path.stat().st_mtime_ns for path in (out / "results").glob("[!.]*.json")}
    ended = bench(done, *arguments)
    assert 0 == ended.code, ended.error
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert 6 - len(kept) == sum(" on " in line and ": mean@" in line for line in ended.error.splitlines())
    again = bench(done, *arguments)
    assert (0, ended.out) == (again.code, again.out)
    assert "0 evaluations to do" in again.error
    other = bench(done, "--newest", "1", "--set", "eval", "--out", str(out), "evaluation.tasks=3")
    assert "1 evaluations to do" in other.error, "other settings have other results"


def test_a_bench_beside_a_run_that_trains_leaves_it_alone(
    made: Path, jackfield: CommandServer, bench: Callable[..., Completed], tmp_path: Path
) -> None:
    """The run generates and trains meanwhile, its ledger has each sample once, and the bench ends well."""
    folder = tmp_path / "run"
    busy = ("schedule.steps=10000", "checkpoint.keep=10000", "evaluation.every=0", "checkpoint.grace_seconds=100")
    run = jackfield.start("run", *settings(folder, made, *busy))
    until(lambda: len(list((folder / "checkpoints").glob("step_????????"))) >= 2, run)
    before = [line["step"] for line in metrics(folder) if line["kind"] == "step"]
    ended = bench(folder, "--newest", "1", "--set", "hard", *busy, "--json")
    assert 0 == ended.code, ended.error
    assert [ROLLOUTS * TASKS] == [
        pyarrow.parquet.read_metadata(folder / "bench" / each["samples"]).num_rows
        for each in json.loads(ended.out)["results"]
    ]
    steps = [line["step"] for line in metrics(folder) if line["kind"] == "step"]
    assert max(steps) > max(before), "its replicas generated while the bench evaluated"
    until(lambda: max(line["step"] for line in metrics(folder) if line["kind"] == "step") > max(steps), run)
    run.send(signal.SIGTERM)
    assert 128 + signal.SIGTERM == run.wait().code
    acked = [
        key for entry in read_ledger(folder) if entry.get("consumer") == "trainer" for key in entry.get("keys", ())
    ]
    assert len(acked) == len(set(acked))


def test_a_run_is_followed_to_its_end_by_a_bench_that_it_does_not_wait_for(
    made: Path, jackfield: CommandServer, tmp_path: Path
) -> None:
    """Each result is of one version: that of the checkpoint, as an evaluation of the run itself would have been."""
    folder = tmp_path / "run"
    arguments = settings(folder, made, "schedule.steps=6", "checkpoint.every=2")
    follower = jackfield.start("bench", *arguments, "--base", "--follow", "200", "--json")
    run = jackfield.start("run", *arguments)
    assert 0 == run.wait().code
    ended = follower.wait()
    assert 0 == ended.code, ended.error
    found = json.loads(ended.out)["results"]
    assert [0, 0, 2, 2, 4, 4, 6, 6] == [each["step"] for each in found]
    scores = {line["step"]: (line["score"], line["hard/score"]) for line in metrics(folder) if "score" in line}
    for greedy, sampled in zip(found[::2], found[1::2], strict=True):
        assert scores[greedy["step"]] == (greedy["metrics"]["score"], sampled["metrics"]["score"])


def test_a_checkpoint_that_its_run_removes_is_named_and_the_others_go_on(
    done: Path, made: Path, jackfield: CommandServer, bench: Callable[..., Completed], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("bench"))
    command = jackfield.start("bench", *settings(folder, made), "--all", "--base", "--json")
    until(lambda: (folder / "bench" / "results" / "base-eval.json").exists(), command)
    shutil.rmtree(folder / "checkpoints" / "step_00000002")
    ended = command.wait()
    error = json.loads(ended.out)["error"]
    assert (1, "run.no-checkpoint") == (ended.code, error["code"])
    assert "step_00000002" in error["where"]
    assert "checkpoint.keep" in error["fix"]
    again = bench(folder, "--all", "--base", "--json")
    assert ["base", "base", "step_00000001", "step_00000001"] == [
        each["model"] for each in json.loads(again.out)["results"]
    ]
    assert "0 evaluations to do" in again.error


def test_a_model_folder_is_evaluated_as_the_checkpoint_that_it_was_exported_from(
    done: Path, bench: Callable[..., Completed], tmp_path: Path
) -> None:
    """Greedy answers are the same; a run's folder stands for its newest checkpoint."""
    found = []
    for path in (done / "model", done / "checkpoints" / "step_00000002", done):
        ended = bench(done, "--checkpoint", str(path), "--set", "eval", "--json", "--out", str(tmp_path / path.name))
        assert 0 == ended.code, ended.error
        found.append(json.loads(ended.out)["results"][0])
    assert found[0]["metrics"] == found[1]["metrics"] == found[2]["metrics"]
    assert ["model", "step_00000002", "step_00000002"] == [each["model"] for each in found]


def test_a_signal_ends_it_in_order(done: Path, made: Path, jackfield: CommandServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = jackfield.start("bench", *settings(done, made), "--all", "--out", str(out))
    until(lambda: any((out / "results").glob("[!.]*.json")), command)
    command.send(signal.SIGINT)
    ended = command.wait()
    assert 128 + signal.SIGINT == ended.code, ended.error
    assert not (out / "error.txt").exists()
    assert "the same command goes on" in ended.error


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (("--set", "hrad"), 1, "config.invalid-value"),
        (("--checkpoint", "{tmp}"), 1, "engine.model"),
        (("--checkpoint", "{tmp}/nothing"), 1, "engine.model"),
        (("folder={tmp}/empty",), 1, "run.no-checkpoint"),
        (("data.eval=null", "evaluation.sets={}"), 1, "config.missing-key"),
        (("evaluation.sets.hard.file=nowhere",), 1, "data.missing"),
        (("evaluation.rollouts=2",), 1, "config.invalid-value"),
        (("evaluation.sets={train: {file: x}}",), 1, "config.invalid-value"),
        (("evaluation.sets={more: {file: x, rolouts: 3}}",), 1, "config.unknown-key"),
        (("evaluation.answer='('",), 1, "config.invalid-value"),
        (("--all", "--newest", "2"), 2, None),
        (("--checkpoint", "{tmp}", "--follow", "1"), 2, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_wrong_is_named_before_anything_starts(
    done: Path, bench: Callable[..., Completed], tmp_path: Path, arguments: tuple[str, ...], exit_code: int, code: Any
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    ended = bench(done, *(each.format(tmp=tmp_path) if "{tmp}" in each else each for each in arguments), "--json")
    assert exit_code == ended.code, ended.error
    if code is not None:
        assert code == json.loads(ended.out)["error"]["code"]
    assert not (done / "bench" / "error.txt").exists()
