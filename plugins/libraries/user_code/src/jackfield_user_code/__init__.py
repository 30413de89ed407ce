"""Worker processes for code that may hang, crash, print or eat memory: a user's functions."""

from __future__ import annotations

from jackfield_user_code.workers import UserCodePool, UserCodeWorker, WorkerLimits, WorkerResult

__all__ = ["UserCodePool", "UserCodeWorker", "WorkerLimits", "WorkerResult"]
