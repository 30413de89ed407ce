"""The simulator's clock, for tests in environments in which ``jackfield-simulation`` is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jackfield_simulation.clock import VirtualClock
else:
    _FILE = Path(__file__).parents[2] / "plugins/commands/simulation/src/jackfield_simulation/clock.py"
    _spec = importlib.util.spec_from_file_location("jackfield_clock_of_the_simulator", _FILE)
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    VirtualClock = _module.VirtualClock

__all__ = ["VirtualClock"]
