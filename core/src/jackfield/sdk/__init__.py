"""What plugins need beside the contracts in :mod:`jackfield.abc`. It has an ABI version of its own."""

from __future__ import annotations

from jackfield.files import replace_file
from jackfield.settings import option, structure

__all__ = ["abi_version", "option", "replace_file", "structure"]

abi_version = "1.0"
