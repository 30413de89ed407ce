"""TensorBoard event files, written without torch and without TensorFlow."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Mapping
from typing import Any

from jackfield.observe.metrics import number
from jackfield.observe.observer import MetricsObserver, listens
from jackfield.plugins.hooks import RunStarted


class TensorBoardFiles(MetricsObserver):
    """Writes scalars to ``tensorboard/``: ``train/NAME``, ``evaluation/NAME`` and ``weights/seconds``.

    A run that goes on opens a further file, whose first event makes TensorBoard forget the steps after the restored
    one; a run that starts from the beginning makes it forget everything.
    """

    name = "TensorBoard"
    output = "tensorboard"

    @listens()
    def run_started(self, event: RunStarted) -> None:
        """Open a new event file."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        earlier = list(self.path.glob("events.out.tfevents.*"))
        # TensorBoard reads the files of a folder in the order of their names, so a later one needs a later second.
        second = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in earlier)])
        self.open_file(self.path / f"events.out.tfevents.{second:010d}.{socket.gethostname()}")
        self._write(file_version="brain.Event:2")
        if earlier:
            purge_step = event.first_step + 1 if event.first_step > 0 else 0
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step as scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        group = "train" if kind == "step" else kind
        values = {"seconds": metrics["seconds"]} if kind == "weights" else metrics
        scalars = [Summary.Value(tag=f"{group}/{name}", simple_value=number(each)) for name, each in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def _write(self, **fields: Any) -> None:
        """Write one event in one append; TensorBoard's own writer leaves that to a thread, which would fail unseen."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.append(record.getvalue())
