"""Observers of a run: metrics, TensorBoard, samples, timeline, curves and progress.

Observers are independent listeners on the lifecycle hooks of :mod:`jackfield.plugins.hooks`, and nothing depends on
them. ``docs/reference/run_folder.md`` describes the files.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.clock import Clock
from jackfield.observe import display, observer
from jackfield.observe.display import plot_learning_curve
from jackfield.observe.observer import ObserveSettings, missing_package, read_samples, render_samples
from jackfield.observe.trackers import TENSORBOARD, TrackerThread

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ObserveSettings", "observers", "plot_learning_curve", "read_samples", "render_samples"]


def observers(
    settings: ObserveSettings, folder: Path, console: Console | None = None, *, clock: Clock | None = None
) -> list[object]:
    """Make the observers of a run, to be registered with its hook manager in this order.

    The run's folder need not exist yet; nothing is written before ``run_started``. The console for progress and
    warnings is standard error by default. The clock is that of ``StageEnded``. An observer that fails raises a
    :class:`RunError` that names it (it only prints the error with ``on_error="warn"``, or at the run's end) and stops
    listening. A setting that needs a package that is not installed is refused (``plugin.requirement``).
    """
    from rich.console import Console as RichConsole

    made, console, clock = list[object](), console or RichConsole(stderr=True), clock or Clock()
    files = (observer.MetricsFile, observer.TensorBoardFiles, observer.SampleTables, observer.Timeline)
    for make in (*files, display.LearningCurve, display.ProgressDisplay):  # progress lists the others' files at the end
        wanted, where, without = getattr(settings, make.name, False), f"observe.{make.name}", "false"
        if make is observer.TensorBoardFiles:
            wanted, where, without = TENSORBOARD in settings.report_to, "observe.report_to", "[]"
        if wanted:
            package = {"tensorboard": "tensorboard", "curve": "matplotlib"}.get(make.name)
            if package is not None and importlib.util.find_spec(package) is None:
                raise missing_package(package, where, where, f", or set {where}={without}")
            made.append(make(settings, folder, console, clock))
    named = [name for name in settings.report_to if name != TENSORBOARD]
    made += [TrackerThread(settings, folder, console, clock, name) for name in named]  # after the curve is drawn
    return made
