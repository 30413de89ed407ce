"""Plans, dry runs and thresholds as lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jackfield_data_plan.cleaning import Cleaned
from jackfield_data_plan.parts import plain
from jackfield_data_plan.planning import Plan
from jackfield_data_plan.stage_reports import as_lines
from jackfield_data_plan.thresholds import Tightened


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield how a plan came about, its YAML, and the dry run."""
    if plan.planner == "keywords":
        yield "This is a draft by keywords: no model was asked (--model-url)."
        yield from (f"  understood: {plain(words)!r} → {operator}" for words, operator in plan.used.items())
        if plan.not_understood:
            yield f"  not understood: {plain(', '.join(plan.not_understood))}"
    else:
        answers = "answer" if plan.answers == 1 else "answers"
        yield f"This is a plan of the model {plain(plan.planner)}, after {plan.answers} {answers}. It is valid."
        yield from [f"  it says: {plan.explanation}"] if plan.explanation else []
    yield from (f"  note: {plain(note, 400)}" for note in [*plan.notes, *plan.trial.get("notes", ())])
    yield from ["", plan.yaml.rstrip(), "", *trial_lines(plan.trial)]


def trial_lines(trial: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a dry run found."""
    read = next((stage["read"] for stage in trial["stages"] if "read" in stage), 0)
    yield f"Dry run on {read} rows:"
    for number, stage in enumerate(trial["stages"], 1):
        head = f"{number}. {stage['operator']} ({stage['type']})"
        if "skipped" in stage:
            yield f"{head}: skipped, as {plain(stage['skipped'])}"
        elif "error" in stage:
            yield f"{head}: failed: {plain(stage['error']['message'], 400)}"
        else:
            names = ("removed", "set_aside", "made")
            told = "".join(f", {stage[name]} {name.replace('_', ' ')}" for name in names if stage[name])
            yield f"{head}: {stage['read']} → {stage['kept']} rows{told}"
            yield from stage["lines"]
            yield from (f"    {_example(each)}" for each in stage["examples"])


def _example(row: Mapping[str, Any]) -> str:
    for what in ("removed", "set_aside"):
        if what in row:
            return f"{row['row']} {what.replace('_', ' ')}: {row[what]}; {_values(row['before'])}"
    place = row["place"]
    moved = "" if place["before"] in (None, place["after"]) else f", from place {place['before']} to {place['after']}"
    before = f"{_values(row['before'])} → " if row["before"] else ""
    return f"{row['row']}{moved}: {before}{_values(row['after'])}" if row["after"] else f"{row['row']}{moved}"


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{plain(name, 40)}: {plain(_text(value), 80)}" for name, value in values.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tightened_lines(found: Tightened) -> Iterator[str]:
    """Yield what other thresholds keep."""
    changes = ", ".join(f"{name}: {found.before[name]} → {value}" for name, value in found.after.items())
    yield f"{found.operator} (operator {found.number + 1}): {changes}"
    shares = [
        f"{kept} of {found.rows} rows ({kept / max(found.rows, 1):.1%})"
        for kept in (found.kept_before, found.kept_after)
    ]
    yield f"  kept: {shares[0]} before, {shares[1]} after"
    for title, rows in (("removed now", found.removed), ("kept again", found.restored)):
        for row in rows:
            values = {name: value for name, value in row["values"].items() if name != "_row"}
            yield f"  {title}: {row['row']} ({row['why']}); {_values(values)}"


def cleaned_lines(found: Cleaned) -> Iterator[str]:
    """Yield what came of the rounds."""
    yield from ["", "Stages of the last round:", *as_lines(found.rounds[-1].reports), ""]
    objective = {None: "", True: "", False: "; the objective is not met"}[found.met]
    yield f"{len(found.rounds)} rounds, {found.rounds[-1].rows} rows are left: {found.ended}{objective}"
