"""Progress for the person who waits: a bar on a terminal, text lines elsewhere."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.observe.observer import Observer, read_lines
from jackfield.plugins.hooks import EvaluationEnded, RunEnded, RunStarted, SamplesFailed, StepEnded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_KINDS = ("engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine")
_OUTPUTS = ("metrics.jsonl", "tensorboard", "samples", "trace.json", "learning_curve.png")


@attrs.define(eq=False, slots=False)
class ProgressDisplay(Observer):
    """Shows the run on a console: a header, the steps, the evaluations, failures, and a summary at the end.

    A terminal gets a bar that moves; a file or a pipe gets plain lines without escape codes, one per step but not
    more often than ``progress_interval`` seconds.
    """

    name = "progress"

    console: Console
    _bar: Progress | None = attrs.field(default=None, init=False)
    _shown: float = attrs.field(default=-math.inf, init=False)  #: when the last line was
    _total: int = attrs.field(default=0, init=False)
    _began: float | None = attrs.field(default=None, init=False)
    _ends: deque[float] = attrs.field(factory=lambda: deque(maxlen=21), init=False)  #: of the last steps
    _scores: list[tuple[float, int]] = attrs.field(factory=list, init=False)  #: of each evaluation, with its step

    def hear(self, event: object) -> None:
        """Show an event."""
        match event:
            case RunStarted():
                self._begin(event)
            case StepEnded():
                self._show_step(event)
            case EvaluationEnded(metrics=metrics):
                if self._remember(metrics, event.step):
                    kept = [name for name in ("score", "failed") if name == "score" or metrics.get(name)]
                    metrics = {name: metrics[name] for name in kept}
                text = ", ".join(f"{name} {_number(value)}" for name, value in metrics.items())
                best = f" (best {self._best()})" if len(self._scores) > 1 else ""
                self.report(f"evaluation at step {event.step}: {text}{best}")
            case SamplesFailed(reasons=reasons) if reasons:
                most = Counter(reasons.values()).most_common(3)
                text = "; ".join(f"{count} x {' '.join(reason.split())[:100]}" for reason, count in most)
                self.report(f"step {event.step}: {len(reasons)} samples failed: {text}")
            case RunEnded():
                self._summarise(event)

    def _begin(self, event: RunStarted) -> None:
        self._began, self._total = self.clock.time(), event.total_steps
        self._ends.append(self._began)
        self.report(f"run {event.name} in {self.folder}")
        plugins = [f"{kind} {event.config[kind]['name']}" for kind in _KINDS if kind in event.config]
        if plugins:
            self.report(f"plugins: {', '.join(plugins)}")
        if event.first_step > 0:
            self.report(f"resumed after step {event.first_step} of {event.total_steps}")
            for line in read_lines(self.folder / "metrics.jsonl", event.first_step):
                if line.get("kind") == "evaluation":
                    self._remember(line, line["step"])
        if self.console.is_interactive and self.console.file.isatty():
            self._bar = _make_bar(self.console)
            self._bar.add_task("first step", total=event.total_steps, completed=event.first_step, left="")
            self._bar.start()

    def _show_step(self, event: StepEnded) -> None:
        """Show a step: its metrics, and the time that the remaining steps will take at the speed of the last ones."""
        now, remaining, left = self.clock.time(), self._total - event.step, ""
        self._ends.append(now)
        if remaining > 0 and len(self._ends) > 1:
            left = f"{_duration((now - self._ends[0]) / (len(self._ends) - 1) * remaining)} left"
        score = self._scores[-1][0] if self._scores else None
        shown = {"reward": event.metrics.get("reward/mean"), "evaluation score": score}
        shown["loss"] = event.metrics.get("policy/loss")
        parts = [f"{name} {_number(value)}" for name, value in shown.items() if value is not None]
        if "samples_per_second" in event.metrics:
            parts.append(f"{event.metrics['samples_per_second']:.1f} samples/s")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=event.step, description=", ".join(parts), left=left)
        elif remaining <= 0 or now - self._shown >= self.settings.progress_interval:
            self._shown = now
            text = ", ".join(part for part in (*parts, left) if part)
            self.report(f"step {event.step}/{self._total}: {text}".rstrip(": "))

    def _summarise(self, event: RunEnded) -> None:
        self.close()
        took = "" if self._began is None else f" in {_duration(self.clock.time() - self._began)}"
        if event.stopped or (event.error is None and event.steps < self._total):
            self.report(f"run stopped after {event.steps} steps{took}; the same command goes on")
        elif event.error is None:
            self.report(f"run ended well: {event.steps} steps{took}")
        else:
            text, kind = str(event.error).strip().partition("\n")[0], type(event.error).__name__
            reason = text if text.startswith("[") else f"{kind}: {text}".removesuffix(": ")
            self.report(f"run FAILED after {event.steps} steps{took}: {reason}")
        if self._scores:
            last, step = self._scores[-1]
            self.report(f"evaluation score: best {self._best()}, last {_number(last)} at step {step}")
        written = [name for name in _OUTPUTS if (self.folder / name).exists()]
        self.report(f"files in {self.folder}: {', '.join(written) or 'none'}")

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _remember(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Keep an evaluation's score; return False when it has none, or none that is finite."""
        score = metrics.get("score")
        if score is None or not math.isfinite(score):
            return False
        self._scores.append((score, step))
        return True

    def _best(self) -> str:
        score, step = max(self._scores, key=lambda each: (each[0], -each[1]))
        return f"{_number(score)} at step {step}"


def _make_bar(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # On a narrow terminal the metrics are cut, not the bar.
    metrics = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    left = TextColumn("{task.fields[left]}", markup=False, table_column=Column(no_wrap=True))
    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(bar_width=16), TimeElapsedColumn(), left, metrics)
    return Progress(*columns, console=console, refresh_per_second=4, expand=True)


def _number(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def _duration(seconds: float) -> str:
    """Write a time: ``41 s`` up to two minutes, then ``12:05`` or ``1:02:33``."""
    return f"{seconds:.0f} s" if seconds < 120 else str(timedelta(seconds=round(seconds))).lstrip("0:")
