"""The simulator: random short runs with random faults per second of a core, and the time of a thousand of them.

    python benchmarks/simulation.py [--seeds 1000] [--processes 2] [--quick] [--json]

A seed is a run of three to six steps under a random schedule, with one to four faults; its invariants are checked. One
that fails ends the benchmark with its error. ``--quick`` takes 60 seeds, unless others are given. With ``--json`` the
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "testing"))

from jackfield.simulation import check_seeds
from jackfield_random_runs import random_settings

LIMIT = 60.0  #: seconds for a thousand seeds on two cores


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="default: 1000; with --quick 60")
    parser.add_argument("--processes", type=int, default=2, help="forked processes")
    parser.add_argument("--quick", action="store_true", help="few seeds")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    seeds = arguments.seeds or (60 if arguments.quick else 1000)
    found = measure(seeds, arguments.processes)
    print(
        f"{seeds} seeds in {found['seconds']:.1f} s on {arguments.processes} processes: {found['cpu_ms']:.0f} ms of a "
        f"core for each, {1000 * found['seconds'] / seeds:.0f} s for a thousand (at most {LIMIT:.0f} s)"
    )
    if arguments.json:
        print(
            json.dumps({"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0], **found})
        )


def measure(seeds: int, processes: int) -> dict[str, Any]:
    """Return wall-clock seconds and processor milliseconds per seed, without the imports."""
    check_seeds(range(1), random_settings)
    wall, cpu = time.perf_counter(), _processor_seconds()
    check_seeds(range(seeds), random_settings, processes=processes)
    seconds = time.perf_counter() - wall
    milliseconds = 1000 * (_processor_seconds() - cpu) / seeds
    return {"seeds": seeds, "processes": processes, "seconds": round(seconds, 2), "cpu_ms": round(milliseconds, 1)}


def _processor_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in each)


if __name__ == "__main__":
    main()
