"""The archive of consumed samples: what other programs read, exactly once, and runs on it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.errors import JackfieldError
from jackfield.queue import effective_acks, read_ledger
from jackfield_archive.__main__ import main as archive_main
from jackfield_commands import CommandServer

from .conftest import QUICKSTART, Run
from .test_kill import DONE, PROMPTS, RUNS, STEPS, Start, moments, start  # noqa: F401, the fixture
from .test_modes import GRADED
from .test_served import Roles, commands, roles  # noqa: F401, fixtures

pytestmark = pytest.mark.timeout(300)

SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=3", *GRADED)


def rows(archive: Path, cache: Path) -> list[dict[str, Any]]:
    """Return the rows of all files, as a user of ``datasets`` gets them."""
    files = sorted(str(file) for file in archive.glob("*.parquet"))
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))
    return list(found)


def check_once(folder: Path, archive: Path, cache: Path) -> list[dict[str, Any]]:
    """Each key that the trainer was finally done with is there once, with the step of the ledger, and no other."""
    found = [row for row in rows(archive, cache) if row["status"] == "trained"]
    trained = {key: [step] for key, step in effective_acks(read_ledger(folder))["trainer"].items()}
    assert {1} == set(Counter(row["key"] for row in found).values())
    assert trained == {row["key"]: row["steps"] for row in found}
    return found


@pytest.fixture
def archived(small_run: Run, tmp_path: Path) -> Path:
    """The archive of a run of three steps, of 12 samples in 6 groups."""
    small_run("archived", "checkpoint.every=2", f"queue.archive={tmp_path / 'archive'}", *SMALL)
    return tmp_path / "archive"


def test_another_program_reads_what_was_trained_on(small_run: Run, tmp_path: Path) -> None:
    """Tokens, log-probs, rewards and tags of every sample that the ledger says was used."""
    archive = tmp_path / "archive"
    result, _ = small_run("run", "checkpoint.every=2", f"queue.archive={archive}", *SMALL)
    found = check_once(result.folder, archive, tmp_path / "cache")
    assert 2 == len(list(archive.glob("*.parquet"))), "one file for each checkpoint"
    for row in found:
        length = json.loads(row["tags"])["response_tokens"]
        for name in ("response_ids", "response_mask", "rollout_log_probs", "advantages"):
            assert length == len(row[f"columns.{name}"]), name
        assert 1 == len(row["columns.reward"])
        assert row["columns.prompt_ids"]
        assert row["columns.values"] is None
        assert {"extra_info", "ground_truth"} <= json.loads(row["columns.task"]).keys()


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 16))])
@pytest.mark.parametrize(
    "settings",
    [("schedule.sync_offset=1",), ("transfer_queue={name: sql}", "queue.durable=true")],
    ids=["memory", "durable"],
)
def test_killed_again_and_again_every_sample_is_archived_once(
    start: Start,  # noqa: F811
    tmp_path: Path,
    settings: tuple[str, ...],
    seed: int,
) -> None:
    """Also in the moments around the writing of a file, which is in the run's folder here."""
    finished = 0

    def again(kill: tuple[str, int] | None = None) -> dict[str, Any]:
        folder = tmp_path / str(finished)
        return start(folder, f"queue.archive={folder / 'archive'}", "evaluation.every=0", *settings, kill=kill)

    for kill in [*moments(seed, 2, 90), *(("/archive", number) for number in (2, 5, 7, 9))]:
        while "killed" not in (answer := again(kill)):  # the run ended before its moment came
            assert DONE == answer
            finished += 1
    assert DONE == again()
    for number in range(finished + 1):
        folder = tmp_path / str(number)
        assert STEPS * PROMPTS * RUNS == len(check_once(folder, folder / "archive", tmp_path / "cache"))


def test_samples_of_an_archive_are_mixed_in_again(small_run: Run, archived: Path, tmp_path: Path) -> None:
    """With their rewards and log-probs, as groups; what the next run archives of them names their origin."""
    again = tmp_path / "again"
    mixing = f"mixing.human={{ratio: 1, samples: {archived}, max_uses: 1}}"
    _, lines = small_run("again", "schedule.steps=2", mixing, f"queue.archive={again}", *SMALL)
    assert [4.0, 4.0] == [line["samples/human"] for line in lines if line["kind"] == "step"]
    found = [row for row in rows(again, tmp_path / "cache") if row["partition"] == "human"]
    earlier = {row["key"]: row for row in rows(archived, tmp_path / "cache")}
    assert 8 == len(found)
    for row in found:
        (parent,) = json.loads(row["tags"])["parents"]
        before = earlier[parent.removeprefix(f"{archived}:")]
        for name in ("prompt_ids", "response_ids", "rollout_log_probs", "reward"):
            assert before[f"columns.{name}"] == row[f"columns.{name}"], name


def test_supervised_training_learns_the_best_of_each_group(small_run: Run, archived: Path, tmp_path: Path) -> None:
    """The tokens are those that were sampled; what is archived of this run says so."""
    kept = tmp_path / "kept"
    settings = ("schedule.steps=3", "data.groups_per_batch=2", f"data.train={archived}", f"queue.archive={kept}")
    result, _ = small_run("sft", *settings, file="warmup.yaml")
    assert 3 == result.steps
    best: dict[str, dict[str, Any]] = {}
    for row in rows(archived, tmp_path / "cache"):
        best[row["group"]] = max(best.get(row["group"], row), row, key=lambda each: sum(each["columns.reward"]))
    expected = {name: (row["columns.prompt_ids"], row["columns.response_ids"]) for name, row in best.items()}
    learnt = rows(kept, tmp_path / "cache")
    assert expected == {row["task"]: (row["columns.prompt_ids"], row["columns.response_ids"]) for row in learnt}


def test_preference_training_compares_the_best_and_the_worst(small_run: Run, archived: Path, tmp_path: Path) -> None:
    differ: dict[str, set[float]] = {}
    for row in rows(archived, tmp_path / "cache"):
        differ.setdefault(row["group"], set()).add(sum(row["columns.reward"]))
    pairs = [name for name, rewards in differ.items() if len(rewards) > 1]
    assert 0 < len(pairs), "some groups have different rewards"
    kept = tmp_path / "kept"
    settings = ("algorithm.name=dpo", "schedule.steps=2", f"data.groups_per_batch={len(pairs)}")
    _, lines = small_run("dpo", *settings, f"data.train={archived}", f"queue.archive={kept}", file="warmup.yaml")
    assert [2.0 * len(pairs)] * 2 == [line["samples"] for line in lines if line["kind"] == "step"]
    assert set(pairs) == {row["task"] for row in rows(kept, tmp_path / "cache")}


def test_an_archive_is_scored_again_and_learnt_from(small_run: Run, archived: Path, made: Path, tmp_path: Path) -> None:
    """Another reward, of a function in a file, then training on its best answers, and no replica generates."""
    file, out = tmp_path / "length.py", tmp_path / "rescored"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return -len(solution_str)\n"
    )
    reward = f"{{name: function, path: '{file}:compute_score'}}"
    done = CliRunner().invoke(
        archive_main, ["rescore", str(archived), str(out), "--model", str(made / "model"), "--reward", reward]
    )
    assert (0, f"12 samples in {out}, 12 trained") == (done.exit_code, done.output.strip()), done.output
    before, after = (rows(each, tmp_path / "cache") for each in (archived, out))
    assert [row["key"] for row in before] == [row["key"] for row in after]
    assert [row["columns.rollout_log_probs"] for row in before] == [row["columns.rollout_log_probs"] for row in after]
    assert all(row["columns.reward"][0] <= 0 and row["columns.advantages"] is None for row in after)
    result, _ = small_run("sft", "schedule.steps=1", f"data.train={out}", file="warmup.yaml")
    assert 1 == result.steps


def test_commands_read_an_archive(archived: Path, tmp_path: Path) -> None:
    listed = CliRunner().invoke(main, ["queue", "ls", str(archived), "--json"])
    assert 12 == len(json.loads(listed.output))
    done = CliRunner().invoke(main, ["queue", "export", str(archived), str(tmp_path / "rows.jsonl")])
    assert "12 samples" in done.output, done.output


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(small_run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(JackfieldError) as caught:
        small_run("run", f"queue.archive={file / 'archive'}", *SMALL)
    assert ("queue.store", str(file / "archive")) == (caught.value.code, caught.value.where)
    assert "queue.archive" in str(caught.value.fix)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text().count('"step"')


def test_a_run_needs_the_library(small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jackfield_archive", None)
    with pytest.raises(JackfieldError) as caught:
        small_run("run", f"queue.archive={tmp_path / 'archive'}", *SMALL)
    assert ("plugin.requirement", "pip install jackfield-archive") == (caught.value.code, caught.value.fix)


@pytest.mark.parametrize(("overrides", "file"), [((), "grpo.yaml"), (("algorithm.name=dpo",), "warmup.yaml")])
def test_what_cannot_be_learnt_is_refused_first(
    small_run: Run, tmp_path: Path, overrides: tuple[str, ...], file: str
) -> None:
    """An archive has no tasks to explore; and a pair needs two answers."""
    archive = tmp_path / "rows.parquet"
    pyarrow_table(archive)
    with pytest.raises(JackfieldError) as caught:
        small_run("run", f"data.train={archive}", *overrides, file=file)
    assert ("config.invalid-value", "data.train") == (caught.value.code, caught.value.where)
    assert not (tmp_path / "run").exists()


def pyarrow_table(file: Path) -> None:
    """Write two samples of one group with equal rewards, without the types that the queue writes."""
    table = {"columns.prompt_ids": [[5, 6]] * 2, "columns.response_ids": [[7], [8, 9]], "columns.reward": [1.0, 1.0]}
    datasets.Dataset.from_dict({**table, "group": ["a", "a"]}).to_parquet(str(file))


def test_rows_that_another_program_wrote_are_learnt(small_run: Run, tmp_path: Path) -> None:
    pyarrow_table(tmp_path / "rows.parquet")
    settings = ("schedule.steps=1", "data.groups_per_batch=1", f"data.train={tmp_path / 'rows.parquet'}")
    _, lines = small_run("sft", *settings, file="warmup.yaml")
    assert [1] == [line["samples"] for line in lines if line["kind"] == "step"]


def test_a_served_controller_writes_the_archive(small_run: Run, roles: Roles, made: Path, tmp_path: Path) -> None:  # noqa: F811
    """It is the process that deletes values; that of the run has none of the files open."""
    folder, archive = tmp_path / "run", tmp_path / "archive"
    own = (f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl", f"queue.archive={archive}", *SMALL)
    roles.start(
        "queue", "queue", "serve", str(QUICKSTART / "grpo.yaml"), f"folder={folder}", "evaluation.every=0", *own
    )
    roles.until("the queue is served", of="queue")
    address = f"queue.address={folder / 'queue' / 'address.json'}"
    small_run("run", "checkpoint.every=1", address, f"queue.archive={archive}", *SMALL)
    roles.end_queue()
    assert 12 == len(check_once(folder, archive, tmp_path / "cache"))
    assert 3 == len(list(archive.glob("*.parquet")))


@pytest.mark.timeout(600)
def test_a_run_in_a_ray_cluster_writes_the_archive(
    jackfield: CommandServer,
    quickstart_settings: Callable[..., list[str]],
    ray_environment: dict[str, str],
    ray_interpreters: str,
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray")
    archive = tmp_path / "archive"
    ray = ("cluster.name=ray", "cluster.ray.num_cpus=3", "cluster.ray.object_store_bytes=200000000", ray_interpreters)
    more = (f"queue.archive={archive}", "checkpoint.every=1", *SMALL, "schedule.steps=2")
    done = jackfield("run", *quickstart_settings("run", *ray, *more), environment=ray_environment, seconds=500)
    assert 0 == done.code, done.error
    assert 8 == len(check_once(tmp_path / "run", archive, tmp_path / "cache"))
