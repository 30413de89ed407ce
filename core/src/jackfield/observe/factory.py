"""The observers that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.clock import Clock
from jackfield.observe._listener import Listener, require
from jackfield.observe.config import ObserveConfig
from jackfield.observe.curve import LearningCurve
from jackfield.observe.event_files import TensorBoardFiles
from jackfield.observe.metrics_file import MetricsFile
from jackfield.observe.progress import ProgressDisplay
from jackfield.observe.sample_table import SampleTables
from jackfield.observe.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["listeners"]


def listeners(
    config: ObserveConfig, folder: Path, console: Console | None = None, *, clock: Clock | None = None
) -> list[object]:
    """The observers of a run, to be registered with its plugin manager in any order.

    Args:
        config: which ones, and their settings.
        folder: the run's folder; it need not be there yet. Nothing is written before ``run_started``.
        console: where progress and warnings go; without, standard error.
        clock: the run's clock, on which ``StageEnded`` tells its times; without, real time.

    Returns:
        Objects with methods marked ``hookimpl``. When one of them fails it raises a :class:`RunError` that names it,
        or prints that with ``on_error="warn"``, and listens no more. At the run's end it only prints.

    Raises:
        PluginError: ``plugin.requirement``, when a setting needs a package that is not installed.
    """
    from rich.console import Console as RichConsole

    if config.tensorboard:
        require("tensorboard", "observe.tensorboard")
    if config.curve:
        require("matplotlib", "observe.curve")
    screen = console if console is not None else RichConsole(stderr=True)
    time = clock if clock is not None else Clock()

    def report(text: str) -> None:
        screen.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    chosen: list[tuple[bool, type[Listener]]] = [
        (config.metrics_file, MetricsFile),
        (config.tensorboard, TensorBoardFiles),
        (config.sample_table, SampleTables),
        (config.timeline, Timeline),
        (config.curve, LearningCurve),
    ]
    made: list[object] = [make(config, folder, report, time) for wanted, make in chosen if wanted]
    if config.progress:
        made.append(ProgressDisplay(config, folder, report, time, screen))
    return made
