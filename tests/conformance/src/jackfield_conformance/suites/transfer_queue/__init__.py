"""Checks of TransferQueue backends.

Fixture keys: ``settings`` (default: none). Every check opens its backends in a folder of its own.
"""

from __future__ import annotations

from jackfield_conformance.registry import Capability
from jackfield_conformance.suites.transfer_queue import keeping, storing

__all__ = ["CAPABILITIES", "keeping", "storing"]

#: What a manifest may declare.
CAPABILITIES = {
    "durable": Capability(
        what="values survive kill -9 of the process that put them", detect=lambda subject: bool(subject.cls.durable)
    ),
    "joins": Capability(
        what="further processes open the store of a queue that one has opened",
        detect=lambda subject: bool(subject.cls.joins),
    ),
}
