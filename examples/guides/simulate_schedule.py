"""Compare two schedules of a run on virtual time, then check that no fault breaks either of them."""

import random

from jackfield.simulation import FAULTS, PHASES, ROLES, Fault, SimulationSettings, Times, check_seeds, simulate

RUN = {
    "data": {"groups_per_batch": 4, "rollouts_per_group": 2},
    "algorithm": {"mini_batches": 2},
    "checkpoint": {"every": 2},
}
TIMES = Times(generate={"uniform": [20, 60]}, reward={"uniform": [1, 40]}, update=15.0, sync=2.0)


def settings(steps: int, offset: int, *faults: Fault) -> SimulationSettings:
    """Return a run of so many steps, whose explorer runs ``offset`` batches ahead."""
    run = {**RUN, "schedule": {"steps": steps, "sync_offset": offset}}
    return SimulationSettings(run=run, times=TIMES, faults=faults)


def compare(steps: int = 10) -> dict[int, float]:
    """Return the seconds of a step by offset."""
    seconds = {}
    for offset in (0, 1):
        run = simulate(settings(steps, offset))
        seconds[offset] = run.clock.now / steps
        print(
            f"offset {offset}: a step takes {seconds[offset]:.1f} s, the replicas work {run.busy()['generate']:.0f} s"
        )
    return seconds


def with_a_fault(seed: int) -> SimulationSettings:
    """Return a short run in which one role fails somehow, at some time."""
    draw = random.Random(seed)
    role, phase, kind = draw.choice(ROLES), draw.choice(PHASES), draw.choice(FAULTS)
    return settings(4, seed % 2, Fault(role=role, phase=phase, kind=kind, at=draw.randint(1, 4)))


if __name__ == "__main__":
    compare()
    check_seeds(range(100), with_a_fault)
    print("100 runs with a fault kept their invariants")
