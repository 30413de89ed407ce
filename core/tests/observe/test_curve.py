from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from jackfield.errors import PluginError
from jackfield.files import read_lines
from jackfield.observe import display, plot_learning_curve


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list that collects the saved figures, so that tests can inspect them."""
    saved: list[Figure] = []
    save = Figure.savefig

    def remember(figure: Figure, *arguments: Any, **named: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **named)

    monkeypatch.setattr(Figure, "savefig", remember)
    return saved


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def warm_up(path: Path) -> Path:
    steps = [{"kind": "step", "step": step, "time": step / 2, "policy/loss": 1 / step} for step in range(1, 5)]
    return write(path, [*steps, {"kind": "evaluation", "step": 4, "time": 2.0, "score": 0.3}])


def grpo(path: Path, last: float) -> Path:
    return write(
        path,
        [
            {"kind": "evaluation", "step": 0, "time": 0.5, "score": 0.3},
            {"kind": "weights", "step": 1, "time": 1.0, "seconds": 0.1},
            {"kind": "step", "step": 1, "time": 1.0, "reward/mean": 0.4, "policy/loss": 0.0},
            {"kind": "step", "step": 2, "time": 2.0, "reward/mean": None, "not_finite": ["reward/mean"]},
            {"kind": "step", "step": 3, "time": 3.0, "reward/mean": 0.6, "policy/loss": 0.0},
            {"kind": "evaluation", "step": 3, "time": 3.0, "score": 0.1},
            {"kind": "evaluation", "step": 3, "time": 4.0, "score": last},  # repeated after a resume
        ],
    )


def is_a_picture(png: Path) -> bool:
    with Image.open(png) as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 20) or []
        assert (1200, 700) == picture.size
    return len(colours) > 20


def test_phases_follow_each_other_and_seeds_lie_beside_each_other(tmp_path, figures):
    seeds = [
        [
            warm_up(tmp_path / f"seed{seed}/warmup/metrics.jsonl"),
            grpo(tmp_path / f"seed{seed}/grpo/metrics.jsonl", last),
        ]
        for seed, last in enumerate((0.9, 0.8))
    ]
    png = tmp_path / "pictures/curve.png"
    plot_learning_curve(seeds, png, "Costs $5 & _more_", target=0.85)

    assert is_a_picture(png)
    assert [png] == list(png.parent.iterdir())
    (figure,) = figures
    over_steps, over_seconds, reward = figure.axes
    assert [4, 4, 7] == over_steps.lines[0].get_xdata().tolist()
    assert [2.0, 2.5, 6.0] == over_seconds.lines[0].get_xdata().tolist()
    assert [[0.3, 0.3, 0.9], [0.3, 0.3, 0.8]] == [line.get_ydata().tolist() for line in over_steps.lines[:2]]
    assert [5, 7] == reward.lines[0].get_xdata().tolist()
    assert "mean reward of the batch" == reward.get_ylabel()
    assert ["seed0/grpo", "seed1/grpo"] == [text.get_text() for text in figure.legends[0].get_texts()][:2]
    assert "last 0.800 to 0.900" == over_steps.get_title(loc="right")
    assert {"target 0.85", "grpo begins"} == {text.get_text() for text in over_steps.texts}


def test_a_supervised_run_shows_its_loss(tmp_path, figures):
    plot_learning_curve([warm_up(tmp_path / "warmup/metrics.jsonl")], tmp_path / "curve.png", "warm-up", labels=["sft"])

    loss = figures[0].axes[2]
    assert "mean loss of the batch" == loss.get_ylabel()
    assert [1, 1 / 2, 1 / 3, 1 / 4] == loss.lines[0].get_ydata().tolist()
    assert "sft" == figures[0].legends[0].get_texts()[0].get_text()


def test_scores_outside_of_0_to_1_have_room(tmp_path, figures):
    lines = [{"kind": "evaluation", "step": step, "time": step, "score": -3.0 * step} for step in range(3)]
    plot_learning_curve([write(tmp_path / "a/metrics.jsonl", lines)], tmp_path / "curve.png", "a")

    assert figures[0].axes[0].get_ylim()[0] <= -6
    assert "score on held-out tasks" == figures[0].axes[0].get_ylabel()


def test_nothing_recorded_is_said(tmp_path, figures):
    plot_learning_curve([write(tmp_path / "a/metrics.jsonl", [])], tmp_path / "curve.png", "empty")

    texts = [text.get_text() for axes in figures[0].axes for text in axes.texts]
    assert ["no score was recorded"] * 2 + ["no policy/loss was recorded"] == texts


def test_a_missing_file_and_missing_labels_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics file"):
        plot_learning_curve([tmp_path / "metrics.jsonl"], tmp_path / "curve.png", "")
    path = warm_up(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="1 curves, but 2 labels"):
        plot_learning_curve([path], tmp_path / "curve.png", "", labels=["a", "b"])


def test_the_mean_is_of_neighbours_on_both_sides():
    assert [3, 5, 9, 19, 33] == display._moving_mean([3, 3, 9, 15, 33], 3)
    assert [3, 5, 63 / 5, 19, 33] == display._moving_mean([3, 3, 9, 15, 33], 5)
    assert [1, 7] == display._moving_mean([1, 7], 1)


@pytest.mark.parametrize("error", [None, RuntimeError("no")])
def test_a_run_draws_at_its_end_even_after_a_failure(make_run, figures, error):
    run = make_run(curve=True).start()
    run.evaluate(0, score=0.25)
    run.step(1, **{"reward/mean": 0.5, "policy/loss": math.nan})
    run.evaluate(1, score=0.5)
    run.end(steps=1, error=error)

    assert is_a_picture(run.folder / "learning_curve.png")
    assert [0.25, 0.5] == figures[0].axes[0].lines[0].get_ydata().tolist()
    assert [0.0, 1.0] == figures[0].axes[1].lines[0].get_xdata().tolist()


def test_a_resumed_run_draws_the_earlier_part_too(make_run, figures):
    first = make_run(metrics_file=True).start()
    for step in (1, 2, 3):
        first.step(step, seconds=10, **{"reward/mean": 0.5})
        first.evaluate(step, score=step / 10)
    second = make_run(metrics_file=True, curve=True).start(first_step=2)
    second.step(3, seconds=1, **{"reward/mean": 0.6})
    second.evaluate(3, score=0.9)
    second.end()

    assert [(10, 0.1), (20, 0.2), (21, 0.9)] == [tuple(p) for p in figures[0].axes[1].lines[0].get_xydata().tolist()]
    assert 6 == len(list(read_lines(second.folder / "metrics.jsonl")))


def test_a_run_that_never_started_draws_nothing(make_run):
    run = make_run(curve=True)
    run.end(steps=0, error=RuntimeError("no"))

    assert not run.folder.exists()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PluginError) as caught:
        plot_learning_curve([warm_up(tmp_path / "metrics.jsonl")], tmp_path / "curve.png", "")
    assert "plugin.requirement" == caught.value.code
