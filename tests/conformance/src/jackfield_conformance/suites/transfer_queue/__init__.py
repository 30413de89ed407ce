"""Checks of queue backends. The only fixture key is ``settings``. Each check opens its backends in its own folder."""

from __future__ import annotations

from jackfield_conformance.registry import Capability

CAPABILITIES = {
    "durable": Capability(
        what="values survive kill -9 of the process that put them", detect=lambda subject: bool(subject.cls.durable)
    ),
    "joins": Capability(
        what="further processes open the store of a queue that one has opened",
        detect=lambda subject: bool(subject.cls.joins),
    ),
}
