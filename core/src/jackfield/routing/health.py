"""Whether a replica that has failed a request still lives."""

from __future__ import annotations

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.clock import Clock
from jackfield.errors import JackfieldError

LOST = ("rollout.stopped", "worker.died")  #: codes of errors that say that a replica has died

#: Refusals of one request by a replica that is well.
_REFUSALS = ("rollout.request", "rollout.context-length", "rollout.stale", "plugin.capability")
_HEALTH_SECONDS = 10.0


async def cause_of_death(
    server: BaseRolloutServer, clock: Clock, name: str, error: Exception | None = None
) -> str | None:
    """Return how a replica is that does not serve any more; None: it is well.

    Args:
        server: The replica's.
        clock: Time source of the deadline.
        name: Of the replica, for messages.
        error: Of a request that it has failed; one that it has refused says that it is well.
    """
    if isinstance(error, JackfieldError) and error.code in _REFUSALS:
        return None
    try:
        report = await clock.wait_for(server.health(), _HEALTH_SECONDS, f"{name} to tell its health")
    except Exception as silence:
        return f"{type(silence).__name__}: {silence}"
    return None if report.healthy else report.detail or "not healthy"
