"""The base of the observers, and those that append to files: metrics, samples, TensorBoard events, timeline."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
from attrs.validators import ge, gt

from jackfield.clock import Clock
from jackfield.errors import PluginError, RunError
from jackfield.files import AppendFile, cut_after, encode_line, plain_number, read_lines, replace_file
from jackfield.plugins import hooks
from jackfield.settings import option

if TYPE_CHECKING:
    from rich.console import Console


@attrs.frozen(kw_only=True)
class ObserveSettings:
    """Settings of what a run writes and shows."""

    metrics_file: bool = option(True, "write metrics.jsonl")
    report_to: tuple[str, ...] = option(
        ("tensorboard",),
        "trackers: tensorboard (event files in tensorboard/); wandb, trackio, mlflow (jackfield-trackers); or others'",
    )
    trackers: Mapping[str, Mapping[str, Any]] = option(factory=dict, help="settings of trackers, by their names")
    tracker_deadline: float = option(60.0, "seconds for a call of a tracker, which then gets no more", gt(0))
    hooks: tuple[str, ...] = option(
        (), "your classes that listen to the run, file.py:Class or package.module:Class; their methods are hooks"
    )
    sample_table: bool = option(True, "write samples/train.jsonl, samples/eval.jsonl and samples/failed.jsonl")
    timeline: bool = option(True, "write trace.json, which Perfetto opens")
    curve: bool = option(True, "draw learning_curve.png at the end")
    progress: bool = option(True, "show progress: a bar on a terminal, text lines elsewhere")
    samples_per_step: int = option(8, "maximum samples in the sample table per step", ge(0))
    samples_per_evaluation: int = option(32, "maximum samples in the sample table per evaluation", ge(0))
    progress_interval: float = option(1.0, "seconds between progress lines without a terminal; 0: every step", ge(0))
    on_error: Literal["stop", "warn"] = option("stop", "an observer that fails stops the run, or is left out (warn)")


@hooks.hookimpl
def _receive(self: Observer, event: hooks.Event) -> None:
    """Pass an event to an observer; if it fails, it is named and stops listening.

    At the end of the run a failure is only reported, so that it does not hide an error of the run.
    """
    if self._failed:
        return
    ends = isinstance(event, hooks.RunEnded)
    try:
        self.hear(event)
        if ends:
            self.close()
    except Exception as error:
        self._failed = True
        what, found = f"the observer '{self.name}' failed in {event.hook}", f"{type(error).__name__}: {error}"
        fix = "look at the disk and the folder's permissions, or set observe.on_error=warn to run without it"
        failure = RunError(what, where=str(self.path), found=found, fix=fix)
        try:
            self.close()
        except Exception as second:  # the first failure is reported
            failure.add_note(f"and closing it failed: {second}")
        if self.settings.on_error != "warn" and not ends:
            raise failure from error
        self.report(str(failure))


@attrs.define(eq=False, slots=False)
class Observer:
    """The base class of observers."""

    name: ClassVar[str]  #: the setting that turns it on, which error messages name
    output: ClassVar[str] = ""  #: file or folder that it writes, relative to the run's folder
    settings: ObserveSettings
    folder: Path  #: the run's folder; an observer creates it when the run starts
    console: Console  #: for progress, and for messages such as a failure of this observer
    clock: Clock  #: the run's clock
    _files: dict[Path, AppendFile] = attrs.field(factory=dict, init=False)
    _origin: float = attrs.field(default=0.0, init=False)
    _failed: bool = attrs.field(default=False, init=False)

    @property
    def path(self) -> Path:
        """Return the file or folder that this observer writes."""
        return self.folder / self.output

    run_started = run_ended = stage_ended = step_ended = evaluation_ended = rewards_pending = _receive
    samples_recorded = samples_failed = weights_synced = _receive

    def hear(self, event: object) -> None:
        """Write or show an event of :mod:`jackfield.plugins.hooks`, if it concerns this observer."""
        raise NotImplementedError

    def report(self, text: str) -> None:
        """Print a message to the user."""
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Close files and release the screen. It may be called more than once."""
        while self._files:
            self._files.popitem()[1].close()

    def append(self, data: bytes, path: Path | None = None, tail: bytes = b"") -> None:
        """Append to a file, which is first opened or created, or to the file that is already open."""
        path = path or next(iter(self._files))
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = AppendFile(path, tail)
        self._files[path].append(data)

    def go_on(self, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Start :meth:`seconds`, after those of the lines of an earlier process."""
        self._origin = self.clock.time() - max((float(line.get("time", 0)) for line in earlier), default=0.0)

    def seconds(self) -> float:
        """Return the seconds of work since the start of the run, summed over its processes."""
        return self.clock.time() - self._origin


def missing_package(package: str, user: str, where: str | None = None, instead: str = "") -> PluginError:
    """Return the error for a package that is not installed and that ``user`` needs."""
    expected, fix = f"the package {package}, which {user} needs", f"install jackfield[train]{instead}"
    return PluginError(f"{package} is not installed", where=where, expected=expected, fix=fix)


def metrics_of(event: object) -> tuple[str, int, dict[str, float | int]] | None:
    """Return kind (``step``, ``evaluation``, ``weights``), step and metrics of an event, as plain numbers.

    A weight sync has its duration and the longest pause of a replica in seconds, and the bytes sent.
    """
    if isinstance(event, hooks.WeightsSynced):
        paused = max((receipt.paused_seconds for receipt in event.receipts), default=0.0)
        sizes = {"replicas": len(event.receipts), "sent_bytes": event.sent_bytes}
        return "weights", event.version, {"seconds": event.seconds, "paused_seconds": paused, **sizes}
    if not isinstance(event, hooks.StepEnded | hooks.EvaluationEnded):
        return None
    kind = "step" if isinstance(event, hooks.StepEnded) else "evaluation"
    return kind, event.step, {name: plain_number(value) for name, value in event.metrics.items()}


_RESERVED = frozenset({"kind", "not_finite", "step", "time"})


class MetricsFile(Observer):
    """Writes ``metrics.jsonl`` with ``kind``, ``step``, ``time`` and metrics of each step, evaluation and weight sync.

    Each line is in the file when the hook returns. A resumed run first drops the lines of steps after the restored one.
    """

    name = "metrics_file"
    output = "metrics.jsonl"

    def hear(self, event: object) -> None:
        """Write a line, if the event has metrics."""
        if isinstance(event, hooks.RunStarted):
            cut_after(self.path, event.first_step)
            self.go_on(read_lines(self.path))
            self.append(b"", self.path)
        if found := metrics_of(event):
            kind, step, metrics = found
            named = {f"metric/{name}" if name in _RESERVED else name: value for name, value in metrics.items()}
            self.append(encode_line({"kind": kind, "step": step, "time": round(self.seconds(), 6), **named}))


class TensorBoardFiles(Observer):
    """Writes scalars ``train/NAME``, ``evaluation/NAME`` and ``weights/seconds``.

    Each start opens another file, whose first event makes TensorBoard drop the steps after the restored one, or all
    steps if the run starts from the beginning. Neither torch nor TensorFlow is imported.
    """

    name = "tensorboard"
    output = "tensorboard"

    def hear(self, event: object) -> None:
        """Open a new event file at the start, and write metrics as scalars."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if isinstance(event, hooks.RunStarted):
            earlier = list(self.path.glob("events.out.tfevents.*"))
            # TensorBoard reads the files of a folder in the order of their names, so a new one needs a later second
            second = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in earlier)])
            self.append(b"", self.path / f"events.out.tfevents.{second:010d}.{socket.gethostname()}")
            self._write(file_version="brain.Event:2")
            if earlier:
                purge_step = event.first_step + 1 if event.first_step > 0 else 0
                self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        if found := metrics_of(event):
            kind, step, metrics = found
            values = {"seconds": metrics["seconds"]} if kind == "weights" else metrics
            group = "train" if kind == "step" else kind
            scalars = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in values.items()]
            self._write(step=step, summary=Summary(value=scalars))

    def _write(self, **fields: Any) -> None:
        """Write one event with one append, because TensorBoard's thread would hide failures."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.append(record.getvalue())


class SampleTables(Observer):
    """Writes ``samples/PARTITION.jsonl`` (train, eval) and ``samples/failed.jsonl``.

    A sample has ``step``, the fields of a ``SampleRecord``, and ``mask_text`` (the mask in words); a failed one has
    ``step``, ``key`` and ``reason``.
    """

    name = "sample_table"
    output = "samples"

    def hear(self, event: object) -> None:
        """Write samples and failures."""
        match event:
            case hooks.RunStarted():
                self.path.mkdir(parents=True, exist_ok=True)
                for path in sorted(self.path.glob("*.jsonl")):
                    cut_after(path, event.first_step)
            case hooks.SamplesRecorded(step=step, partition=table):
                self._write(table, [row_of(step, sample) for sample in event.samples])
            case hooks.SamplesFailed(step=step):
                rows = [{"step": step, "key": key, "reason": reason} for key, reason in event.reasons.items()]
                self._write("failed", rows)

    def _write(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            path = self.path / (re.sub(r"[^\w-]+", "_", table) + ".jsonl")
            self.append(b"".join(map(encode_line, rows)), path)


def read_samples(path: Path, step: int | None = None) -> list[dict[str, Any]]:
    """Read the samples of a sample table, all or those of a step; -1 is the last one. A missing file has none."""
    rows = list(read_lines(path))
    if step == -1:
        step = max((row["step"] for row in rows), default=None)
    return [row for row in rows if step is None or row["step"] == step]


def render_samples(
    samples: Sequence[Mapping[str, Any] | hooks.SampleRecord], console: Console, title: str = ""
) -> None:
    """Print samples of :func:`read_samples` or of an event as a table: key, prompt, response, reward and mask."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=SIMPLE_HEAD, show_lines=True, expand=True)
    table.add_column("key", ratio=2, min_width=12, overflow="fold")
    table.add_column("prompt", ratio=6, overflow="fold")
    table.add_column("response", ratio=6, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("mask", ratio=2, min_width=12)
    for sample in samples:
        row = row_of(0, sample) if isinstance(sample, hooks.SampleRecord) else sample
        reward = row.get("reward")
        shown = "-" if reward is None else f"{reward:.3g}"
        cells = (row["key"], row["prompt"], row["response"], shown, row.get("mask_text", ""))
        table.add_row(*(Text(cell.rstrip("\n")) for cell in cells))
    console.print(table)


def row_of(step: int, sample: hooks.SampleRecord) -> dict[str, Any]:
    """Return a sample's entry; its mask in words is ``12 model, 5 inserted, 7 model``."""
    runs = [(len(list(run)), "model" if bit else "inserted") for bit, run in itertools.groupby(sample.response_mask)]
    mask_text = ", ".join(f"{length} {kind}" for length, kind in runs)
    return {"step": step, **attrs.asdict(sample, recurse=False), "mask_text": mask_text}


_TAIL = b"\n]\n"
_ORDER = ("explorer", "reward", "trainer", "weights")  # lanes from top to bottom; others follow
_SLACK = 1.0  # microseconds by which consecutive stages may overlap, because of rounding


@attrs.define(eq=False, slots=False)
class Timeline(Observer):
    """Writes ``trace.json`` in the Chrome trace event format, with times in microseconds.

    There is a lane for each ``StageEnded.lane``. The file is valid JSON after every event, even if the run is killed.
    Stages of a lane that overlap (two batches in flight) get a second lane, ``explorer (2)``, because the format cannot
    draw them otherwise. ``StageEnded.step`` counts from 0, as batches do. A run resumed after ``n`` completed steps
    keeps all up to the trainer's last stage of a step below ``n``, which ends with that checkpoint.
    """

    name = "timeline"
    output = "trace.json"

    _tracks: dict[str, float] = attrs.field(factory=dict, init=False)  #: the end of the last stage by a track's name

    def hear(self, event: object) -> None:
        """Write a stage. The trace of a resumed run continues where the last kept stage ended."""
        if isinstance(event, hooks.RunStarted):
            self._tracks.clear()
            kept: list[dict[str, Any]] = []
            with contextlib.suppress(FileNotFoundError, ValueError):  # it is missing or damaged
                kept = [each for each in json.loads(self.path.read_bytes()) if each.get("ph") == "X"]
            done = [each["cat"] in ("trainer", "weights") and each["args"]["step"] < event.first_step for each in kept]
            kept = kept[: max((number for number, is_done in enumerate(done, 1) if is_done), default=0)]
            self.go_on({"time": (stage["ts"] + stage["dur"]) / 1e6} for stage in kept)
            replace_file(self.path, b"[\n" + _metadata("process_name", 0, name=event.name) + _TAIL)
            self.append(b"", self.path, _TAIL)
            for stage in kept:
                self._append(stage)
        if isinstance(event, hooks.StageEnded) and self._files:
            start, seconds = event.start - self._origin, max(event.end - event.start, 0.0)
            times = {"ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3)}
            named = {"name": event.name, "cat": event.lane, "args": {"step": event.step}}
            self._append({**named, "ph": "X", **times, "pid": 1})

    def _append(self, stage: Mapping[str, Any]) -> None:
        """Write a stage to the first track of its lane that is free when it starts."""
        lane, start = stage["cat"], stage["ts"]
        names = (lane if count == 1 else f"{lane} ({count})" for count in itertools.count(1))
        name = next(name for name in names if self._tracks.get(name, -math.inf) <= start + _SLACK)
        if name not in self._tracks:
            position, track = _ORDER.index(lane) if lane in _ORDER else len(_ORDER), len(self._tracks) + 1
            self.append(b",\n" + _metadata("thread_name", track, name=name))
            self.append(b",\n" + _metadata("thread_sort_index", track, sort_index=position * 100 + track))
        self._tracks[name] = start + stage["dur"]
        self.append(b",\n" + encode_line({**stage, "tid": list(self._tracks).index(name) + 1}).rstrip())


def _metadata(kind: str, track: int, **arguments: Any) -> bytes:
    return encode_line({"name": kind, "ph": "M", "pid": 1, "tid": track, "args": arguments}).rstrip()
