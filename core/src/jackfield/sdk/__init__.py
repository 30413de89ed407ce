"""What plugins use of the core beside the contracts of :mod:`jackfield.abc`; versioned like these."""

from __future__ import annotations

from jackfield.settings import option

__all__ = ["abi_version", "option"]

abi_version = "1.0"
