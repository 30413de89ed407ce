"""Workers as Ray actors: the cluster, the host of a worker, and the connection to it."""

from __future__ import annotations

from jackfield.runtime.ray.actors import Actor, connect_worker
from jackfield.runtime.ray.cluster import Cluster, ClusterOptions
from jackfield.runtime.ray.host import Host, MakeServices, Place, rollout_service
from jackfield.runtime.ray.store import remote_backend, store_services

__all__ = [
    "Actor",
    "Cluster",
    "ClusterOptions",
    "Host",
    "MakeServices",
    "Place",
    "connect_worker",
    "remote_backend",
    "rollout_service",
    "store_services",
]
