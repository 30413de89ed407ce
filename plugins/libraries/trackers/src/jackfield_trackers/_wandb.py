"""The tracker of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs

from jackfield.abc.tracker import TrackedRun, Tracker
from jackfield.sdk import option
from jackfield_trackers._values import COLUMNS, cells, named


@attrs.define(kw_only=True)
class WandbTracker(Tracker):
    """Reports to Weights & Biases, or to files that ``wandb sync`` uploads later."""

    package: ClassVar[str] = "wandb"
    project: str = option("jackfield", "the project")
    entity: str | None = option(None, "the user or team; null: your default")
    mode: Literal["online", "offline"] | None = option(None, "null: what the variable WANDB_MODE says, or online")
    tags: tuple[str, ...] = option((), "tags of the run")
    samples_as_tables: bool = option(True, "report the sample table, too")
    _run: Any = attrs.field(default=None, init=False)

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue one by its id."""
        import wandb

        folder = run.folder / "trackers"
        folder.mkdir(parents=True, exist_ok=True)
        chosen: dict[str, Any] = {"project": self.project, "entity": self.entity, "mode": self.mode, "tags": self.tags}
        how = {"id": run.id, "resume": "allow"} if run.id else {}
        settings = wandb.Settings(console="off")  # the run's output is its own
        self._run = wandb.init(
            name=run.name, dir=str(folder), config=dict(run.config), settings=settings, **chosen, **how
        )
        self._run.define_metric("*", step_metric="step")  # wandb drops steps that do not grow, which a resumed run has
        return str(self._run.id)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Report numbers, with the step as their axis."""
        self._run.log({"step": step, **named(kind, values)})

    def samples(self, step: int, partition: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Report a table ``samples/PARTITION``."""
        import wandb

        if self.samples_as_tables:
            table = wandb.Table(columns=list(COLUMNS), data=cells(rows))
            self._run.log({"step": step, f"samples/{partition}": table})

    def end(self, error: str | None, curve: Path | None) -> None:
        """Upload the curve, and mark the run as finished or failed."""
        import wandb

        if curve is not None:
            self._run.log({"learning_curve": wandb.Image(str(curve))})
        self._run.finish(exit_code=0 if error is None else 1)
