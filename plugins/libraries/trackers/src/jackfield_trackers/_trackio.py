"""The tracker of Trackio."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import attrs

from jackfield.abc.tracker import TrackedRun, Tracker
from jackfield.sdk import option
from jackfield_trackers._values import COLUMNS, cells, named


@attrs.define(kw_only=True)
class TrackioTracker(Tracker):
    """Reports to a Trackio project in the folder of ``TRACKIO_DIR``, or in a Space."""

    package: ClassVar[str] = "trackio"
    project: str = option("jackfield", "the project")
    space_id: str | None = option(None, "a Space of the Hugging Face Hub; null: files on this machine")
    samples_as_tables: bool = option(True, "report the sample table, too")
    _run: Any = attrs.field(default=None, init=False)

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue one by its name, which is its id here."""
        import trackio

        with suppress(ImportError):  # trackio drops metrics while another thread imports matplotlib, as for the curve
            import matplotlib.figure  # noqa: F401
        name = run.id or f"{run.name}-{uuid.uuid4().hex[:8]}"
        off: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(
            project=self.project, name=name, space_id=self.space_id, config=dict(run.config), resume="allow", **off
        )
        return name

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Report numbers of a step."""
        self._run.log(named(kind, values), step=step)

    def samples(self, step: int, partition: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Report a table ``samples/PARTITION``."""
        import trackio

        if self.samples_as_tables:
            table = trackio.Table(columns=list(COLUMNS), data=cells(rows))
            self._run.log({f"samples/{partition}": table}, step=step)

    def end(self, error: str | None, curve: Path | None) -> None:
        """Report the curve, and wait until everything is written."""
        import trackio

        if curve is not None:
            self._run.log({"learning_curve": trackio.Image(str(curve))})
        self._run.finish()
