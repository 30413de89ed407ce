"""The one place where names in a configuration become objects."""

from __future__ import annotations

from jackfield.compose.run import RunResult, run, run_async
from jackfield.runtime.control import list_replicas, scale_replicas

__all__ = ["RunResult", "list_replicas", "run", "run_async", "scale_replicas"]
