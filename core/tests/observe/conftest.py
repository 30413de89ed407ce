"""A fake run that only calls hooks, on a clock that tests move."""

from __future__ import annotations

import io
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jackfield.abc.rollout import WeightReceipt
from jackfield.clock import Clock
from jackfield.observe import ObserveSettings, observers
from jackfield.plugins.hooks import (
    EvaluationEnded,
    HookManager,
    RunEnded,
    RunStarted,
    SampleRecord,
    SamplesFailed,
    SamplesRecorded,
    StageEnded,
    StepEnded,
    WeightsSynced,
)

OFF = {**dict.fromkeys(("metrics_file", "sample_table", "timeline", "curve", "progress"), False), "report_to": ()}


class SetClock(Clock):
    """A clock that shows the time to which it was set."""

    now = 100.0

    def time(self) -> float:
        return self.now


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeRun:
    """Sends listeners the events of a run."""

    def __init__(self, folder: Path, settings: dict[str, Any], terminal: bool, width: int) -> None:
        self.folder = folder
        self.clock = SetClock()
        self.text = TerminalText() if terminal else io.StringIO()
        self.console = Console(file=self.text, width=width, force_terminal=terminal or None, legacy_windows=False)
        config = ObserveSettings(**(OFF | settings))
        self.listeners = observers(config, folder, self.console, clock=self.clock)
        self.emit = HookManager(self.listeners).emit

    def start(self, first_step: int = 0, total_steps: int = 4, **config: Any) -> FakeRun:
        event = RunStarted(
            name="demo", folder=str(self.folder), total_steps=total_steps, first_step=first_step, config=config
        )
        self.emit(event)
        return self

    def step(self, step: int, seconds: float = 1.0, **metrics: float) -> None:
        self.clock.now += seconds
        self.emit(StepEnded(step=step, metrics=metrics))

    def evaluate(self, step: int, **metrics: float) -> None:
        self.emit(EvaluationEnded(step=step, metrics=metrics))

    def sync(self, version: int) -> None:
        receipts = tuple(
            WeightReceipt(version=version, replica=replica, workers=(), paused_seconds=0.1 * (replica + 1))
            for replica in range(2)
        )
        self.emit(WeightsSynced(version=version, receipts=receipts, seconds=0.5))

    def stage(self, name: str, lane: str, start: float, end: float, step: int = 0) -> None:
        """Report a stage. Times are in seconds after 100, where the clock starts."""
        event = StageEnded(name=name, lane=lane, start=100 + start, end=100 + end, step=step)
        self.emit(event)

    def samples(self, step: int, *records: SampleRecord, partition: str = "train") -> None:
        self.emit(SamplesRecorded(step=step, partition=partition, samples=records))

    def failures(self, step: int, **reasons: str) -> None:
        self.emit(SamplesFailed(step=step, reasons=reasons))

    def end(self, steps: int = 4, error: BaseException | None = None, counted: str = "steps") -> None:
        self.emit(RunEnded(folder=str(self.folder), steps=steps, error=error, counted=counted))

    @property
    def screen(self) -> list[str]:
        return self.text.getvalue().replace(str(self.folder), "FOLDER").splitlines()


MakeRun = Callable[..., FakeRun]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """``make_run(metrics_file=True, ...)`` makes a run in ``tmp_path/run`` with these observers only."""
    runs: list[FakeRun] = []

    def make(terminal: bool = False, width: int = 130, **settings: Any) -> FakeRun:
        runs.append(FakeRun(tmp_path / "run", settings, terminal, width))
        return runs[-1]

    yield make
    for run in runs:  # most tests do not end their run
        for listener in run.listeners:
            listener.close()


@pytest.fixture
def sample() -> Callable[..., SampleRecord]:
    def make(key: str = "a", **changes: Any) -> SampleRecord:
        fields: dict[str, Any] = {
            "prompt": "2 + 2 = ?",
            "response": "#### 4",
            "reward": 1.0,
            "response_ids": (5, 6, 7),
            "response_mask": (1, 1, 0),
            "tags": {"group": 3},
        }
        return SampleRecord(key=key, **(fields | changes))

    return make


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Inside ``with full_disk(n)``, no file grows beyond ``n`` bytes, and a write across it is partial."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a truncated cache would stay
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            sys.dont_write_bytecode = writes
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
