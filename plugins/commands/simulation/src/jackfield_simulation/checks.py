"""What a simulation refuses: settings that a run or a plan would refuse, and those that mean nothing here."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from jackfield.algorithms.shaping import Correction
from jackfield.compose.schedules import check_schedule
from jackfield.errors import ConfigError
from jackfield_simulation.settings import FAULTS, PHASES, ROLES, SimulationSettings
from jackfield_simulation.stage_times import duration

_COUNTS = ("explorers", "workers", "slots", "tokens")


def check(settings: SimulationSettings) -> None:
    """Raise a ``ConfigError`` for a time, number, fault or schedule that cannot be simulated."""
    for name, value in attrs.asdict(settings.times).items():
        if not callable(value):
            duration(_listed(value), f"times.{name}")
    for name in _COUNTS:
        _require(getattr(settings, name) >= 1, name, "1 or more", getattr(settings, name))
    for number, fault in enumerate(settings.faults):
        where = f"faults[{number}]"
        for name, known in {"role": ROLES, "phase": PHASES, "kind": FAULTS}.items():
            found = getattr(fault, name)
            _require(found in known, f"{where}.{name}", f"one of {', '.join(known)}", found)
        _require(fault.at >= 1, f"{where}.at", "1 or more: phases are counted from 1", fault.at)
        _require(fault.number >= 0 and fault.seconds >= 0, where, "a number and seconds from 0", fault)
    config = settings.config("simulated")
    _require(config.mode == "online", "run: mode", "online", config.mode)
    corrects = settings.algorithm.correction or Correction()  # no value is simulated that is or is not corrected
    check_schedule(config, attrs.evolve(settings.algorithm, correction=corrects))


def _listed(value: object) -> object:
    """Return a duration with lists in the place of other sequences."""
    if isinstance(value, Mapping):
        return {name: list(each) for name, each in value.items()}
    return value if isinstance(value, int | float | str) else list(value)  # type: ignore[call-overload]


def _require(holds: bool, where: str, expected: str, found: object) -> None:
    if not holds:
        what, fix = (
            "a setting of the simulation cannot be simulated",
            "correct it: the guide on simulation describes it",
        )
        raise ConfigError(what, where=where, expected=expected, found=found, fix=fix)
