"""Displays of a run: its progress on a console, and its learning curves as an image."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.files import read_lines, replace_file
from jackfield.observe.observer import Observer, metrics_of, missing_package
from jackfield.plugins.hooks import EvaluationEnded, RewardsPending, RunEnded, RunStarted, SamplesFailed, StepEnded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.progress import Progress

_KINDS = ("engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine")
_QUIET_SECONDS = 10.0  #: without a line, after which one says what the step waits for
_OUTPUTS = ("metrics.jsonl", "tensorboard", "samples", "trace.json", "learning_curve.png")


@attrs.define(eq=False, slots=False)
class ProgressDisplay(Observer):
    """Shows the run on a console: header, steps, evaluations, failures and a summary.

    On a terminal and in a notebook it is a progress bar. A file or a pipe gets plain lines without escape codes, at
    most one per step and one every ``progress_interval`` seconds.
    """

    name = "progress"

    _bar: Progress | _NotebookBar | None = attrs.field(default=None, init=False)
    _shown: float = attrs.field(default=-math.inf, init=False)  #: time of the last line
    _total: int = attrs.field(default=0, init=False)
    _ends: deque[float] = attrs.field(factory=lambda: deque(maxlen=21), init=False)  #: end times of the last steps
    _scores: list[tuple[float, int]] = attrs.field(factory=list, init=False)  #: score and step of each evaluation

    def hear(self, event: object) -> None:
        """Show an event."""
        match event:
            case RunStarted():
                self._begin(event)
            case StepEnded():
                self._show_step(event)
            case RewardsPending():
                text = f"rewards: {event.scored} scored, {event.in_progress} in progress, {event.waiting} waiting"
                if self._bar is not None:
                    self._bar.update(self._bar.task_ids[0], description=text)
                elif self.clock.time() - max(self._shown, *self._ends) >= _QUIET_SECONDS:
                    self._shown = self.clock.time()
                    self.report(f"step {event.step + 1}/{self._total}: {text}")
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
        self.go_on(())
        self._total = event.total_steps
        self._ends.clear()  # of a run that recovers in this process, as are scores of steps that are done again
        self._scores.clear()
        self._ends.append(self.clock.time())
        self.report(f"run {event.name} in {self.folder}")
        plugins = [f"{kind} {event.config[kind]['name']}" for kind in _KINDS if kind in event.config]
        if plugins:
            self.report(f"plugins: {', '.join(plugins)}")
        for note in event.notes:
            self.report(note)
        if event.first_step > 0:
            self.report(f"resumed after step {event.first_step} of {event.total_steps}")
            for line in read_lines(self.folder / "metrics.jsonl", event.first_step):
                if line.get("kind") == "evaluation":
                    self._remember(line, line["step"])
        if self.console.is_jupyter:
            self._bar = _NotebookBar(event)
        elif self.console.is_interactive and self.console.file.isatty():
            from rich import progress
            from rich.table import Column

            left = progress.TextColumn("{task.fields[left]}", markup=False, table_column=Column(no_wrap=True))
            column = Column(no_wrap=True, ratio=1)  # on a narrow terminal the metrics are cut, not the bar
            metrics = progress.TextColumn("{task.description}", markup=False, table_column=column)
            shown = (progress.SpinnerColumn(), progress.MofNCompleteColumn(), progress.BarColumn(bar_width=16))
            columns = (*shown, progress.TimeElapsedColumn(), left, metrics)
            self._bar = progress.Progress(*columns, console=self.console, refresh_per_second=4, expand=True)
            self._bar.add_task("first step", total=event.total_steps, completed=event.first_step, left="")
            self._bar.start()

    def _show_step(self, event: StepEnded) -> None:
        """Show a step's metrics, and the remaining time at the speed of the last steps."""
        now, remaining, left = self.clock.time(), self._total - event.step, ""
        self._ends.append(now)
        if remaining > 0 and len(self._ends) > 1:
            left = f"{_duration((now - self._ends[0]) / (len(self._ends) - 1) * remaining)} left"
        shown = {"reward": event.metrics.get("reward/mean")}
        if self._bar is not None and self._scores:  # lines have it where it is new
            shown["evaluation score"] = self._scores[-1][0]
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
        done = f"{event.steps} {event.counted} in {_duration(self.seconds())}"
        if event.stopped:
            saved = max((int(path.name[5:]) for path in self.folder.glob("checkpoints/step_????????")), default=0)
            again = f"goes on after step {saved}" if saved else "begins again"
            self.report(f"run stopped after {done}; the same command {again}")
        elif event.error is None:
            self.report(f"run ended well: {done}")
        else:
            text, kind = str(event.error).strip().partition("\n")[0], type(event.error).__name__
            reason = text if text.startswith("[") else f"{kind}: {text}".removesuffix(": ")
            self.report(f"run FAILED after {done}: {reason}")
        if self._scores:
            last, step = self._scores[-1]
            self.report(f"evaluation score: best {self._best()}, last {_number(last)} at step {step}")
        written = [name for name in _OUTPUTS if (self.folder / name).exists()]
        self.report(f"files in {self.folder}: {', '.join(written) or 'none'}")

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _remember(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Keep an evaluation's score; return False if it has none or it is not finite."""
        score = metrics.get("score")
        if score is None or not math.isfinite(score):
            return False
        self._scores.append((score, step))
        return True

    def _best(self) -> str:
        score, step = max(self._scores, key=lambda each: (each[0], -each[1]))
        return f"{_number(score)} at step {step}"


class _NotebookBar:
    """A progress bar in a notebook, by tqdm, which has widgets where they are installed; used as one of rich."""

    task_ids: Any = (0,)

    def __init__(self, event: RunStarted) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of widgets that are not installed: then it is text
            from tqdm.auto import tqdm

            self._bar = tqdm(total=event.total_steps, initial=event.first_step, desc=event.name, unit="step")
        self.stop = self._bar.close

    def update(self, _: object, *, description: str, completed: int | None = None, left: str = "") -> None:
        self._bar.set_postfix_str(description, refresh=False)
        self._bar.update(0 if completed is None else completed - self._bar.n)
        self._bar.refresh()


def _number(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def _duration(seconds: float) -> str:
    """Format a duration: ``41 s`` up to two minutes, then ``12:05`` or ``1:02:33``."""
    return f"{seconds:.0f} s" if seconds < 120 else str(timedelta(seconds=round(seconds))).lstrip("0:")


_SCORE, _REWARD, _LOSS = "score", "reward/mean", "policy/loss"
_DRAWN = {"evaluation": (_SCORE,), "step": (_REWARD, _LOSS)}  #: metrics by the kind of their line
#: title and label of a metric's panel
_LABELS = {
    _SCORE: ("Evaluation", "score on held-out tasks"),
    _REWARD: ("Training reward", "mean reward of the batch"),
    _LOSS: ("Training loss", "mean loss of the batch"),
}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#8c564b")
_QUIET = "#8a8f98"
_NOTE: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "color": _QUIET, "fontsize": 9}


@attrs.define(eq=False, slots=False)
class LearningCurve(Observer):
    """Draws ``learning_curve.png`` when the run ends, also after a failure."""

    name = "curve"
    output = "learning_curve.png"

    _lines: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    _title: str | None = attrs.field(default=None, init=False)

    def hear(self, event: object) -> None:
        """Collect points, first those of a resumed run's metrics file; draw them at the end."""
        if isinstance(event, RunStarted):
            if event.first_step > 0:
                self._lines = list(read_lines(self.folder / "metrics.jsonl", event.first_step))
            self.go_on(self._lines)
            self._title = event.name
        if found := metrics_of(event):
            kind, step, metrics = found
            drawn = {name: metrics[name] for name in _LABELS if name in metrics}
            self._lines.append({"kind": kind, "step": step, "time": self.seconds(), **drawn})
        if isinstance(event, RunEnded) and self._title is not None:  # otherwise the run never started
            _draw([_Curve(self._title, _COLOURS[0]).follow(self._title, self._lines)], self.path, self._title, None)


def plot_learning_curve(
    metrics_files: Sequence[Path | Sequence[Path]],
    png: Path,
    title: str,
    *,
    labels: Sequence[str] | None = None,
    target: float | None = None,
) -> None:
    """Draw the learning curves of one or several runs as an image of 1200 x 700 pixels.

    The upper plots show evaluation scores over steps and over seconds. The lower one shows the training reward of each
    step and its moving mean, or the training loss if no run has a reward (supervised fine-tuning).

    There is one ``metrics.jsonl`` per curve. A sequence of files makes one curve of consecutive phases (a warm-up, then
    reinforcement learning), whose steps and seconds are added up. A missing file is an error. ``png`` is replaced
    atomically, and its folder is created. ``labels`` are those of the legend, by default the folder names that
    distinguish the curves. A dashed line marks the score ``target``.
    """
    runs = [[entry] if isinstance(entry, Path) else list(entry) for entry in metrics_files]
    folders = [paths[-1].resolve().parent for paths in runs]
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    names = [str(folder.relative_to(common)) for folder in folders] if labels is None else list(labels)
    if len(names) != len(runs):
        raise ValueError(f"there are {len(runs)} curves, but {len(names)} labels")
    curves = [_Curve(name, _COLOURS[index % len(_COLOURS)]) for index, name in enumerate(names)]
    for curve, paths in zip(curves, runs, strict=True):
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"there is no metrics file {path}")
            curve.follow(path.resolve().parent.name, read_lines(path))
    _draw(curves, png, title, target)


_Point = tuple[float, float, float]  #: step, seconds and value


@attrs.define
class _Curve:
    """One curve, of one or several phases."""

    label: str
    colour: str
    #: the points of each metric by phase and step, so that a step evaluated again after a resume counts once
    points: defaultdict[str, dict[tuple[int, int], _Point]] = attrs.field(factory=lambda: defaultdict(dict))
    phases: list[tuple[int, float, str]] = attrs.field(factory=list)  #: step, seconds and name of each phase's start
    end: tuple[int, float] = (0, 0.0)  #: last step and its seconds

    def follow(self, name: str, lines: Iterable[Mapping[str, Any]]) -> _Curve:
        """Append a phase, whose steps and seconds continue those of the previous phases."""
        first_step, first_second = self.end
        self.phases.append((first_step, first_second, name))
        for line in lines:
            step, seconds = first_step + int(line.get("step", 0)), first_second + float(line.get("time", 0.0))
            self.end = max(self.end[0], step), max(self.end[1], seconds)
            for metric in _DRAWN.get(line.get("kind", ""), ()):
                value = line.get(metric)
                if isinstance(value, int | float) and math.isfinite(value):
                    self.points[metric][len(self.phases), step] = (step, seconds, value)
        return self


def _draw(curves: Sequence[_Curve], png: Path, title: str, target: float | None) -> None:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("matplotlib", "drawing learning curves") from error
    style = {"axes.axisbelow": True, "axes.grid": True, "grid.color": "#e3e6ea", "axes.titlelocation": "left"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 12}
    training = _REWARD if any(one.points[_REWARD] for one in curves) else _LOSS
    # the moving mean covers about a tenth of the longest curve, an odd number of steps from 1 to 51
    window = 2 * min(25, max(len(one.points[training]) for one in curves) // 20) + 1
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12.0, 7.0), dpi=100, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        figure.suptitle(_plain(title), fontsize=15, fontweight="bold")
        axes = figure.subplot_mosaic([["steps", "seconds"], ["training", "training"]], height_ratios=(1.15, 1.0))
        _draw_panel(axes["steps"], curves, _SCORE, 0, 1, target)
        _draw_panel(axes["seconds"], curves, _SCORE, 1, 1, target)
        _draw_panel(axes["training"], curves, training, 0, window)
        handles, labels = axes["steps"].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(handles), 6), frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    replace_file(png, picture.getvalue())


def _draw_panel(
    axes: Axes, curves: Sequence[_Curve], metric: str, unit: int, window: int, target: float | None = None
) -> None:
    """Draw a metric over steps (unit 0) or seconds (unit 1), and the moving mean of ``window`` points."""
    title, label = _LABELS[metric]
    title += f": each step, and the mean of {window} steps around it" if window > 1 else ""
    axes.set(title=title, ylabel=label, xlabel=("trainer steps", "seconds since the start")[unit])
    line, last = {"marker": "o" if metric == _SCORE else "", "markersize": 4, "linewidth": 2}, []
    for one in curves:
        points = [point for _, point in sorted(one.points[metric].items())]
        x, y = [point[unit] for point in points], [point[2] for point in points]
        last += y[-1:]
        if window > 1:
            axes.plot(x, y, color=one.colour, linewidth=0.9, alpha=0.28)
        axes.plot(x, _moving_mean(y, window), color=one.colour, label=_plain(one.label), **line)
    if not last:
        axes.text(0.5, 0.5, f"no {metric} was recorded", transform=axes.transAxes, ha="center", color=_QUIET)
        return
    axes.set_xlim(left=0)
    axes.margins(x=0.05)
    if metric == _SCORE:
        note = f"last {min(last):.3f}" + (f" to {max(last):.3f}" if len(last) > 1 else "")
        axes.set_title(note, fontsize=11, fontweight="bold", loc="right")
        if axes.dataLim.y0 >= 0 and axes.dataLim.y1 <= 1:
            axes.set_ylim(-0.02, 1.04)
    if target is not None:
        axes.axhline(target, color=_QUIET, linestyle="--", linewidth=1)
        axes.annotate(f"target {target:g}", (0, target), xycoords=axes.get_yaxis_transform(), **_NOTE)
    begun: dict[float, set[str]] = {}
    for one in curves:
        for step, second, name in one.phases[1:]:
            begun.setdefault((step, second)[unit], set()).add(name)
    # phases of several runs start at different seconds; a line for each would only confuse
    for place, names in begun.items() if unit == 0 or len(begun) == 1 else ():
        axes.axvline(place, color=_QUIET, linestyle=":", linewidth=1.2)
        if len(names) == 1 and unit == 0:
            text = f"{_plain(*names)} begins"
            axes.annotate(text, (place, 0), xycoords=axes.get_xaxis_transform(), **_NOTE)


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and its neighbours, with fewer of them at the ends."""
    means = []
    for index in range(len(values)):
        reach = min(window // 2, index, len(values) - 1 - index)
        means.append(sum(values[index - reach : index + reach + 1]) / (2 * reach + 1))
    return means


def _plain(text: str) -> str:
    """Escape a text, so that matplotlib takes it neither as formula nor as private name."""
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")
