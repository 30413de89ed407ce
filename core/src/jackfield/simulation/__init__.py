"""Simulated runs: the real schedule, queue, explorer, reward pipeline and trainer on virtual time."""

from jackfield.simulation.run import Simulation
from jackfield.simulation.settings import FAULTS, PHASES, ROLES, Fault, SimulationSettings, Times
from jackfield.simulation.world import VirtualClock

__all__ = ["FAULTS", "PHASES", "ROLES", "Fault", "Simulation", "SimulationSettings", "Times", "VirtualClock"]
