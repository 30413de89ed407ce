"""Worker processes for a user's functions, which may hang, crash, print or exhaust memory."""

from __future__ import annotations

from jackfield_user_code._digest import digest_file
from jackfield_user_code._worker import describe, is_async
from jackfield_user_code.held import HeldWorker, hold
from jackfield_user_code.reward import WorkerReward, try_first
from jackfield_user_code.workers import UserCodePool, WorkerLimits, WorkerResult

__all__ = [
    "HeldWorker",
    "UserCodePool",
    "WorkerLimits",
    "WorkerResult",
    "WorkerReward",
    "describe",
    "digest_file",
    "hold",
    "is_async",
    "try_first",
]
