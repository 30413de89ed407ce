"""Workers of the cluster ``inline`` that have a process, and an interpreter, of their own."""

from __future__ import annotations

from jackfield.runtime.process.rollout import RolloutProcess

__all__ = ["RolloutProcess"]
