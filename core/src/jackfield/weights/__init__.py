"""The weight plane: versions, digests, receipts, and the synchronisation of all replicas."""

from __future__ import annotations

from jackfield.weights.adapters import MergedAdapter
from jackfield.weights.delta import HeldWeights
from jackfield.weights.digest import digest
from jackfield.weights.ends import WeightReceiver, Weights, WeightSender, WeightSource
from jackfield.weights.following import Posted, WeightFollower
from jackfield.weights.probe import ProbeAnswer, ReplicaProbe, Scorer
from jackfield.weights.synchronizer import Replica, Sender, SyncReport, WeightSynchronizer

__all__ = [
    "HeldWeights",
    "MergedAdapter",
    "Posted",
    "ProbeAnswer",
    "Replica",
    "ReplicaProbe",
    "Scorer",
    "Sender",
    "SyncReport",
    "WeightFollower",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "WeightSynchronizer",
    "Weights",
    "digest",
]
