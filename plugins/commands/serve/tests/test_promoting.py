"""What may be promoted, and what a server takes over from a run's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield.config import make_config
from jackfield.errors import RunError
from jackfield_serve.promoting import promote, read_promoted, serve_config, served_folder


def run_of(folder: Path, *lines: dict[str, object], finished: bool = True) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if finished:
        (folder / "finished.json").write_text("{}")
    return folder


def step(number: int) -> dict[str, object]:
    return {"kind": "step", "step": number}


def evaluation(number: int, score: float) -> dict[str, object]:
    return {"kind": "evaluation", "step": number, "score": score}


def test_versions_rise_with_each_promotion(tmp_path: Path) -> None:
    served = tmp_path / "served"
    assert read_promoted(served_folder(served)) is None
    with pytest.raises(RunError) as nowhere:
        promote(run_of(tmp_path / "run", step(4), evaluation(4, 0.5)), served, 0.5)
    assert ("run.not-promoted", str(served)) == (nowhere.value.code, nowhere.value.where)
    assert not served.exists()
    served.mkdir()
    for version, score in enumerate((0.5, 0.75), 1):
        run = run_of(tmp_path / f"run-{version}", step(4), evaluation(4, score))
        assert version == promote(run, served, 0.5).version
        found = read_promoted(served_folder(served))
        assert found is not None
        assert (version, str(run / "model"), score) == (found.version, found.model, found.score)


@pytest.mark.parametrize(
    ("lines", "finished", "found"),
    [
        ((step(4), evaluation(4, 0.9)), False, "no finished run"),
        ((step(4), evaluation(4, 0.4)), True, "score 0.4 after step 4"),
        ((step(4), evaluation(2, 0.9)), True, "no evaluation after step 4"),
        ((step(4), evaluation(4, float("nan"))), True, "score nan after step 4"),
    ],
)
def test_a_model_that_is_not_good_enough_is_not_promoted(
    tmp_path: Path, lines: tuple[dict[str, object], ...], finished: bool, found: str
) -> None:
    run, served = run_of(tmp_path / "run", *lines, finished=finished), tmp_path / "served"
    with pytest.raises(RunError) as caught:
        promote(run, served, 0.5)
    assert ("run.not-promoted", found) == (caught.value.code, caught.value.found)
    assert read_promoted(served_folder(served)) is None


def test_a_server_shares_no_folder_store_or_engine_with_its_run() -> None:
    run = make_config(
        {
            "model": {"path": "somewhere", "lora": {"rank": 4}},
            "folder": "runs/mine",
            "schedule": {"steps": 7, "sync_offset": 1},
            "transfer_queue": {"name": "sql"},
            "queue": {"durable": True},
            "cluster": {"offload": True, "replicas": 2},
        }
    )
    own = serve_config(run)
    assert ("explore", None, 2, False) == (own.mode, own.model.lora, own.cluster.replicas, own.cluster.offload)
    assert str(served_folder("runs/mine")) == own.folder != run.folder
    assert ("auto", False) == (own.transfer_queue.name, own.queue.durable)
