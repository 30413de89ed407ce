"""Learning curves as a picture: what a run recorded, over steps and over seconds."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.errors import PluginError
from jackfield.files import replace_file
from jackfield.observe.metrics import number, read_lines
from jackfield.observe.observer import MetricsObserver, listens
from jackfield.plugins.hooks import RunEnded, RunStarted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SCORE, _REWARD, _LOSS = "score", "reward/mean", "policy/loss"
_SIZE = (12.0, 7.0)  # inches; at 100 dots per inch, 1200 x 700 pixels
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#8c564b")
_QUIET = "#8a8f98"
_NOTE: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "color": _QUIET, "fontsize": 9}


class LearningCurve(MetricsObserver):
    """Draws ``learning_curve.png`` when the run ends, also after a failure."""

    name = "learning curve"
    output = "learning_curve.png"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lines: list[dict[str, Any]] = []
        self._title: str | None = None

    @listens()
    def run_started(self, event: RunStarted) -> None:
        """Start, after the points that a resumed run's metrics file has."""
        if event.first_step > 0:
            self._lines = list(read_lines(self.folder / "metrics.jsonl", event.first_step))
        self.go_on(self._lines)
        self._title = event.name

    def record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Remember what is drawn."""
        drawn = {name: number(metrics[name]) for name in (_SCORE, _REWARD, _LOSS) if name in metrics}
        self._lines.append({"kind": kind, "step": step, "time": self.seconds(), **drawn})

    @listens()
    def run_ended(self, event: RunEnded) -> None:
        """Draw; a run that never started has nothing to draw."""
        if self._title is not None:
            _draw([_join([self._lines], [self._title], self._title)], self.path, self._title, None)


def plot_learning_curve(
    metrics_files: Sequence[Path | Sequence[Path]],
    png: Path,
    title: str,
    *,
    labels: Sequence[str] | None = None,
    target: float | None = None,
) -> None:
    """Draw the learning curves of one or several runs: 1200 x 700 pixels.

    Above, the evaluations' score over steps and over seconds; below, the training reward of each step with its moving
    mean, or the training loss where no run has a reward (supervised fine-tuning).

    Args:
        metrics_files: one ``metrics.jsonl`` per curve. A sequence of files is one curve whose phases follow each
            other (a warm-up, then reinforcement learning): their steps and seconds are added up.
        png: the picture, replaced in one move; its folder is made.
        title: above the picture.
        labels: one per curve for the legend; without, the names of the folders that tell the curves apart.
        target: a score to mark with a dashed line.

    Raises:
        PluginError: ``plugin.requirement``, when matplotlib is not installed.
        FileNotFoundError: when a metrics file is not there.
    """
    curves = [[entry] if isinstance(entry, Path) else list(entry) for entry in metrics_files]
    for path in (path for paths in curves for path in paths):
        if not path.is_file():
            raise FileNotFoundError(f"there is no metrics file {path}")
    names = list(labels) if labels is not None else _distinct([paths[-1] for paths in curves])
    if len(names) != len(curves):
        raise ValueError(f"there are {len(curves)} curves, but {len(names)} labels")
    series = [
        _join([read_lines(path) for path in paths], [path.resolve().parent.name for path in paths], name, index)
        for index, (paths, name) in enumerate(zip(curves, names, strict=True))
    ]
    _draw(series, png, title, target)


@attrs.define
class _Series:
    """One curve. Points are (step, value) or (step, seconds, value), in order."""

    label: str
    colour: str
    score: list[tuple[int, float, float]] = attrs.field(factory=list)
    reward: list[tuple[int, float]] = attrs.field(factory=list)
    loss: list[tuple[int, float]] = attrs.field(factory=list)
    phases: list[tuple[int, float, str]] = attrs.field(factory=list)  #: where each phase after the first begins


def _join(phases: Sequence[Iterable[Mapping[str, Any]]], names: Sequence[str], label: str, index: int = 0) -> _Series:
    """Read one curve from the lines of its phases; their steps and seconds are added up."""
    series = _Series(label, _COLOURS[index % len(_COLOURS)])
    step_base, time_base = last_step, last_time = 0, 0.0
    for lines, name in zip(phases, names, strict=True):
        if lines is not phases[0]:
            series.phases.append((step_base, time_base, name))
        scores: dict[int, tuple[int, float, float]] = {}  # a step evaluated again after a resume counts once
        for line in lines:
            step, seconds = step_base + int(line.get("step", 0)), time_base + float(line.get("time", 0.0))
            last_step, last_time = max(last_step, step), max(last_time, seconds)
            if line.get("kind") == "evaluation" and _is_finite(line.get(_SCORE)):
                scores[step] = (step, seconds, line[_SCORE])
            elif line.get("kind") == "step":
                series.reward += [(step, line[_REWARD])] if _is_finite(line.get(_REWARD)) else []
                series.loss += [(step, line[_LOSS])] if _is_finite(line.get(_LOSS)) else []
        series.score += [scores[step] for step in sorted(scores)]
        step_base, time_base = last_step, last_time
    return series


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _distinct(paths: Sequence[Path]) -> list[str]:
    """Find the shortest names of the files' folders that differ."""
    folders = [path.resolve().parent.parts for path in paths]
    deepest = max(map(len, folders), default=1)
    candidates = [["/".join(parts[-depth:]) for parts in folders] for depth in range(1, deepest + 1)]
    return next(
        (names for names in candidates if len(set(names)) == len(names)), [str(Path(*parts)) for parts in folders]
    )


def _draw(series: Sequence[_Series], png: Path, title: str, target: float | None) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise PluginError(
            "matplotlib cannot be imported",
            code="plugin.requirement",
            expected="the package matplotlib, which draws learning curves",
            found=str(error),
            fix="install jackfield[train]",
        ) from error

    figure = Figure(figsize=_SIZE, dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1.0))
    figure.suptitle(_plain(title), fontsize=15, fontweight="bold")
    steps, seconds = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    _draw_scores(steps, series, 0, "trainer steps", target)
    _draw_scores(seconds, series, 1, "seconds since the start", target)
    _draw_training(figure.add_subplot(grid[1, :]), series)
    _legend(figure, series)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    replace_file(png, picture.getvalue())


def _draw_scores(axes: Axes, series: Sequence[_Series], unit: int, x_label: str, target: float | None) -> None:
    """Draw scores over steps (unit 0) or seconds (unit 1)."""
    _dress(axes, x_label, "score on held-out tasks", f"Evaluation over {('steps', 'seconds')[unit]}")
    if all(0 <= point[2] <= 1 for one in series for point in one.score):
        axes.set_ylim(-0.02, 1.04)
    if not any(one.score for one in series):
        _say(axes, "no evaluation was recorded")
        return
    for one in series:
        x, y = [point[unit] for point in one.score], [point[2] for point in one.score]
        axes.plot(x, y, color=one.colour, marker="o", markersize=4, linewidth=1.8)
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    last = sorted(one.score[-1][2] for one in series if one.score)
    note = f"last {last[0]:.3f}" + (f" to {last[-1]:.3f}" if len(last) > 1 else "")
    axes.set_title(note, fontsize=11, fontweight="bold", loc="right")
    if target is not None:
        axes.axhline(target, color=_QUIET, linestyle="--", linewidth=1)
        axes.annotate(f"target {target:g}", (0, target), xycoords=axes.get_yaxis_transform(), **_NOTE)
    # Each seed may change phase at a second of its own; as many lines would say nothing.
    phases = [phase for one in series for phase in one.phases]
    places = {(phase[0], phase[2]) if unit == 0 else (phase[1], "") for phase in phases}
    if unit == 0 or len(places) == 1:
        _draw_phases(axes, sorted(places))


def _draw_phases(axes: Axes, places: Sequence[tuple[float, str]]) -> None:
    names: dict[float, set[str]] = {}
    for x, name in places:
        names.setdefault(x, set()).add(name)
    for x, begun in names.items():
        axes.axvline(x, color=_QUIET, linestyle=":", linewidth=1.2)
        if len(begun) == 1 and begun != {""}:
            name = f"{_plain(next(iter(begun)))} begins"
            axes.annotate(name, (x, 0), xycoords=axes.get_xaxis_transform(), **_NOTE)


def _draw_training(axes: Axes, series: Sequence[_Series]) -> None:
    rewarded = any(one.reward for one in series)
    quantity = "reward" if rewarded else "loss"
    _dress(axes, "trainer steps", f"mean {quantity} of the batch", f"Training {quantity}")
    if not any(one.reward or one.loss for one in series):
        _say(axes, "no step was recorded")
        return
    for one in series:
        points = one.reward if rewarded else one.loss
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=one.colour, linewidth=0.9, alpha=0.28)
        axes.plot(x, _moving_mean(y, _window(series)), color=one.colour, linewidth=2)
    axes.margins(x=0.02)


def _legend(figure: Figure, series: Sequence[_Series]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=one.colour, linewidth=2, marker="o", markersize=4, label=_plain(one.label))
        for one in series
    ]
    if any(one.reward or one.loss for one in series):
        handles.append(Line2D([], [], color="black", linewidth=0.9, alpha=0.35, label="each step"))
        window = _window(series)
        handles.append(Line2D([], [], color="black", linewidth=2, label=f"mean of {window} steps around"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False)


def _dress(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_QUIET)


def _window(series: Sequence[_Series]) -> int:
    """Choose the steps in the moving mean: about a tenth of the longest curve, an odd number from 1 to 51."""
    longest = max(len(one.reward) or len(one.loss) for one in series)
    return 2 * min(25, longest // 20) + 1


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Compute the mean of each value and its neighbours, as many on either side, fewer towards the ends."""
    means = []
    for index in range(len(values)):
        reach = min(window // 2, index, len(values) - 1 - index)
        means.append(sum(values[index - reach : index + reach + 1]) / (2 * reach + 1))
    return means


def _plain(text: str) -> str:
    """Return a text in which matplotlib sees no formulas, and a legend no private name."""
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")
