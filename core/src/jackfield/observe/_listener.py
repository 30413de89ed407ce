"""What the observers have in common: a clock, and a name in their own failures."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jackfield.clock import Clock
from jackfield.errors import PluginError, RunError
from jackfield.observe.config import ObserveConfig
from jackfield.plugins.hooks import RunEnded, hookimpl

__all__ = ["Listener", "listens", "require", "unstarted"]

Self = TypeVar("Self", bound="Listener")
Event = TypeVar("Event")


class Listener:
    """Base of the observers.

    Args:
        config: the settings.
        folder: the run's folder, made when the run starts.
        report: prints one text for people; used for this observer's own failures.
        clock: the run's clock.
    """

    name = "listener"  #: in its own error messages
    output = ""  #: what it writes, relative to the run's folder

    def __init__(self, config: ObserveConfig, folder: Path, report: Callable[[str], None], clock: Clock) -> None:
        self._config = config
        self._folder = folder
        self._report = report
        self._clock = clock
        self._failed = False

    def close(self) -> None:
        """Let go of files and of the screen; more than once is fine."""

    def _fail(self, hook: str, error: Exception, event: object) -> None:
        """Name itself and listen no more; the run's end is only told, so that it hides no error of the run."""
        self._failed = True
        failure = RunError(
            f"the observer '{self.name}' failed in {hook}",
            code="run.failed",
            where=str(self._folder / self.output),
            found=f"{type(error).__name__}: {error}",
            fix="look at the disk and the folder's permissions, or set observe.on_error=warn to run without it",
        )
        try:
            self.close()
        except Exception as second:  # the first failure is the one to tell
            failure.add_note(f"and closing it failed: {second}")
        if self._config.on_error == "warn" or isinstance(event, RunEnded):
            self._report(str(failure))
        else:
            raise failure from error


def listens(
    *, tryfirst: bool = False, trylast: bool = False
) -> Callable[[Callable[[Self, Event], None]], Callable[[Self, Event], None]]:
    """Mark an observer's method as a hook implementation whose failure names the observer and happens once."""

    def decorate(method: Callable[[Self, Event], None]) -> Callable[[Self, Event], None]:
        @functools.wraps(method)
        def call(self: Self, event: Event) -> None:
            if self._failed:
                return
            try:
                method(self, event)
            except Exception as error:
                self._fail(method.__name__, error, event)

        return hookimpl(tryfirst=tryfirst, trylast=trylast)(call)

    return decorate


def require(package: str, setting: str) -> None:
    """Refuse a setting whose package is not installed; imports nothing.

    Raises:
        PluginError: ``plugin.requirement``.
    """
    if importlib.util.find_spec(package) is None:
        raise PluginError(
            f"{package} is not installed",
            code="plugin.requirement",
            where=setting,
            expected=f"the package {package}, which {setting} needs",
            fix=f"install jackfield[train], or set {setting}=false",
        )


def unstarted(what: str) -> RuntimeError:
    """The failure of an event that came before ``run_started``."""
    return RuntimeError(f"{what} came before run_started")
