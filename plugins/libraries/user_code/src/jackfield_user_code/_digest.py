"""A digest of the user's code. It needs only the standard library."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def digest(module: Any) -> str | None:
    """Return a digest of a module's file and of the modules that it imports from its own folder and package.

    Only import statements are followed. A module without a source file has none.
    """
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        return None
    first = Path(file).resolve()
    return _digest(first, _folders(module, first))


def digest_file(file: str | Path) -> str:
    """Return the digest that the module of a file outside of packages has, without importing it."""
    first = Path(file).expanduser().resolve()
    return _digest(first, {first.parent: None})


def _digest(first: Path, folders: dict[Path, str | None]) -> str:
    hashed, seen, waiting = hashlib.sha256(), set[Path](), [first]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += _neighbours(each, folders)
    for each in sorted(seen):
        hashed.update(f"{os.path.relpath(each, first.parent)}\0".encode())
        hashed.update(each.read_bytes())
    return hashed.hexdigest()[:32]


def _folders(module: Any, file: Path) -> dict[Path, str | None]:
    """Return the folders whose modules belong to the code: its own, and those of its package.

    The last is the one that holds the package, of which only the package itself belongs to the code.
    """
    folders: dict[Path, str | None] = {file.parent: None}
    package = [part for part in (getattr(module, "__package__", None) or "").split(".") if part]
    folder = file.parent
    for name in reversed(package):
        if folder.name != name:  # the package's name on disk is another one
            return folders
        folders[folder], folder = None, folder.parent
    if package:
        folders[folder] = package[0]
    return folders


def _neighbours(file: Path, folders: dict[Path, str | None]) -> Iterator[Path]:
    """Yield the files in the folders of the code that a file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    bases: dict[Path, str | None] = {file.parent: None, **folders}
    for name in _imported(tree):
        for base, only in bases.items():
            if only is not None and name.split(".")[0] != only:
                continue
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
