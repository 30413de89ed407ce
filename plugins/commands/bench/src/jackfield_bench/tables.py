"""The results of a bench as text, JSON and Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
from pyarrow import parquet

from jackfield.files import replacing
from jackfield.plugins.hooks import SampleRecord
from jackfield_bench.models import Model

_SAMPLES = pyarrow.schema(
    {
        "model": pyarrow.string(),
        "step": pyarrow.int64(),
        "set": pyarrow.string(),
        "task": pyarrow.string(),
        "rollout": pyarrow.int64(),
        "prompt": pyarrow.string(),
        "response": pyarrow.string(),
        "ground_truth": pyarrow.string(),
        "score": pyarrow.float64(),
        "error": pyarrow.string(),
        "response_tokens": pyarrow.int64(),
        "metrics": pyarrow.string(),
    }
)
_OF_ALL = ("mean", "maj", "best", "worst")  #: metrics of all rollouts, in the order of a table's columns
_PASS = re.compile(r"pass@\d+")


def write_samples(file: Path, model: Model, name: str, samples: Sequence[SampleRecord]) -> None:
    """Write the samples of an evaluation as Parquet, with other metrics than the score as JSON."""
    of_all = {"model": model.name, "step": model.step, "set": name}
    rows = [{**of_all, **_row(sample)} for sample in samples]
    with replacing(file) as partial:
        parquet.write_table(pyarrow.Table.from_pylist(rows, _SAMPLES), partial)


def _row(sample: SampleRecord) -> dict[str, Any]:
    tags = dict(sample.tags)
    own = {key: tags.pop(key, None) for key in ("task", "rollout", "ground_truth", "error", "response_tokens")}
    return {
        **own,
        "prompt": sample.prompt,
        "response": sample.response,
        "score": sample.reward,
        "metrics": json.dumps(tags),
    }


def best_model(results: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the model with the highest mean of ``score`` over the sets, the earliest of equals; None: no results."""
    scores: dict[str, list[float]] = {}
    for each in results:
        scores.setdefault(each["model"], []).append(each["metrics"]["score"])
    return max(scores, key=lambda model: fmean(scores[model]), default=None)


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results as one JSON object, with the best model of each set and of all sets."""
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for each in results:
        by_set.setdefault(each["set"], []).append(each)
    plain = [{key: value for key, value in each.items() if key != "key"} for each in results]
    best = {name: best_model(own) for name, own in by_set.items()}
    return {"best": best_model(results), "best_by_set": best, "results": plain}


def text_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as lines of text: a row for each model and set, and the best model.

    ``@K`` is of all rollouts, ``K`` of them per task.
    """
    found, draws = summary(results), {name for each in results for name in each["metrics"] if _PASS.fullmatch(name)}
    passes = sorted(draws, key=lambda name: int(name.partition("@")[2]))
    rows = [
        ["MODEL", "SET", "TASKS", "K", "FAILED", *(f"{name}@K".upper() for name in _OF_ALL), *map(str.upper, passes)]
    ]
    for each in results:
        model, metrics, k = each["model"], each["metrics"], each["rollouts"]
        marked = f"{model} *" if found["best_by_set"][each["set"]] == model else model
        first = [marked, each["set"], f"{metrics['tasks']:g}", str(k), f"{metrics['failed']:.1%}"]
        rows.append([*first, *(estimate(metrics, name) for name in (*(f"{of}@{k}" for of in _OF_ALL), *passes))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return (
        "\n".join([*lines, f"best: {found['best'] or 'none'} (highest mean score over the sets; * in its set)"]) + "\n"
    )


def estimate(metrics: Mapping[str, float], name: str) -> str:
    """Return a metric with its interval as text; ``-`` if it is absent."""
    if name not in metrics:
        return "-"
    ends = [f"{metrics[f'{name}/{end}']:.3f}" for end in ("low", "high") if f"{name}/{end}" in metrics]
    return f"{metrics[name]:.3f}" + (f" ({' to '.join(ends)})" if ends else "")


def result_line(result: Mapping[str, Any]) -> str:
    """Return one line of progress about a result."""
    metrics, score = result["metrics"], estimate(result["metrics"], f"mean@{result['rollouts']}")
    failed = f", {metrics['failed']:.1%} without a score" if metrics["failed"] else ""
    return f"{result['model']} on {result['set']}: mean@{result['rollouts']} {score}{failed}, {result['seconds']:.0f} s"
