"""What schedules gain: seconds per step beside the analytic bound and the seeds' figures, simulated and really running.

    python benchmarks/schedules.py [--only recipe trinity] [--kinds simulated real] [--scale N] [--quick] [--json]

The first workload is that of the recipe "Asynchronous Reward Agent": steps of 160 s on one shared device, of which
120 s are computation, and rewards that take 1 to 40 s per sample. The others are the stage times behind the tables of
the Trinity-RFT report, with separate devices for rollouts and training. ``_schedules_bound.py`` has their times, the
plans, and the bound: the longest path through a step, or the work of the busiest device.

``simulated`` runs the real schedule, queue, explorer, reward pipeline and trainer on virtual time. ``real`` runs
``jackfield.compose.run`` with an engine, a rollout server and a reward that sleep, everything else included. Its
seconds are divided by ``--scale``: by default by 100, or by 20 and 50 where steps are short. Figures are seconds of the
workload per step, between the ends of two steps in the middle of the run. ``--quick`` takes few steps, and runs one
plan really.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _schedules_bound as bounds
from _schedules_bound import Plan, Workload

from jackfield.errors import JackfieldError
from jackfield.imports import own_process

_QUICK = {("recipe", "update pipeline")}
#: Seconds of a workload in a second of a real run, so that a step takes a second or more.
_SCALES = {"GSM8K 1.5B": 20.0, "GSM8K 7B": 20.0, "ALFWorld batch 4": 50.0}


def window(work: Workload, plan: Plan, quick: bool = False) -> tuple[int, int]:
    """Return the numbers of completed steps between which time is taken, both at a sync."""
    if plan.k > 2:
        return (10, 20) if quick and not work.tail else (10, 30)
    if quick:
        return 2, 4
    return (4, 14) if work.shared else (4, 20)


def measured(
    work: Workload, plan: Plan, chosen: tuple[int, int], scale: float, kinds: Sequence[str]
) -> dict[str, float]:
    """Return the seconds per step of a window: of the bound, of a simulated and of a real run."""
    found = {"bound": bounds.bound(work, plan, chosen)}
    if "simulated" in kinds:
        from _schedules_simulated import simulate

        found["simulated"] = simulate(work, plan, chosen)
    if "real" in kinds:
        from _schedules_real import really_run

        with tempfile.TemporaryDirectory() as folder:
            found["real"] = scale * really_run(work, plan, chosen, scale, Path(folder))
    return found


def saving(base: float, seconds: float) -> float:
    """Return by how many per cent a step is longer than the baseline's."""
    return 100 * (seconds / base - 1)


def speed_up(base: float, seconds: float) -> float:
    """Return how many times as fast a step is as the baseline's."""
    return base / seconds


def compared(
    work: Workload,
    plans: Mapping[Plan, float],
    figure: Callable[[float, float], float],
    kinds: Sequence[str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Measure the plans of a workload, print a row for each, and return the figures relative to the first one."""
    scale, base, table = arguments.scale or _SCALES.get(work.name, 100.0), dict[str, float](), dict[str, Any]()
    for plan, seed in plans.items():
        runs = [
            kind for kind in kinds if kind == "simulated" or not arguments.quick or (work.name, plan.name) in _QUICK
        ]
        found = measured(work, plan, window(work, plan, arguments.quick), scale, runs)
        base = base or found
        ours = {name: figure(base[name], seconds) for name, seconds in found.items() if name in base}
        row: dict[str, Any] = {
            "ours": ours.get("real", ours.get("simulated")),
            "simulated": ours.get("simulated"),
            "seed": seed,
            "bound": ours["bound"],
            "seconds_per_step": found,
            "share_of_bound": {name: found["bound"] / found[name] for name in found if name != "bound"},
        }
        table[plan.name] = row
        texts = [
            f"{name} {seconds:7.2f} s ({row['share_of_bound'].get(name, 1):.3f})" for name, seconds in found.items()
        ]
        figures = [f"{name} {value:.2f}" for name, value in ours.items()]
        print(f"{work.name:18} {plan.name:20} {'  '.join(texts)}  |  {', '.join(figures)}, seed {seed:g}", flush=True)
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("recipe", "trinity"), default=("recipe", "trinity"))
    parser.add_argument("--kinds", nargs="+", choices=("simulated", "real"), default=("simulated", "real"))
    parser.add_argument("--workloads", nargs="+", help="Trinity's by name; default: all")
    parser.add_argument("--scale", type=float, help="seconds of a workload in a second of a real run")
    parser.add_argument("--quick", action="store_true", help="run one plan really, and simulate all")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    own_process()  # as `jackfield run` does
    loads, found = [os.getloadavg()[0]], dict[str, Any](recipe={}, trinity={})
    try:
        if "recipe" in arguments.only:
            found["recipe"] = compared(bounds.RECIPE, bounds.RECIPE_PLANS, saving, arguments.kinds, arguments)
            found["recipe"]["both"]["seed_other_models"] = bounds.OTHER_MODELS
        for work, seeds in bounds.TRINITY.items() if "trinity" in arguments.only else ():
            if arguments.workloads is None or work.name in arguments.workloads:
                plans = dict(zip(bounds.TRINITY_PLANS, seeds, strict=True))
                found["trinity"][work.name] = compared(work, plans, speed_up, arguments.kinds, arguments)
    except JackfieldError as error:
        sys.exit(str(error))
    loads.append(os.getloadavg()[0])
    print(f"load average {loads[0]:.1f} before, {loads[1]:.1f} after")
    if arguments.json:
        print(json.dumps({**found, "load_average": loads}))


if __name__ == "__main__":
    main()
