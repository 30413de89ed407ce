"""What plugins need beside the contracts in :mod:`jackfield.abc`. It has an ABI version of its own."""

from __future__ import annotations

from jackfield.settings import option

__all__ = ["abi_version", "option"]

abi_version = "1.0"
