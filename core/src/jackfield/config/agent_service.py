"""The section ``agent_service``: how agents are run."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt, optional

from jackfield.settings import option


@attrs.frozen(kw_only=True)
class AgentServiceConfig:
    """Limits, deadlines and retries of rollouts."""

    concurrency: int | None = option(
        None, "rollouts in progress at a time in each agent worker; null: as many as are in flight", gt(0)
    )
    turn_seconds: float | None = option(
        None, "deadline of one answer of the model; null: that of the whole rollout (deadlines.rollout)", gt(0.0)
    )
    times_usual: float | None = option(
        None,
        "a rollout is cancelled after this many times the duration of the slowest tenth of those that ended lately; "
        "null: only deadlines.rollout counts",
        optional(gt(1.0)),
    )
    retries: int = option(0, "how often a rollout that failed is run again before it counts as failed", ge(0))
    extra_rollouts: int = option(
        0, "rollouts that are started beyond data.rollouts_per_group; those that complete first are kept", ge(0)
    )
