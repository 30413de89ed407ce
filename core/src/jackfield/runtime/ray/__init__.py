"""Workers as Ray actors: the cluster, the host of a worker, and the connection to it."""

from __future__ import annotations

from jackfield.runtime.ray.actors import Actor, WorkerSpec, connect_worker
from jackfield.runtime.ray.cluster import Cluster
from jackfield.runtime.ray.host import MakeServices, rollout_service
from jackfield.runtime.ray.store import remote_backend, store_services

__all__ = [
    "Actor",
    "Cluster",
    "MakeServices",
    "WorkerSpec",
    "connect_worker",
    "remote_backend",
    "rollout_service",
    "store_services",
]
