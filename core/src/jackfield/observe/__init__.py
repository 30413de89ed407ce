"""What a run leaves for people: metrics, TensorBoard, sample tables, a timeline, a curve and its progress.

Every observer is a listener on the lifecycle hooks of :mod:`jackfield.plugins.hooks`, none knows another, and
nothing depends on them. A run makes them with :func:`listeners` and registers each with its plugin manager.
``docs/reference/run_folder.md`` describes the files.
"""

from __future__ import annotations

from jackfield.observe.config import ObserveConfig
from jackfield.observe.curve import LearningCurve, plot_learning_curve
from jackfield.observe.event_files import TensorBoardFiles
from jackfield.observe.factory import listeners
from jackfield.observe.metrics_file import MetricsFile
from jackfield.observe.progress import ProgressDisplay
from jackfield.observe.sample_table import SampleTables, read_samples, render_samples
from jackfield.observe.timeline import Timeline

__all__ = [
    "LearningCurve",
    "MetricsFile",
    "ObserveConfig",
    "ProgressDisplay",
    "SampleTables",
    "TensorBoardFiles",
    "Timeline",
    "listeners",
    "plot_learning_curve",
    "read_samples",
    "render_samples",
]
