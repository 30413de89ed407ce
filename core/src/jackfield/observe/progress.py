"""Progress for the person who waits: a bar on a terminal, text lines elsewhere."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jackfield.clock import Clock
from jackfield.observe._files import read_lines
from jackfield.observe._listener import Listener, listens
from jackfield.observe.config import ObserveConfig
from jackfield.observe.names import LOSS, REWARD, SAMPLES, SAMPLES_PER_SECOND, SCORE, find, pick, shown
from jackfield.plugins.hooks import EvaluationEnded, RunEnded, RunStarted, SamplesFailed, StepEnded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["ProgressDisplay"]

_KINDS = ("engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine")
_OUTPUTS = ("metrics.jsonl", "tensorboard", "samples", "trace.json", "learning_curve.png")


class ProgressDisplay(Listener):
    """Shows the run on a console: a header, the steps, the evaluations, failures, and a summary at the end.

    A terminal gets a bar that moves; a file or a pipe gets plain lines without escape codes, one per step but not
    more often than ``progress_interval`` seconds.
    """

    name = "progress"

    def __init__(
        self, config: ObserveConfig, folder: Path, report: Callable[[str], None], clock: Clock, console: Console
    ) -> None:
        super().__init__(config, folder, report, clock)
        moving = console.is_interactive and console.file.isatty()
        self._view: _View = _Bar(console) if moving else _Lines(console, clock, config.progress_interval)
        self._total = 0
        self._began: float | None = None
        self._ends: deque[float] = deque(maxlen=21)  # of the last steps, for the speed
        self._scores: list[tuple[float, int]] = []  # of each evaluation, with its step
        self._score = "score"  # how the evaluations call it

    @listens(tryfirst=True)
    def run_started(self, event: RunStarted) -> None:
        """Print the header."""
        self._began = self._clock.time()
        self._ends.append(self._began)
        self._total = event.total_steps
        self._view.line(f"run {event.name} in {self._folder}")
        plugins = ", ".join(f"{kind} {name}" for kind, name in _plugins(event.config))
        if plugins:
            self._view.line(f"plugins: {plugins}")
        if event.first_step > 0:
            self._view.line(f"resumed after step {event.first_step} of {event.total_steps}")
            for line in read_lines(self._folder / "metrics.jsonl", event.first_step):
                if line.get("kind") == "evaluation":
                    self._remember(line, line["step"])
        self._view.start(event.total_steps, event.first_step)

    @listens()
    def step_ended(self, event: StepEnded) -> None:
        """Show a step."""
        self._ends.append(self._clock.time())
        self._view.step(event.step, self._describe(event), self._left(event.step))

    @listens()
    def evaluation_ended(self, event: EvaluationEnded) -> None:
        """Print an evaluation."""
        known = self._remember(event.metrics, event.step)
        names = [find(event.metrics, SCORE) or ""] if known else list(event.metrics)
        names += ["failed"] if known and event.metrics.get("failed") else []
        text = ", ".join(f"{shown(name)} {_number(event.metrics[name])}" for name in names)
        best = f" (best {_best(self._scores)})" if len(self._scores) > 1 else ""
        self._view.line(f"evaluation at step {event.step}: {text}{best}")

    @listens()
    def samples_failed(self, event: SamplesFailed) -> None:
        """Print how many samples failed, and why."""
        if event.reasons:
            reasons = Counter(event.reasons.values()).most_common(3)
            text = "; ".join(f"{count} x {' '.join(reason.split())[:100]}" for reason, count in reasons)
            self._view.line(f"step {event.step}: {len(event.reasons)} samples failed: {text}")

    @listens(trylast=True)
    def run_ended(self, event: RunEnded) -> None:
        """Print the summary, after the other observers have written theirs."""
        self.close()
        took = "" if self._began is None else f" in {_duration(self._clock.time() - self._began)}"
        if event.stopped or (event.error is None and event.steps < self._total):
            self._view.line(f"run stopped after {event.steps} steps{took}; the same command goes on")
        elif event.error is None:
            self._view.line(f"run ended well: {event.steps} steps{took}")
        else:
            self._view.line(f"run FAILED after {event.steps} steps{took}: {_first_line(event.error)}")
        if self._scores:
            last, step = self._scores[-1]
            best = _best(self._scores)
            self._view.line(f"evaluation {self._score}: best {best}, last {_number(last)} at step {step}")
        written = [name for name in _OUTPUTS if (self._folder / name).exists()]
        self._view.line(f"files in {self._folder}: {', '.join(written) or 'none'}")

    def close(self) -> None:
        """Take the bar down."""
        self._view.stop()

    def _remember(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Keep an evaluation's score; False when it has none, or none that is finite."""
        key = find(metrics, SCORE)
        if key is None or metrics[key] is None or not math.isfinite(metrics[key]):
            return False
        self._score = shown(key)
        self._scores.append((metrics[key], step))
        return True

    def _describe(self, event: StepEnded) -> str:
        quantities = [("reward", pick(event.metrics, REWARD)), ("loss", pick(event.metrics, LOSS))]
        if self._scores:
            quantities.insert(1, (f"evaluation {self._score}", self._scores[-1][0]))
        parts = [f"{name} {_number(value)}" for name, value in quantities if value is not None]
        speed = self._speed(event.metrics)
        if speed is not None:
            parts.append(f"{speed:.1f} samples/s")
        return ", ".join(parts)

    def _left(self, step: int) -> str:
        """The time that the remaining steps will take at the speed of the last ones; empty at the end."""
        if step >= self._total or len(self._ends) < 2:
            return ""
        per_step = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"{_duration(per_step * (self._total - step))} left"

    def _speed(self, metrics: Mapping[str, float]) -> float | None:
        speed, samples = pick(metrics, SAMPLES_PER_SECOND), pick(metrics, SAMPLES)
        seconds = self._ends[-1] - self._ends[-2] if len(self._ends) > 1 else 0.0
        if speed is None and samples is not None and seconds > 0:
            return samples / seconds
        return speed


class _View(Protocol):
    """Where progress is shown."""

    def start(self, total: int, done: int) -> None: ...

    def step(self, step: int, text: str, left: str) -> None: ...

    def line(self, text: str) -> None: ...

    def stop(self) -> None: ...


class _Lines:
    """Plain lines."""

    def __init__(self, console: Console, clock: Clock, interval: float) -> None:
        self._console = console
        self._clock = clock
        self._interval = interval
        self._total = 0
        self._shown = -math.inf

    def start(self, total: int, done: int) -> None:
        self._total = total

    def step(self, step: int, text: str, left: str) -> None:
        now = self._clock.time()
        if step >= self._total or now - self._shown >= self._interval:
            self._shown = now
            parts = ", ".join(part for part in (text, left) if part)
            self.line(f"step {step}/{self._total}: {parts}".rstrip(": "))

    def line(self, text: str) -> None:
        _print(self._console, text)

    def stop(self) -> None:
        pass


class _Bar:
    """A bar that moves, with lines above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def start(self, total: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        # On a narrow terminal the metrics are cut, not the bar.
        metrics = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        left = TextColumn("{task.fields[left]}", markup=False, table_column=Column(no_wrap=True))
        columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(bar_width=16), TimeElapsedColumn(), left, metrics)
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4, expand=True)
        self._task = self._progress.add_task("first step", total=total, completed=done, left="")
        self._progress.start()

    def step(self, step: int, text: str, left: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=text, left=left)

    def line(self, text: str) -> None:
        _print(self._console, text)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _plugins(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The kinds and names of the plugins that a configuration chooses, wherever their sections are."""
    for key, value in config.items():
        name = value.get("name", value.get("plugin")) if isinstance(value, Mapping) else value
        if key in _KINDS and isinstance(name, str):
            yield key, name
        elif isinstance(value, Mapping):
            yield from _plugins(value)


def _best(evaluations: list[tuple[float, int]]) -> str:
    accuracy, step = max(evaluations, key=lambda evaluation: (evaluation[0], -evaluation[1]))
    return f"{_number(accuracy)} at step {step}"


def _number(value: float) -> str:
    plain = value == 0 or 1e-3 <= abs(value) < 1e5
    return f"{value:.3f}" if plain else f"{value:.2e}"


def _duration(seconds: float) -> str:
    """``41 s`` up to two minutes, then ``12:05`` or ``1:02:33``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    kind = type(error).__name__
    return text if text.startswith("[") else f"{kind}: {text}" if text else kind
