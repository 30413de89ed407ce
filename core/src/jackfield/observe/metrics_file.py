"""Metrics as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.files import AppendFile
from jackfield.observe._files import cut_after, encode, number, read_lines, strict
from jackfield.observe._listener import Listener, listens, unstarted
from jackfield.plugins.hooks import EvaluationEnded, RunEnded, RunStarted, StepEnded, WeightsSynced

__all__ = ["MetricsFile"]

_RESERVED = frozenset({"kind", "not_finite", "step", "time"})


class MetricsFile(Listener):
    """Writes ``metrics.jsonl``: one object per step, evaluation and weight synchronisation.

    Each has ``kind``, ``step``, ``time`` (seconds of work since the run's start, resumed parts added up) and the
    metrics. A NaN or an infinity is ``null`` and its name is in the list ``not_finite``. Every line is in the file
    when the hook returns. A resumed run first cuts the lines of steps after the restored one.
    """

    name = "metrics file"
    output = "metrics.jsonl"
    _file: AppendFile | None = None
    _origin = 0.0

    @listens()
    def run_started(self, event: RunStarted) -> None:
        """Open the file, and cut what a resumed run does again."""
        path = self._folder / self.output
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_after(path, event.first_step)
        worked = max((float(line.get("time", 0)) for line in read_lines(path)), default=0.0)
        self._origin = self._clock.time() - worked
        self._file = AppendFile(path)

    @listens()
    def step_ended(self, event: StepEnded) -> None:
        """Write a step's metrics."""
        self._write("step", event.step, event.metrics)

    @listens()
    def evaluation_ended(self, event: EvaluationEnded) -> None:
        """Write an evaluation's metrics."""
        self._write("evaluation", event.step, event.metrics)

    @listens()
    def weights_synced(self, event: WeightsSynced) -> None:
        """Write how long a synchronisation took, of it the longest pause of a replica, in seconds, and bytes sent."""
        paused = max((receipt.paused_seconds for receipt in event.receipts), default=0.0)
        metrics = {
            "seconds": event.seconds,
            "paused_seconds": paused,
            "replicas": len(event.receipts),
            "sent_bytes": event.sent_bytes,
        }
        self._write("sync", event.version, metrics)

    @listens()
    def run_ended(self, event: RunEnded) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        if self._file is None:
            raise unstarted(kind)
        not_finite: list[str] = []
        line: dict[str, Any] = {"kind": kind, "step": step, "time": round(self._clock.time() - self._origin, 6)}
        for key, value in metrics.items():
            name = f"metric/{key}" if key in _RESERVED else key
            line[name] = strict(number(value), not_finite, name)
        if not_finite:
            line["not_finite"] = not_finite
        self._file.append(encode(line) + b"\n")
