"""The timeline of a run in the Chrome trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from jackfield.files import replace_file
from jackfield.observe.metrics import encode
from jackfield.observe.observer import Observer, listens
from jackfield.plugins.hooks import RunStarted, StageEnded

_HEAD = b"[\n"
_TAIL = b"\n]\n"
_ORDER = ("explorer", "reward", "trainer", "weights")  # lanes from top to bottom; others follow
_REMEMBERED = 64  # earlier stages of a track against which a new one is checked
_SLACK = 1e-6  # seconds by which stages that follow each other may overlap on paper


class Timeline(Observer):
    """Writes ``trace.json``: one lane per ``StageEnded.lane``, times in microseconds since the run's start.

    The file is valid JSON after every event, so also when the run is killed. Stages of one lane that overlap without
    one holding the other (two batches in flight) get a second lane, ``explorer (2)``, as the format has no other
    way to draw them. ``StageEnded.step`` counts from 0 as tickets do. A run resumed after ``n`` completed steps keeps
    everything up to the trainer's last stage of a step below ``n``, which ends with the checkpoint of step ``n``.
    """

    name = "timeline"
    output = "trace.json"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._early: list[StageEnded] = []
        self._empty = True
        self._tracks: dict[str, int] = {}
        self._open: dict[str, list[tuple[float, float]]] = {}

    @listens()
    def run_started(self, event: RunStarted) -> None:
        """Open the file; a resumed run goes on where the last kept stage ended."""
        kept = _stages(self.path.read_bytes(), event.first_step) if event.first_step > 0 and self.path.exists() else []
        self.go_on({"time": (stage["ts"] + stage["dur"]) / 1e6} for stage in kept)
        replace_file(self.path, _HEAD + _TAIL)
        self.open_file(self.path, _TAIL)
        self._append(_metadata("process_name", 0, name=event.name))
        for stage in kept:
            track = self._track(stage["cat"], stage["ts"] / 1e6, (stage["ts"] + stage["dur"]) / 1e6)
            self._append({**stage, "tid": track})
        for early in self._early:
            self._stage(early)
        self._early.clear()

    @listens()
    def stage_ended(self, event: StageEnded) -> None:
        """Write a stage; those before the run's start (loading a model) wait for it."""
        if not self._files:
            self._early.append(event)
        else:
            self._stage(event)

    def _stage(self, event: StageEnded) -> None:
        start, end = event.start - self._origin, event.end - self._origin
        times = {"ts": round(start * 1e6, 3), "dur": round(max(end - start, 0.0) * 1e6, 3)}
        track = {"pid": 1, "tid": self._track(event.lane, start, end), "args": {"step": event.step}}
        self._append({"name": event.name, "cat": event.lane, "ph": "X", **times, **track})

    def _track(self, lane: str, start: float, end: float) -> int:
        """Find the first track of the lane in which the stage nests."""
        for count in range(1, len(self._tracks) + 2):
            name = lane if count == 1 else f"{lane} ({count})"
            stages = self._open.setdefault(name, [])
            outside = [stage for stage in stages if stage[0] < start - _SLACK]
            # Stages come in the order of their ends, so one that began earlier must have ended before this began.
            if not outside or max(ended for _, ended in outside) <= start + _SLACK:
                self._open[name] = [*outside[-_REMEMBERED:], (start, end)]
                return self._tracks[name] if name in self._tracks else self._new_track(lane, name)
        raise AssertionError("an unused track holds any stage")

    def _new_track(self, lane: str, name: str) -> int:
        track = self._tracks[name] = len(self._tracks) + 1
        position = _ORDER.index(lane) if lane in _ORDER else len(_ORDER)
        self._append(_metadata("thread_name", track, name=name))
        self._append(_metadata("thread_sort_index", track, sort_index=position * 100 + track))
        return track

    def _append(self, event: dict[str, Any]) -> None:
        self.append((b"" if self._empty else b",\n") + encode(event))
        self._empty = False


def _metadata(kind: str, track: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": track, "args": arguments}


def _stages(trace: bytes, completed: int) -> list[dict[str, Any]]:
    """Read the stages of an earlier trace up to the end of the completed steps; a torn file has none."""
    try:
        events = [event for event in json.loads(trace) if event.get("ph") == "X"]
    except ValueError:
        return []
    ends = [index for index, event in enumerate(events) if _completes(event, completed)]
    return events[: ends[-1] + 1] if ends else []


def _completes(event: dict[str, Any], completed: int) -> bool:
    return event["cat"] in ("trainer", "weights") and event["args"]["step"] < completed
