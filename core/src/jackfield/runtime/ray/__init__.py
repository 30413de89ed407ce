"""Workers as Ray actors: the cluster, the host of a worker, and what stands for it in other processes."""

from __future__ import annotations

from jackfield.runtime.ray.cluster import Cluster, ClusterOptions
from jackfield.runtime.ray.host import Host, Place
from jackfield.runtime.ray.storage import RemoteBackend, Storage
from jackfield.runtime.ray.stub import RemoteRank, RemoteServer, Stub

__all__ = [
    "Cluster",
    "ClusterOptions",
    "Host",
    "Place",
    "RemoteBackend",
    "RemoteRank",
    "RemoteServer",
    "Storage",
    "Stub",
]
