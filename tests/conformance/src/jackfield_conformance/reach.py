"""List the modules of Jackfield that plugins may import, and find imports of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs

#: What plugins may import, each with everything below it.
ALLOWED = ("jackfield.abc", "jackfield.clock", "jackfield.errors", "jackfield.sdk")


@attrs.frozen(order=True)
class Reach:
    """An import of a module that plugins may not import."""

    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def find_reaches(folder: Path) -> list[Reach]:
    """Find the imports below a folder that reach further than :data:`ALLOWED`.

    Those inside of functions are found, too. The files are parsed and not imported; one that is not Python is left out.
    """
    return sorted(reach for file in folder.rglob("*.py") for reach in _of_file(file))


def _of_file(file: Path) -> Iterator[Reach]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Reach(file, node.lineno, name) for name in names if not _is_allowed(name))


def _is_allowed(name: str) -> bool:
    """Say whether plugins may import a module, or a name of one."""
    within = tuple(f"{module}." for module in ALLOWED)
    return not f"{name}.".startswith("jackfield.") or f"{name}.".startswith(within)
