"""Worker processes for a user's functions, which may hang, crash, print or exhaust memory."""

from __future__ import annotations

from jackfield_user_code.workers import UserCodePool, WorkerLimits, WorkerResult, WorkerReward

__all__ = ["UserCodePool", "WorkerLimits", "WorkerResult", "WorkerReward"]
