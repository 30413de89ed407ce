"""Settings of the backend; importable without Ray."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """Which cluster, and who shares the rows."""

    queue: str | None = option(
        None, "Name under which processes of one cluster share the rows; null: this process has them alone."
    )
    address: str | None = option(
        None, "HOST:PORT of a cluster to join; null: the one that this process is in, or else one of its own."
    )
    object_store_bytes: int | None = option(
        None, "Shared memory of a cluster of its own; null: Ray's default.", ge(80 * 10**6)
    )
    seconds: float = option(30.0, "Longest time for one request.", gt(0))
