"""TensorBoard event files, written without torch and without TensorFlow."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Mapping
from typing import Any

from jackfield.files import AppendFile
from jackfield.observe._files import number
from jackfield.observe._listener import Listener, listens, unstarted
from jackfield.plugins.hooks import EvaluationEnded, RunEnded, RunStarted, StepEnded, WeightsSynced

__all__ = ["TensorBoardFiles"]


class TensorBoardFiles(Listener):
    """Writes scalars to ``tensorboard/``: ``train/NAME``, ``evaluation/NAME`` and ``weights/sync_seconds``.

    A run that goes on opens a further file, whose first event makes TensorBoard forget the steps after the restored
    one; a run that begins anew makes it forget everything.
    """

    name = "TensorBoard"
    output = "tensorboard"
    _file: AppendFile | None = None

    @listens()
    def run_started(self, event: RunStarted) -> None:
        """Open a new event file."""
        from tensorboard.compat.proto import event_pb2

        folder = self._folder / self.output
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        # TensorBoard reads the files of a folder in the order of their names, so a later one needs a later second.
        second = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in earlier)])
        self._file = AppendFile(folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}")
        self._append(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if earlier:
            purge_step = event.first_step + 1 if event.first_step > 0 else 0
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(event_pb2.Event(wall_time=time.time(), step=purge_step, session_log=start))

    @listens()
    def step_ended(self, event: StepEnded) -> None:
        """Write a step's metrics."""
        self._write("train", event.step, event.metrics)

    @listens()
    def evaluation_ended(self, event: EvaluationEnded) -> None:
        """Write an evaluation's metrics."""
        self._write("evaluation", event.step, event.metrics)

    @listens()
    def weights_synced(self, event: WeightsSynced) -> None:
        """Write how long a synchronisation took, in seconds."""
        self._write("weights", event.version, {"sync_seconds": event.seconds})

    @listens()
    def run_ended(self, event: RunEnded) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        values = [
            summary_pb2.Summary.Value(tag=f"{group}/{name}", simple_value=float(number(value)))
            for name, value in metrics.items()
        ]
        self._append(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))

    def _append(self, event: Any) -> None:
        """One record in one write; TensorBoard's own writer leaves that to a thread, which would fail unseen."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            raise unstarted("an event")
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
