"""A digest of the user's code. It needs only the standard library."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def digest(module: Any) -> str | None:
    """Return a digest of a module's file and of the modules that it imports from its own folder.

    Only import statements are followed. A module without a source file has none.
    """
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        return None
    first, hashed, seen = Path(file).resolve(), hashlib.sha256(), set[Path]()
    waiting = [first]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += _neighbours(each, first.parent)
    for each in sorted(seen):
        hashed.update(f"{each.relative_to(first.parent)}\0".encode())
        hashed.update(each.read_bytes())
    return hashed.hexdigest()[:32]


def _neighbours(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for name in _imported(tree):
        for base in {folder, file.parent}:
            place = base / name.split(".")[0]
            if place.with_suffix(".py").is_file():
                yield place.with_suffix(".py")
            elif place.is_dir():
                yield from place.rglob("*.py")


def _imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.ImportFrom):
            yield from (each.name for each in node.names)
