"""The registration of the trackers. None of their libraries is imported before a run reports to it."""

from __future__ import annotations

from collections.abc import Callable

from jackfield.plugins.hooks import hookimpl
from jackfield_trackers._mlflow import MlflowTracker
from jackfield_trackers._trackio import TrackioTracker
from jackfield_trackers._wandb import WandbTracker


@hookimpl
def register_parts(register: Callable[..., None]) -> None:
    """Register each tracker by the name of its library."""
    for tracker in (WandbTracker, TrackioTracker, MlflowTracker):
        register("tracker", tracker.package, tracker)
