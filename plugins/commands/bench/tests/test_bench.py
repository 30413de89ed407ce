"""Results, tables, the choice of models, and what a bench shares with a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pyarrow.parquet
import pytest

from jackfield.config import make_config
from jackfield.errors import JackfieldError
from jackfield.files import replace_file, seal
from jackfield.plugins import discover
from jackfield.plugins.hooks import SampleRecord
from jackfield_bench.models import Model, choose_models
from jackfield_bench.tables import best_model, summary, text_table, write_samples
from jackfield_bench.work import Work, bench_config

MODEL = Model(name="step_00000004", step=4, folder=Path("none"), checkpoint=True, digest="d")


def result(model: str, name: str, score: float, rollouts: int = 1, **metrics: float) -> dict[str, Any]:
    own = {f"mean@{rollouts}": score, "score": score, "failed": 0.0, "tasks": 8.0, **metrics}
    return {"key": "k", "model": model, "set": name, "rollouts": rollouts, "metrics": own, "seconds": 1.0}


def config(folder: Path, **sections: Any) -> Any:
    tasks = folder / "tasks.jsonl"
    tasks.write_text('{"question": "a", "answer": "b"}\n')
    sets = {"hard": {"file": str(tasks), "rollouts": 2, "sampling": {"temperature": 1.0}}}
    values = {
        "folder": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {"train": "never read", "eval": str(tasks)},
        "evaluation": {"sets": sets},
        **sections,
    }
    return make_config(values, ())


def test_the_best_has_the_highest_mean_over_sets_and_is_the_earliest_of_equal_ones() -> None:
    results = [result("a", "x", 0.2), result("a", "y", 0.8), result("b", "x", 0.6), result("b", "y", 0.4)]
    assert "a" == best_model(results)
    found = summary(results)
    assert ("a", {"x": "b", "y": "a"}) == (found["best"], found["best_by_set"])
    assert all("key" not in each for each in found["results"])
    assert (None, "best: none") == (summary([])["best"], text_table([]).splitlines()[-1][:10])


def test_the_table_has_what_each_set_has() -> None:
    sampled = {"pass@1": 0.5, "pass@2": 0.75, "best@2": 0.75, "worst@2": 0.25, "maj@2": 0.5}
    rows = text_table([result("a", "x", 0.25), result("a", "y", 0.5, 2, **sampled)]).splitlines()
    columns = ["MODEL", "SET", "TASKS", "K", "FAILED", "MEAN@K", "MAJ@K", "BEST@K", "WORST@K", "PASS@1", "PASS@2"]
    assert columns == rows[0].split()
    assert ["a", "*", "x", "8", "1", "0.0%", "0.250", "-", "-", "-", "-", "-"] == rows[1].split()
    assert ["0.500", "0.500", "0.750", "0.250", "0.500", "0.750"] == rows[2].split()[6:]


def test_samples_are_parquet(tmp_path: Path) -> None:
    tags = {"task": "t:1", "rollout": 1, "ground_truth": "7", "response_tokens": 3, "agent/turns": 2.0}
    row: Any = {"prompt": "p", "response": "r", "response_ids": (), "response_mask": ()}
    failed = {"task": "t:2", "rollout": 0, "ground_truth": "8", "error": "late"}
    samples = [
        SampleRecord(key="k", reward=1.0, tags=tags, **row),
        SampleRecord(key="", reward=None, tags=failed, **row),
    ]
    write_samples(tmp_path / "s.parquet", MODEL, "hard", samples)
    first, second = pyarrow.parquet.read_table(tmp_path / "s.parquet").to_pylist()
    assert ("t:1", 1, 1.0, None, {"agent/turns": 2.0}) == (
        first["task"], first["rollout"], first["score"], first["error"], json.loads(first["metrics"])
    )  # fmt: skip
    assert ("hard", 4, None, "late") == (second["set"], second["step"], second["score"], second["error"])


def test_a_bench_shares_nothing_with_its_run(tmp_path: Path) -> None:
    run = config(
        tmp_path,
        transfer_queue={"name": "sql"},
        checkpoint_engine={"name": "file", "folder": str(tmp_path / "weights")},
        queue={"durable": True, "rewards": "distributed"},
        cluster={"metrics_port": 9000},
    )
    own = bench_config(run, discover(), tmp_path / "out", (), MODEL)
    assert (str(tmp_path / "out"), "auto", "auto") == (own.folder, own.transfer_queue.name, own.checkpoint_engine.name)
    assert (False, "train", None) == (own.queue.durable, own.queue.rewards, own.cluster.metrics_port)
    assert run.data.eval == own.data.train, "training data is not read"
    assert [] == [name for name, on in attrs.asdict(own.observe).items() if on is True]


def test_sets_and_models_are_chosen_by_name(tmp_path: Path) -> None:
    run = config(tmp_path)
    only = bench_config(run, discover(), tmp_path / "out", ("hard",), MODEL)
    assert (None, ["hard"]) == (only.data.eval, list(only.evaluation.sets))
    other = Model(name="mine", folder=tmp_path / "mine", digest="d")
    assert str(tmp_path / "mine") == bench_config(run, discover(), tmp_path, (), other).model.path
    with pytest.raises(JackfieldError) as caught:
        bench_config(run, discover(), tmp_path, ("hrad",), MODEL)
    assert ("config.invalid-value", "hrad") == (caught.value.code, caught.value.found)


@pytest.mark.parametrize(
    ("found", "code"), [("config.json", None), ("adapter_config.json", "engine.model"), ("other", "engine.model")]
)
def test_a_folder_without_a_whole_model_is_refused(tmp_path: Path, found: str, code: str | None) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / found).write_text("{}")
    if code is None:
        assert ["there"] == [each.name for each in choose_models(config(tmp_path), tmp_path / "there")]
        return
    with pytest.raises(JackfieldError) as caught:
        choose_models(config(tmp_path), tmp_path / "there")
    assert code == caught.value.code


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({}, False),
        ({"schedule": {"steps": 3}, "optimizer": {"lr": 0.5}}, False),
        ({"seed": 9}, True),
        ({"reward": {"name": "rules", "ignore_case": True}}, True),
        ({"cluster": {"max_model_len": 77}}, True),
    ],
)
def test_a_result_holds_as_long_as_what_determines_it(tmp_path: Path, change: dict[str, Any], again: bool) -> None:
    def work(**sections: Any) -> Work:
        own = bench_config(config(tmp_path, **sections), discover(), tmp_path / "out", ("hard",), MODEL)
        return Work(config=own, models=[MODEL], say=print)

    first = work()
    file = first._file(MODEL, "hard")
    replace_file(file, seal(json.dumps({"key": first._key(MODEL, "hard")})))
    assert again == (None in work(**change).results().values())
    file.write_bytes(file.read_bytes()[:-4])
    assert [None] == list(work().results().values()), "a damaged result is none"
