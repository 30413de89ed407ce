"""Trackers of ``observe.report_to``: each is called from a thread of its own, so that it cannot stop the training."""

from __future__ import annotations

import importlib.util
import json
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.tracker import TrackedRun, Tracker
from jackfield.algorithms.registry import names, part
from jackfield.errors import ConfigError, PluginError, did_you_mean
from jackfield.files import replace_file
from jackfield.observe.observer import Observer, ObserveSettings, metrics_of, row_of
from jackfield.plugins import hooks

TENSORBOARD = "tensorboard"  #: the one that is built in: an observer that writes files


def make_tracker(settings: ObserveSettings, name: str) -> Tracker:
    """Make a tracker with its settings; refuse a name, a setting or a missing package, which the error names."""
    where, known = "observe.report_to", (*names("tracker"), TENSORBOARD)
    if name not in known:
        what, expected = f"no tracker is named {name!r}{did_you_mean(name, known)}", "one of " + ", ".join(known)
        fix = "pip install jackfield-trackers (wandb, trackio, mlflow), or the package that has it"
        raise ConfigError(what, where=where, expected=expected, found=name, fix=fix)
    chosen = part("tracker", name)
    made: Tracker = chosen.function(**chosen.checked(settings.trackers.get(name, {}), f"observe.trackers.{name}"))
    if made.package and importlib.util.find_spec(made.package) is None:
        fix, needed = f"pip install {made.package}", f"the package {made.package}, which the tracker {name} needs"
        raise PluginError(f"{made.package} is not installed", where=where, expected=needed, fix=fix)
    return made


def check_trackers(settings: ObserveSettings) -> None:
    """Refuse trackers that cannot be made, that are named twice, and settings of one that is not named."""
    named, found = settings.report_to, ", ".join(settings.report_to) or "none"
    for name in settings.trackers.keys() - {each for each in named if each != TENSORBOARD}:
        fix = "add it to observe.report_to, or drop the settings"
        raise ConfigError("a tracker's settings have no effect", where=f"observe.trackers.{name}", found=found, fix=fix)
    if len(set(named)) < len(named):
        raise ConfigError("a tracker is named twice", where="observe.report_to", found=found)
    for name in named:
        if name != TENSORBOARD:
            make_tracker(settings, name)


@attrs.define(eq=False, slots=False)
class TrackerThread(Observer):
    """Passes the events of a run to a tracker, in their order, from a thread that ends with the process.

    ``trackers/NAME.json`` has the id of its run and, if it failed, the error and the number of ``lost`` events. Nothing
    is passed on after a failure, of which one warning tells.
    """

    who: str = ""
    _calls: queue.SimpleQueue[Callable[[Tracker], Any] | None] = attrs.field(factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)
    _since: float | None = attrs.field(default=None, init=False)  #: when the call that is now made began
    _error: str | None = attrs.field(default=None, init=False)
    _state: dict[str, Any] = attrs.field(factory=dict, init=False)  #: of the file
    _heard: int = attrs.field(default=0, init=False)  #: calls that were asked for
    _made: int = attrs.field(default=0, init=False)  #: and those that have ended

    name = "report_to"
    output = "trackers"

    def hear(self, event: object) -> None:
        """Start the tracker with the run, pass on metrics and samples, and end it with the run."""
        match event:
            case hooks.RunStarted():
                self._begin(event)
            case hooks.SamplesRecorded(step=step, partition=partition):
                rows = [row_of(step, sample) for sample in event.samples]
                self._put(lambda tracker: tracker.samples(step, partition, rows))
            case hooks.RunEnded(error=error):
                curve = self.folder / "learning_curve.png"
                text = None if error is None else str(error)
                self._put(lambda tracker: tracker.end(text, curve if curve.exists() else None))
                self._end()
            case _ if found := metrics_of(event):
                kind, step, values = found
                self._put(lambda tracker: tracker.metrics(kind, step, values))  # type: ignore[arg-type]

    def _begin(self, event: hooks.RunStarted) -> None:
        kept: dict[str, Any] = {}
        if event.first_step and self._file.exists():
            kept = json.loads(self._file.read_text(encoding="utf-8"))
        fields: Any = {name: getattr(event, name) for name in ("name", "config", "total_steps", "first_step")}
        run, tracker = (
            TrackedRun(folder=self.folder, id=kept.get("id"), **fields),
            make_tracker(self.settings, self.who),
        )
        self._state, self._error, self._calls = {"id": run.id}, None, queue.SimpleQueue()
        self._heard = self._made = 0
        self._put(partial(self._started, run))
        work = partial(self._work, tracker, self._calls)
        self._thread = threading.Thread(target=work, name=f"tracker {self.who}", daemon=True)
        self._thread.start()

    @property
    def _file(self) -> Path:
        return self.path / f"{self.who}.json"

    def _started(self, run: TrackedRun, tracker: Tracker) -> None:
        self._state["id"] = tracker.start(run)
        self._keep()

    def _keep(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, json.dumps(self._state) + "\n")

    def _put(self, call: Callable[[Tracker], Any]) -> None:
        """Hand a call to the thread, unless the tracker has failed, or its current call is overdue."""
        self._heard += 1
        self._notice(self._since)
        if self._error is None:
            self._calls.put(call)

    def _notice(self, since: float | None) -> None:
        seconds = self.settings.tracker_deadline
        if self._error is None and since is not None and self.clock.time() - since > seconds:
            self._error = f"it did not answer in {seconds:g} s (observe.tracker_deadline)"
        if self._error is not None and "error" not in self._state:
            self._state["error"] = self._error
            self.report(f"the tracker '{self.who}' failed, and the run goes on without it: {self._error}")

    def _end(self) -> None:
        self._calls.put(None)
        if self._thread is not None and self._error is None:
            self._thread.join(self.settings.tracker_deadline)
            if self._thread.is_alive():
                self._error = f"it did not end in {self.settings.tracker_deadline:g} s (observe.tracker_deadline)"
        self._notice(None)
        if self._error is not None:
            self._state["lost"] = self._heard - self._made
            self._keep()

    def _work(self, tracker: Tracker, calls: queue.SimpleQueue[Callable[[Tracker], Any] | None]) -> None:
        while self._error is None and (call := calls.get()) is not None:
            self._since = self.clock.time()
            try:
                call(tracker)
                self._made += 1
            except (Exception, SystemExit) as error:  # a client may do anything, including sys.exit()
                self._error = f"{type(error).__name__}: {error}"
            finally:
                self._since = None
