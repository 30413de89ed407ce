"""Compare two models of a bench task by task: python compare_models.py runs/benched/bench base step_00000100 hard"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import pyarrow.parquet

from jackfield.algorithms.repeated import interval


def task_means(folder: Path, model: str, name: str) -> dict[str, float]:
    """Return the mean score of each task that has one."""
    results = json.loads((folder / "bench.json").read_text())["results"]
    table = next(each["samples"] for each in results if (each["model"], each["set"]) == (model, name))
    scores: dict[str, list[float]] = {}
    for row in pyarrow.parquet.read_table(folder / table).to_pylist():
        if row["score"] is not None:
            scores.setdefault(row["task"], []).append(row["score"])
    return {task: fmean(each) for task, each in scores.items()}


def difference(folder: Path, first: str, second: str, name: str) -> tuple[float, tuple[float, float] | None]:
    """Return how much better the second model is, and the 95 % confidence interval of the paired differences."""
    before, after = (task_means(folder, model, name) for model in (first, second))
    differences = [after[task] - before[task] for task in before.keys() & after.keys()]
    return fmean(differences), interval(differences)


if __name__ == "__main__":
    gain, ends = difference(Path(sys.argv[1]), *sys.argv[2:])
    print(f"{gain:+.3f}", "" if ends is None else f"({ends[0]:+.3f} to {ends[1]:+.3f})")
