"""Simulated runs on virtual time, with seeded durations and faults, whose invariants are checked.

Schedule, queue, explorer, reward pipeline, trainer, router, replica pool and weight sync are the real ones. Workers,
engine, rollout servers and store only take time.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from jackfield.errors import JackfieldError, RunError
from jackfield_simulation.checks import check as check_settings
from jackfield_simulation.clock import VirtualClock
from jackfield_simulation.run import Simulation
from jackfield_simulation.settings import FAULTS, PHASES, ROLES, Duration, Fault, SimulationSettings, Times

__all__ = [
    "FAULTS",
    "PHASES",
    "ROLES",
    "Duration",
    "Fault",
    "Simulation",
    "SimulationSettings",
    "Times",
    "VirtualClock",
    "check_seeds",
    "simulate",
]
_SHOWN = 40  #: events of a trace


def simulate(settings: SimulationSettings, *, seed: int = 0, tries: int = 30) -> Simulation:
    """Simulate a run. It fails if an invariant is broken, a deadline passes, or an error ends it.

    Settings that cannot be simulated are refused first (``config.…``). A failure is ``run.simulation``, with a trace
    and the smallest settings that were found in ``tries`` to fail alike.
    """
    check_settings(settings)
    run, error = _attempt(settings, seed)
    if error is None:
        return run
    smaller = _smaller(settings)
    while tries and (candidate := next(smaller, None)) is not None:
        tries -= 1
        other, found = _attempt(candidate, seed)
        if found is not None and _kind(found) == _kind(error):
            run, error, smaller = other, found, _smaller(candidate)
    text = "\n".join([str(error), str(run.settings), *run.trace[-_SHOWN:]])
    fix = f"see simulate({{the settings above}}, seed={seed}), which does the same again"
    message = "a simulated run failed"
    raise RunError(message, code="run.simulation", where=f"seed {seed}", found=text, fix=fix) from error


def check_seeds(
    seeds: Iterable[int], settings_of: Callable[[int], SimulationSettings], *, processes: int = 1, tries: int = 30
) -> None:
    """Simulate the run of each seed in forked processes, and raise what :func:`simulate` raises for one that fails."""
    listed, context = list(seeds), multiprocessing.get_context("fork")
    failed: Any = context.Array("q", [-1] * processes)

    def check(number: int) -> None:
        for seed in listed[number::processes]:
            failed[number] = seed  # also if this process ends meanwhile
            if _attempt(settings_of(seed), seed)[1] is not None:
                return
        failed[number] = -1

    others = [context.Process(target=check, args=(number,)) for number in range(1, processes)]
    for process in others:
        process.start()
    check(0)
    for process in others:
        process.join()
    for seed in sorted({*failed} - {-1})[:1]:
        simulate(settings_of(seed), seed=seed, tries=tries)
        raise RunError("a process of the simulation ended", code="run.simulation", where=f"seed {seed}")


def _attempt(settings: SimulationSettings, seed: int) -> tuple[Simulation, BaseException | None]:
    run, log = Simulation(settings, seed), logging.getLogger("jackfield")
    error: BaseException | None = None
    log.disabled = True
    try:
        run.run()
    except (Exception, asyncio.CancelledError) as raised:
        error = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
    finally:
        log.disabled = False
    return run, error


def _kind(error: BaseException) -> object:
    if not isinstance(error, JackfieldError):
        return type(error)
    return error.code, error.where if error.code == "run.simulation" else None


def _smaller(settings: SimulationSettings) -> Iterator[SimulationSettings]:
    """Yield the settings with one fault less, and with fewer steps."""
    for at in range(len(settings.faults)):
        yield attrs.evolve(settings, faults=[*settings.faults[:at], *settings.faults[at + 1 :]])
    schedule = attrs.asdict(settings.config("").schedule)
    for fewer in sorted({schedule["steps"] // 2, schedule["steps"] - 1} - {0}):
        yield attrs.evolve(settings, run={**settings.run, "schedule": {**schedule, "steps": fewer}})
