"""Construction of a run's objects from the names in its configuration."""

from __future__ import annotations

from jackfield.cluster.control import list_replicas, scale_replicas
from jackfield.compose.run import RunResult, run

__all__ = ["RunResult", "list_replicas", "run", "scale_replicas"]
