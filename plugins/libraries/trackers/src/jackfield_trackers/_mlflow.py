"""The tracker of MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from jackfield.abc.tracker import TrackedRun, Tracker
from jackfield.sdk import option
from jackfield_trackers._values import COLUMNS, cells, named

_LONGEST = 6000  #: characters of a parameter's value
_AT_ONCE = 100  #: parameters of one call


@attrs.define(kw_only=True)
class MlflowTracker(Tracker):
    """Reports to an MLflow server or database. The configuration becomes parameters, samples and curve artifacts."""

    package: ClassVar[str] = "mlflow"
    experiment: str = option("jackfield", "the experiment")
    uri: str | None = option(None, "server or database; null: MLFLOW_TRACKING_URI, or a database in the run's folder")
    samples_as_tables: bool = option(True, "report the sample table, too")
    _client: Any = attrs.field(default=None, init=False)
    _id: str = attrs.field(default="", init=False)

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue one by its id."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder, uri = run.folder.absolute() / "trackers", self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if run.id is not None:
            self._id = run.id
            self._client.set_terminated(run.id, "RUNNING")
            return run.id
        found = self._client.get_experiment_by_name(self.experiment)
        place = None if uri else (folder / "mlflow").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment, place)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(name, str(value)[:_LONGEST]) for name, value in _flat(run.config)]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + _AT_ONCE])
        return self._id

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Report numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, step) for name, value in named(kind, values).items()]
        )

    def samples(self, step: int, partition: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write an artifact ``samples/PARTITION/STEP.json``, which MLflow shows as a table."""
        if self.samples_as_tables:
            table = {"columns": list(COLUMNS), "data": cells(rows)}
            self._client.log_dict(self._id, table, f"samples/{partition}/{step:06d}.json")

    def end(self, error: str | None, curve: Path | None) -> None:
        """Add the curve, and mark the run as finished or failed."""
        if curve is not None:
            self._client.log_artifact(self._id, str(curve))
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


def _flat(values: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        inner = f"{path}{name}"
        found += _flat(value, f"{inner}.") if isinstance(value, Mapping) and value else [(inner, value)]
    return found
