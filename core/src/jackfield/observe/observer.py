"""The base of the observers: settings, clock, files, JSON lines and error handling."""

from __future__ import annotations

import json
import logging
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
from attrs.validators import ge

from jackfield.clock import Clock
from jackfield.errors import PluginError, RunError
from jackfield.files import AppendFile, replacing
from jackfield.plugins.hooks import EvaluationEnded, Event, RunEnded, StepEnded, WeightsSynced, hookimpl
from jackfield.settings import option

if TYPE_CHECKING:
    from rich.console import Console

# JSON allows these characters inside a string, but some readers end a line at them.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


@attrs.frozen(kw_only=True)
class ObserveSettings:
    """Settings of what a run writes and shows."""

    metrics_file: bool = option(True, "write metrics.jsonl")
    tensorboard: bool = option(True, "write TensorBoard event files to tensorboard/")
    sample_table: bool = option(True, "write samples/train.jsonl, samples/eval.jsonl and samples/failed.jsonl")
    timeline: bool = option(True, "write trace.json, which Perfetto opens")
    curve: bool = option(True, "draw learning_curve.png at the end")
    progress: bool = option(True, "show progress: a bar on a terminal, text lines elsewhere")
    samples_per_step: int = option(8, "maximum samples in the sample table per step", ge(0))
    samples_per_evaluation: int = option(32, "maximum samples in the sample table per evaluation", ge(0))
    progress_interval: float = option(
        1.0, "minimum seconds between progress lines without a terminal; 0: every step", ge(0)
    )
    on_error: Literal["stop", "warn"] = option(
        "stop", "if an observer fails: stop the run, or warn and continue without it"
    )


@hookimpl
def _receive(self: Observer, event: Event) -> None:
    """Pass an event to an observer; if it fails, it is named and stops listening.

    At the end of the run a failure is only reported, so that it does not hide an error of the run.
    """
    if self._failed:
        return
    ends = isinstance(event, RunEnded)
    try:
        self.hear(event)
        if ends:
            self.close()
    except Exception as error:
        self._failed = True
        failure = RunError(
            f"the observer '{self.name}' failed in {event.hook}",
            where=str(self.path),
            found=f"{type(error).__name__}: {error}",
            fix="look at the disk and the folder's permissions, or set observe.on_error=warn to run without it",
        )
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

    name: ClassVar[str] = "observer"  #: name in its error messages
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

    run_started = run_ended = stage_ended = step_ended = evaluation_ended = _receive
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

    def open_file(self, path: Path, tail: bytes = b"") -> None:
        """Open a file to append to, and create its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._files[path] = AppendFile(path, tail)

    def append(self, data: bytes) -> None:
        """Append to the open file."""
        if not self._files:
            raise RuntimeError("an event came before run_started")
        next(iter(self._files.values())).append(data)

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
    if isinstance(event, WeightsSynced):
        paused = max((receipt.paused_seconds for receipt in event.receipts), default=0.0)
        sizes = {"replicas": len(event.receipts), "sent_bytes": event.sent_bytes}
        return "weights", event.version, {"seconds": event.seconds, "paused_seconds": paused, **sizes}
    if not isinstance(event, StepEnded | EvaluationEnded):
        return None
    kind = "step" if isinstance(event, StepEnded) else "evaluation"
    return kind, event.step, {name: _number(value) for name, value in event.metrics.items()}


def _number(value: Any) -> float | int:
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def encode(line: Mapping[str, Any]) -> bytes:
    """Encode one line of strict JSON in UTF-8.

    A number that is not finite becomes null, and its path is added to the list ``not_finite``. Other types become text.
    """
    not_finite: list[str] = []
    plain = _strict(line, not_finite) | ({"not_finite": not_finite} if not_finite else {})
    text = json.dumps(plain, ensure_ascii=False).translate(_LINE_ENDS)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def _strict(value: Any, not_finite: list[str], path: str = "") -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        if math.isfinite(value):
            return _number(value)
        not_finite.append(path)
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item, not_finite, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item, not_finite, f"{path}[{index}]") for index, item in enumerate(value)]
    return str(value)


def read_lines(path: Path, last_step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file up to ``last_step``.

    A missing file yields nothing. Incomplete lines, from a kill or another program, are skipped.
    """
    if path.exists():
        with path.open("rb") as file:
            for line in map(_line, file):
                if line is not None and (last_step is None or line.get("step", 0) <= last_step):
                    yield line


def _line(raw: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is not a JSON object."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def cut_after(path: Path, last_step: int) -> None:
    """Atomically drop the lines after ``last_step``, and incomplete ones, from a file.

    A run that starts at step 0 has restored nothing and keeps nothing. A warning counts complete lines that are not
    JSON objects, because a kill does not produce these.
    """
    if last_step <= 0:
        path.unlink(missing_ok=True)
    elif path.exists():
        damaged = 0
        with replacing(path) as partial, path.open("rb") as old, partial.open("wb") as new:
            for raw in old:
                line = _line(raw)
                damaged += line is None and raw.endswith(b"\n")
                if line is not None and line.get("step", 0) <= last_step:
                    new.write(raw.rstrip(b"\n") + b"\n")
        if damaged:
            logging.getLogger("jackfield").warning("%s: %d damaged lines are left out", path, damaged)
