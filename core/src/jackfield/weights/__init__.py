"""Weight sync: versions, digests, receipts, and transfers to all replicas."""

from __future__ import annotations

from jackfield.routing import Replica
from jackfield.weights.sender import WeightSender
from jackfield.weights.synchronizer import SyncReport, WeightSynchronizer, verify

__all__ = ["Replica", "SyncReport", "WeightSender", "WeightSynchronizer", "verify"]
