"""Tools for plugins that implement contracts of :mod:`jackfield.abc`. The SDK has its own ABI version.

Its modules, and their names, are public if they do not begin with an underscore, or if ``__all__`` has them.
"""

from __future__ import annotations

from jackfield.files import replace_file
from jackfield.settings import option, structure

__all__ = ["abi_version", "option", "replace_file", "structure"]

abi_version = "1.1"
