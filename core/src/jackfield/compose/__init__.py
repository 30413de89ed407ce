"""The one place where names in a configuration become objects."""

from __future__ import annotations

from jackfield.compose.run import RunResult, run, run_async

__all__ = ["RunResult", "run", "run_async"]
