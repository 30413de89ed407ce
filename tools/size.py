"""What the code comes to: lines, classes, public names and function lengths, room by room, against its ceilings.

    python3 tools/size.py              # the table; exit code 1 where something is above its ceiling
    python3 tools/size.py --ratchet    # lower the ceilings to what there is; it never raises one

The limits are in ``[tool.jackfield.size]`` of pyproject.toml: the ``budget`` of the core and of everything, and today's
``ceiling`` of both. No file is longer than 400 lines, and no files import each other in a circle.
Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from packages import ROOT

CORE = ROOT / "core" / "src" / "jackfield"
LONGEST_FILE, MEDIAN, P90 = 400, 10, 30  #: lines of a file, and of the functions of the core


@dataclasses.dataclass(frozen=True)
class File:
    """One module, as far as it counts."""

    name: str  #: of the path, relative to the root
    module: str
    lines: int
    classes: int
    names: int  #: defined at the top of the module without a leading underscore
    functions: tuple[int, ...]  #: lines of each
    imports: frozenset[str]  #: modules of this repository, late and ``TYPE_CHECKING`` ones included


@dataclasses.dataclass(frozen=True)
class Room:
    """One folder of the core, or all of the plugins."""

    name: str
    files: tuple[File, ...]

    @property
    def lines(self) -> int:
        """The lines of all files."""
        return sum(file.lines for file in self.files)

    @property
    def classes(self) -> int:
        """The classes of all files."""
        return sum(file.classes for file in self.files)

    @property
    def names(self) -> int:
        """The public names of all files."""
        return sum(file.names for file in self.files)

    @property
    def functions(self) -> list[int]:
        """The lines of every function, sorted."""
        return sorted(lines for file in self.files for lines in file.functions)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratchet", action="store_true", help="lower the ceilings to what there is")
    ratchet = parser.parse_args().ratchet
    found = rooms()
    if ratchet:
        _lower(found)
    limits = _limits()
    _show(found, limits)
    wrong = problems(found, limits)
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


def rooms() -> list[Room]:
    """Read the core's rooms, then plugins and conformance."""
    folders = sorted(folder for folder in CORE.iterdir() if folder.is_dir() and folder.name != "__pycache__")
    top = Room("jackfield", tuple(map(_read, sorted(CORE.glob("*.py")))))
    core = [Room(folder.name, tuple(_files(folder))) for folder in folders]
    plugins = sorted((ROOT / "plugins").glob("*/*/src"))
    return [
        *(room for room in [*core, top] if room.files),
        Room("plugins/*", tuple(file for folder in plugins for file in _files(folder))),
        Room("conformance/", tuple(_files(ROOT / "tests" / "conformance" / "src"))),
    ]


def problems(found: list[Room], limits: dict[str, Any]) -> list[str]:
    """Say what is above its ceiling, each file that is too long, and each circle."""
    core, everything = _sums(found)
    ceilings: dict[str, int] = limits["ceiling"]
    wrong = [
        f"{room.name}: {room.lines:,} lines, at most {ceilings[room.name]:,}"
        for room in (core, everything)
        if room.lines > ceilings[room.name]
    ]
    functions = core.functions
    if statistics.median(functions) > MEDIAN or _p90(functions) > P90:
        wrong.append(f"core: functions have {statistics.median(functions):g} lines (median), {_p90(functions)} (p90)")
    wrong += [
        f"{file.name}: {file.lines} lines, at most {LONGEST_FILE}"
        for file in everything.files
        if file.lines > LONGEST_FILE
    ]
    wrong += [f"these files import each other: {' '.join(circle)}" for circle in _circles(everything.files)]
    return wrong


def _files(folder: Path) -> Iterator[File]:
    return map(_read, sorted(folder.rglob("*.py")))


def _read(path: Path) -> File:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    module = ".".join(path.relative_to(_source(path)).with_suffix("").parts).removesuffix(".__init__")
    return File(
        name=str(path.relative_to(ROOT)),
        module=module,
        lines=text.count("\n"),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        names=sum(_public_names(node) for node in tree.body),
        functions=tuple(
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        imports=frozenset(name for node in nodes for name in _imported(node)),
    )


def _source(path: Path) -> Path:
    return next(folder for folder in path.parents if folder.name == "src")


def _public_names(node: ast.stmt) -> int:
    """Count what a statement at the top of a module defines without a leading underscore."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return not name.startswith("_")
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return not name.startswith("_")
    return 0


def _imported(node: ast.AST) -> Iterable[str]:
    """Names of modules; of ``from package import name`` the package and what may be a module in it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _circles(files: Iterable[File]) -> Iterator[tuple[str, ...]]:
    """Find circles among files; that a package's ``__init__`` gathers its modules makes none."""
    by_module = {file.module: file for file in files if not file.name.endswith("__init__.py")}
    graph = {name: {each for each in file.imports if each in by_module} for name, file in by_module.items()}
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1][:-1]
            first = circle.index(min(circle))
            yield (*circle[first:], *circle[:first])
            graph[circle[1]].discard(circle[0])
        else:
            return


def _sums(found: list[Room]) -> tuple[Room, Room]:
    core = [file for room in found[:-2] for file in room.files]
    everything = [file for room in found for file in room.files]
    return Room("core", tuple(core)), Room("core+plugins+conformance", tuple(everything))


def _p90(lines: list[int]) -> int:
    return lines[int(0.9 * (len(lines) - 1))]


def _show(found: list[Room], limits: dict[str, Any]) -> None:
    names = f"{'room':24}  {'lines':>7}  {'ceiling':>7}  {'budget':>7}  {'classes':>7}  {'names':>6}"
    print(f"{names}  {'median':>6}  {'p90':>4}  longest file")
    for room in [*found, *_sums(found)]:
        longest = max(room.files, key=lambda file: file.lines)
        functions = room.functions or [0]
        ceiling, budget = (str(limits[table].get(room.name, "")) for table in ("ceiling", "budget"))
        print(
            f"{room.name:24}  {room.lines:7}  {ceiling:>7}  {budget:>7}  {room.classes:7}"
            f"  {room.names:6}  {statistics.median(functions):6g}  {_p90(functions):4}"
            f"  {Path(longest.name).name} {longest.lines}"
        )


def _limits() -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    limits: dict[str, Any] = settings["tool"]["jackfield"]["size"]
    return limits


def _lower(found: list[Room]) -> None:
    """Write the ceilings as the sizes are, where those are less."""
    path = ROOT / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    head, table, rest = text.partition("[tool.jackfield.size.ceiling]\n")
    _, gap, rest = rest.partition("\n\n")
    ceilings = _limits()["ceiling"]
    rows = [f'"{room.name}" = {min(room.lines, ceilings[room.name])}' for room in _sums(found)]
    path.write_text(head + table + "\n".join(rows) + gap + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
