"""The command ``jackfield plan``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import click

from jackfield.cli.commands import config_arguments, json_option, role_option

if TYPE_CHECKING:
    from jackfield_simulation.planning import Plan, Prediction


@click.command()
@config_arguments
@click.option(
    "--times", metavar="PATH", help="JSON file of stage times, or folder or metrics file of an on-policy run."
)
@click.option(
    "--steps", type=click.IntRange(4, 200), default=8, show_default=True, help="Steps to measure of each schedule."
)
@role_option
@json_option
def plan(file: str, overrides: tuple[str, ...], times: str | None, steps: int, role: Any, as_json: bool) -> None:
    """Predict step time, idle shares, waits and staleness of the schedule of a config FILE, and of others.

    OVERRIDES are settings such as schedule.sync_offset=1. The real training loop is simulated with stage times, by
    default with those in the metrics of the run's folder. The command takes 20 seconds or a little more.
    """
    from jackfield.config import load_config
    from jackfield.plugins import discover
    from jackfield_simulation.planning import make_plan
    from jackfield_simulation.stage_times import read_times

    config, registry = load_config(file, overrides, served=role is not None), discover()
    found, source = read_times(times, config)
    made = make_plan(config, registry, found, steps, role or "all")
    click.echo(json.dumps(as_plain(made, source), indent=2) if as_json else as_text(made, source))


def as_plain(made: Plan, source: str) -> dict[str, Any]:
    """Return a plan as ``--json`` prints it."""
    return {
        "times": source,
        "own": _fields(made.own),
        "others": [_fields(each) for each in made.others],
        "best": {**_fields(made.best), "overrides": made.best.overrides},
        "left_out": list(made.left_out),
        "notes": list(made.notes),
    }


def _fields(one: Prediction) -> dict[str, Any]:
    return attrs.asdict(one, value_serializer=lambda _, __, each: round(each, 4) if isinstance(each, float) else each)


def as_text(made: Plan, source: str) -> str:
    """Return a plan as tables and sentences."""
    own, best = made.own, made.best
    lines = [
        f"{own.name}, placement {own.placement}, times from {source}:",
        f"  a step takes {_time(own.step_time)}, the run {_time(own.run_time)}",
        f"  idle: {', '.join(f'{lane} {share:.0%}' for lane, share in own.idle.items())}",
        *(f"  per step, {who}: {_time(seconds)}" for who, seconds in own.waits.items() if seconds >= 0.005),
        f"  staleness: {own.staleness_mean:.2f} on average, at most {own.staleness_max:.0f} of {own.staleness_bound}",
        "",
        *_table([own, *made.others]),
        *(f"left out: {each['name']}: {each['reason']}" for each in made.left_out),
        *(f"note: {each}" for each in made.notes),
        "",
    ]
    if best is own:
        return "\n".join([*lines, "best: the schedule of this file"])
    gain = 1 - best.step_time / own.step_time if own.step_time else 0.0
    cost = f"a token may be {best.staleness_bound} steps old, {best.staleness_mean:.2f} on average"
    return "\n".join(
        [*lines, f"best: {best.name}, {gain:.0%} less time per step; {cost}", f"  {' '.join(best.overrides)}"]
    )


def _table(rows: list[Prediction]) -> list[str]:
    """Return the schedules by step time."""
    head = ["STEP", "RUN", "REPLICAS IDLE", "ENGINE IDLE", "STALENESS", "SCHEDULE"]
    cells = [head]
    for one in sorted(rows, key=lambda each: (round(each.step_time, 3), each.staleness_bound)):
        idle = [f"{one.idle[lane]:.0%}" for lane in ("replicas", "engine")]
        staleness = f"{one.staleness_mean:.2f} of {one.staleness_bound}"
        cells.append([_time(one.step_time), _time(one.run_time), *idle, staleness, one.name])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 600 else f"{seconds / 3600:.2f} h"
