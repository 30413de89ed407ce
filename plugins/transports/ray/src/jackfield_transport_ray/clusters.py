"""The Ray cluster of this process."""

from __future__ import annotations

import os
import secrets
from typing import Any

import ray

from jackfield.errors import QueueError
from jackfield.sdk.ray_loopback import HOST, enter


def joined(address: str | None, object_store_bytes: int | None) -> bool:
    """Have this process in a cluster; whether it was not in one before.

    Args:
        address: of the cluster to join; None: the one that the process is in, or a new one on this machine.
        object_store_bytes: shared memory of a new one; None: Ray's default.

    Raises:
        QueueError: ``queue.unreachable``.
    """
    if ray.is_initialized():
        return False
    own: dict[str, Any] = {}
    if address is None:
        own = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": object_store_bytes}
        own["_node_ip_address"] = HOST
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would write one into the home folder
    try:
        enter(address, own)
    except Exception as error:  # whatever Ray raises
        raise QueueError(
            f"Ray cannot be reached: {type(error).__name__}: {error}",
            code="queue.unreachable",
            where=address,
            fix="look whether the cluster runs (`ray status`), and set RAY_AUTH_TOKEN to its token",
        ) from error
    return True
