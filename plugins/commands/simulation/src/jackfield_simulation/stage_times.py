"""Stage times for a plan: written by hand and checked, or read from the metrics of an on-policy run."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from jackfield.config import RunConfig, load_config
from jackfield.errors import ConfigError, did_you_mean
from jackfield_simulation.settings import Duration, Times

STAGES = ("generate", "reward", "log_probs", "update", "sync")
FURTHER = ("environment",)  #: stages that a file may have
#: Distributions of :class:`random.Random`, and the number of their arguments.
DISTRIBUTIONS = {"uniform": 2, "lognormvariate": 2, "gauss": 2, "expovariate": 1, "triangular": 3, "gammavariate": 2}
_TRIES = 100  #: draws with which a distribution is tried
_LONGEST = 1e7  #: seconds of a stage
_FORM = 'a number of seconds from 0, a list of them, or a distribution as {"uniform": [1, 40]}'
_PASSES = ("old_log_probs", "reference_log_probs", "values")


def read_times(given: str | None, config: RunConfig) -> tuple[Times, str]:
    """Return stage times and where they are from: a JSON file, a run's folder or metrics file, or the config's folder.

    What is not there, cannot be read, or is no time is refused.
    """
    path = Path(config.folder if given is None else given)
    metrics = path / "metrics.jsonl" if given is None or path.is_dir() else path
    if metrics.suffix == ".jsonl" and metrics.is_file():
        return _measured(metrics, config), str(metrics)
    if given is None or metrics != path:
        raise ConfigError(
            "there are no stage times to plan with",
            code="config.missing-key",
            where="--times",
            expected="a JSON file of stage times, or the folder of a run with metrics",
            found=f"no {metrics}",
            fix=f"write seconds of {', '.join(STAGES)} to a file, or run some on-policy steps first",
        )
    if not path.is_file():
        expected = "a JSON file of stage times, or the folder of a run with metrics"
        raise _refused("missing-key", "there is no such file", "--times", expected, str(path))
    return written_times(_json(path.read_text(encoding="utf-8", errors="replace"), str(path)), str(path)), str(path)


def written_times(values: Any, where: str) -> Times:
    """Check times that were written by hand: all stages, perhaps further ones, and nothing else."""
    if not isinstance(values, Mapping):
        raise _refused("wrong-type", "stage times are not an object", where, "an object of stages", values)
    for name in values:
        if name not in (known := (*STAGES, *FURTHER)):
            what = f"a stage {name!r} is unknown{did_you_mean(name, known)}"
            raise _refused("unknown-key", what, f"{where}: {name}", ", ".join(known), name)
    if missing := [name for name in STAGES if name not in values]:
        what = f"the stage {missing[0]!r} has no time"
        raise _refused("missing-key", what, f"{where}: {missing[0]}", ", ".join(STAGES), ", ".join(values) or "nothing")
    return Times(**{name: duration(value, f"{where}: {name}") for name, value in values.items()})


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused("unreadable", "stage times cannot be read as JSON", where, "JSON", error) from error


def duration(value: Any, where: str) -> Duration:
    """Return a duration that was read; refuse what is none."""
    if isinstance(value, Mapping):
        return _distribution(value, where)
    if isinstance(value, list):
        if not value:
            raise _refused("invalid-value", "a list of seconds is empty", where, _FORM, value)
        return [_seconds(each, f"{where}[{number}]") for number, each in enumerate(value)]
    return _seconds(value, where)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused("wrong-type", "a stage time is no number", where, _FORM, value)
    if not 0 <= value <= _LONGEST:  # also not a NaN
        raise _refused("invalid-value", "a stage cannot take this time", where, f"0 to {_LONGEST:.0f} seconds", value)
    return float(value)


def _distribution(value: Mapping[str, Any], where: str) -> Duration:
    method, arguments = next(iter(value.items()), ("", None))
    if len(value) != 1 or method not in DISTRIBUTIONS:
        hint = did_you_mean(method, DISTRIBUTIONS)
        expected = f"one of {', '.join(DISTRIBUTIONS)}"
        raise _refused("unknown-key", f"a distribution is unknown{hint}", where, expected, dict(value))
    count, place = DISTRIBUTIONS[method], f"{where}.{method}"
    arguments = arguments if isinstance(arguments, list) else []
    numbers = all(type(each) in (int, float) for each in arguments)
    if not numbers or len(arguments) != count:
        raise _refused("wrong-type", f"{method} has other arguments", place, f"a list of {count} numbers", arguments)
    draw, drawn = random.Random(0), [inf]
    with suppress(ArithmeticError, ValueError):
        drawn = [float(getattr(draw, method)(*arguments)) for _ in range(_TRIES)]
    finite = all(abs(each) <= _LONGEST for each in [*arguments, *drawn])
    if not finite or (method == "uniform" and min(arguments) < 0) or max(drawn) < 0:
        expected = "arguments that give finite seconds, not negative"
        raise _refused("invalid-value", f"{method} does not give times", place, expected, arguments)
    return {method: arguments}


def _refused(code: str, what: str, where: str, expected: str, found: object) -> ConfigError:
    shown, fix = (
        repr(found) if not isinstance(found, str | Exception) else found,
        "the guide on schedules has an example",
    )
    shown = shown if len(str(shown)) <= 200 else f"{str(shown)[:200]}…"
    return ConfigError(what, code=f"config.{code}", where=where, expected=expected, found=shown, fix=fix)


# -- times of a run


def _measured(file: Path, config: RunConfig) -> Times:
    """Return the times of an on-policy run's steps, without the first one if there are others."""
    own = file.parent / "config.yaml"
    run = load_config(own) if own.is_file() else config
    steps = _steps(file)
    if run.schedule.stream_mini_batches or any(step.get("staleness/max") for step in steps):
        what, expected = (
            "the stages of this run overlap, so its metrics are not their times",
            "metrics of on-policy steps",
        )
        raise _refused("invalid-value", what, str(file), expected, "stale samples, or streamed mini-batches")
    updates = run.algorithm.mini_batches * run.algorithm.epochs
    generate = [step["seconds/rollout"] for step in steps]
    passes = [step[f"seconds/{name}"] for step in steps for name in _PASSES if f"seconds/{name}" in step]
    engines = ("update_actor", "update_critic")
    after = {"update_actor": "seconds/initial_kl"}  # a pass that follows the updates
    update = [
        (step[f"seconds/{name}"] + step.get(after.get(name, ""), 0.0)) / updates
        for step in steps
        for name in engines
        if f"seconds/{name}" in step
    ]
    return Times(
        generate=lambda stage, batch, *place: generate[batch % len(generate)],  # of a whole batch
        reward=[step.get("waits/trainer/columns", 0.0) for step in steps],
        log_probs=passes or 0.0,
        update=update,
        sync=[step.get("seconds/publish_weights", 0.0) for step in steps],
    )


def _steps(file: Path) -> Sequence[Mapping[str, float]]:
    found = list[Mapping[str, float]]()
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        values, where = _json(line, f"{file}:{number}"), f"{file}:{number}"
        if not isinstance(values, Mapping):
            raise _refused("wrong-type", "a line of metrics is not an object", where, "an object", values)
        if values.get("kind") == "step":
            found.append(
                {name: _seconds(value, f"{where}: {name}") for name, value in values.items() if _is_time(name)}
            )
    found = [step for step in found[len(found) > 1 :] if {"seconds/rollout", "seconds/update_actor"} <= step.keys()]
    if not found:
        expected = "lines of steps with seconds/rollout and seconds/update_actor"
        raise _refused("missing-key", "no step with stage times is there", str(file), expected, "none")
    return found


def _is_time(name: str) -> bool:
    return name.startswith(("seconds/", "waits/")) or name == "staleness/max"
