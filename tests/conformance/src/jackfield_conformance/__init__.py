"""Checks that a Jackfield plugin keeps its contract, on the running plugin.

``jackfield plugins check NAME``, ``pytest --pyargs jackfield_conformance --plugin KIND:NAME`` and, in a plugin's own
tests, :func:`certify` run them on one installed plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jackfield_conformance.runner import certify

__all__ = ["certify"]


def __getattr__(name: str) -> object:
    """Import lazily: the pytest plugin is loaded in every pytest run, and must stay cheap."""
    if name == "certify":
        from jackfield_conformance.runner import certify

        return certify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
