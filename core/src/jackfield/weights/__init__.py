"""Weights: versions, digests, receipts, and the synchronisation of all replicas."""

from __future__ import annotations

from jackfield.weights.sender import PreparedSender, WeightSender, WeightSource
from jackfield.weights.synchronizer import ProbeAnswer, Replica, ReplicaProbe, SyncReport, WeightSynchronizer, verify

__all__ = [
    "PreparedSender",
    "ProbeAnswer",
    "Replica",
    "ReplicaProbe",
    "SyncReport",
    "WeightSender",
    "WeightSource",
    "WeightSynchronizer",
    "verify",
]
