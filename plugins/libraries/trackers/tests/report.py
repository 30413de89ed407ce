"""Reports a run of three steps to a tracker and resumes it; then prints what the tracker's own library reads back.

It runs in the environment of the trackers: ``python report.py NAME FOLDER``.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from jackfield.compose.parts import register_installed
from jackfield.observe import ObserveSettings, observers
from jackfield.observe.trackers import check_trackers
from jackfield.plugins.hooks import (
    EvaluationEnded,
    HookManager,
    RunEnded,
    RunStarted,
    SampleRecord,
    SamplesRecorded,
    StepEnded,
)

SETTINGS: dict[str, Any] = {"wandb": {"mode": "offline"}, "trackio": {}, "mlflow": {}}


def report(name: str, folder: Path, first_step: int, steps: range, error: Exception | None) -> None:
    """Send the events of a run."""
    off = {"metrics_file": False, "sample_table": False, "timeline": False, "progress": False}
    settings = ObserveSettings(report_to=(name,), trackers={name: SETTINGS[name]}, curve=True, **off)
    check_trackers(settings)
    screen = io.StringIO()
    emit = HookManager(observers(settings, folder, Console(file=screen))).emit
    config = {"model": {"path": "tiny"}, "optimizer": {"lr": 0.5}}
    emit(RunStarted(name="demo", folder=str(folder), total_steps=3, first_step=first_step, config=config))
    sample = SampleRecord(key="a", prompt="2+2", response="4", reward=1.0, response_ids=(1,), response_mask=(1,))
    for step in steps:
        emit(StepEnded(step=step, metrics={"reward/mean": step / 4}))
        emit(SamplesRecorded(step=step, partition="train", samples=(sample,)))
    emit(EvaluationEnded(step=steps[-1], metrics={"score": 0.5}))
    emit(RunEnded(folder=str(folder), steps=steps[-1], error=error))
    assert screen.getvalue() == "", screen.getvalue()


def records(data: bytes) -> Iterator[bytes]:
    """Read wandb's file: a header of 7 bytes, and blocks of 32 KiB of fragments: CRC, length, kind, content."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # a header is not split
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last fragment
            yield parts
            parts = b""


def read_wandb(folder: Path, _: str) -> dict[str, Any]:
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits for wandb's own process, which writes the end of the file after the run has finished
    points, ids, config, tables, codes = [], set(), {}, 0, []
    for file in sorted(folder.glob("trackers/wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "exit":
                codes.append(record.exit.exit_code)
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            if "train/reward/mean" in items:
                points.append([items["step"], items["train/reward/mean"]])
            tables += any(name.startswith("samples/train") for name in items)
    return {"ids": len(ids), "points": points, "lr": config["optimizer"]["lr"], "tables": tables, "ends": codes}


def read_trackio(folder: Path, id: str) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("jackfield", id)
    points = [[one["step"], one["train/reward/mean"]] for one in logs if "train/reward/mean" in one]
    config = SQLiteStorage.get_run_config("jackfield", id)
    tables = sum("samples/train" in one for one in logs)
    runs = SQLiteStorage.get_runs("jackfield")
    return {"ids": len(runs), "points": points, "lr": config["optimizer"]["lr"], "tables": tables, "ends": []}


def read_mlflow(folder: Path, id: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'trackers' / 'mlflow.db'}")
    points = [[one.step, one.value] for one in client.get_metric_history(id, "train/reward/mean")]
    run = client.get_run(id)
    tables = len(client.list_artifacts(id, "samples/train"))
    ids = len(client.search_runs(["1"]))
    lr = float(run.data.params["optimizer.lr"])
    return {"ids": ids, "points": points, "lr": lr, "tables": tables, "ends": [run.info.status]}


if __name__ == "__main__":
    name, place = sys.argv[1], Path(sys.argv[2])
    register_installed()
    report(name, place, 0, range(1, 3), None)
    report(name, place, 1, range(2, 4), ValueError("out of memory"))
    kept = json.loads((place / "trackers" / f"{name}.json").read_text(encoding="utf-8"))
    assert kept.keys() == {"id"}, kept
    found = {"wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}[name](place, kept["id"])
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # clients may have threads and processes of their own
