"""Observers of a run: metrics, TensorBoard, samples, timeline, curves and progress.

Observers are independent listeners on the lifecycle hooks of :mod:`jackfield.plugins.hooks`, and nothing depends on
them. A run makes them with :func:`observers` and registers each with its plugin manager.
``docs/reference/run_folder.md`` describes the files.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.clock import Clock
from jackfield.errors import PluginError
from jackfield.observe.display import LearningCurve, ProgressDisplay, plot_learning_curve
from jackfield.observe.observer import Observer, ObserveSettings
from jackfield.observe.recorders import (
    MetricsFile,
    SampleTables,
    TensorBoardFiles,
    Timeline,
    read_samples,
    render_samples,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ObserveSettings", "observers", "plot_learning_curve", "read_samples", "render_samples"]


def observers(
    settings: ObserveSettings, folder: Path, console: Console | None = None, *, clock: Clock | None = None
) -> list[object]:
    """Make the observers of a run, to be registered with its plugin manager in any order.

    Args:
        settings: Selects the observers and configures them.
        folder: The run's folder, which need not exist yet. Nothing is written before ``run_started``.
        console: Console for progress and warnings; standard error by default.
        clock: The clock in which ``StageEnded`` gives times; real time by default.

    Returns:
        Objects with methods marked ``hookimpl``. If one fails, it raises a :class:`RunError` that names it (it only
        prints the error with ``on_error="warn"``, or at the run's end) and stops listening.

    Raises:
        PluginError: ``plugin.requirement`` if a setting needs a package that is not installed.
    """
    from rich.console import Console as RichConsole

    screen, time = console or RichConsole(stderr=True), clock or Clock()

    def report(text: str) -> None:
        screen.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    made: list[object] = []
    chosen: tuple[tuple[type[Observer], str, str | None], ...] = (
        (MetricsFile, "metrics_file", None),
        (TensorBoardFiles, "tensorboard", "tensorboard"),
        (SampleTables, "sample_table", None),
        (Timeline, "timeline", None),
        (LearningCurve, "curve", "matplotlib"),
    )
    for make, setting, package in chosen:
        if getattr(settings, setting):
            if package is not None and importlib.util.find_spec(package) is None:
                raise PluginError(
                    f"{package} is not installed",
                    where=f"observe.{setting}",
                    expected=f"the package {package}, which observe.{setting} needs",
                    fix=f"install jackfield[train], or set observe.{setting}=false",
                )
            made.append(make(settings, folder, report, time))
    if settings.progress:  # hooks are called in reverse order, so its summary comes after the other files
        made.insert(0, ProgressDisplay(settings, folder, report, time, screen))
    return made
