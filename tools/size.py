"""What the code comes to: lines, classes, public names and function lengths, room by room, against its ceilings.

    python3 tools/size.py              # the table; exit code 1 where something is above its ceiling
    python3 tools/size.py --ratchet    # lower the ceilings to what there is; it never raises one

The limits are in ``[tool.jackfield.size]`` of pyproject.toml: the ``budget`` of the core and of everything, today's
``ceiling`` of both, which only goes down, the files that are too long, and the circles of imports between files.
Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
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
    """Say what is above its ceiling, and which exceptions have become idle."""
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
    long = {file.name: file.lines for file in everything.files if file.lines > LONGEST_FILE}
    allowed: dict[str, int] = limits["long"]
    wrong += [
        f"{name}: {lines} lines, at most {max(allowed.get(name, 0), LONGEST_FILE)}"
        for name, lines in long.items()
        if lines > max(allowed.get(name, 0), LONGEST_FILE)
    ]
    wrong += [f"{name}: no longer too long; python3 tools/size.py --ratchet" for name in sorted(allowed.keys() - long)]
    circles = {" ".join(circle) for circle in _circles(everything.files)}
    wrong += [f"these files import each other: {circle}" for circle in sorted(circles - set(limits["circles"]))]
    wrong += [f"no longer a circle: {circle}; --ratchet" for circle in sorted(set(limits["circles"]) - circles)]
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
    """Write ceilings, long files and circles as they are, where that is less than what is written."""
    limits, everything = _limits(), _sums(found)[1]
    ceilings = {room.name: min(room.lines, limits["ceiling"][room.name]) for room in _sums(found)}
    long = {
        file.name: min(file.lines, limits["long"][file.name])
        for file in everything.files
        if file.lines > LONGEST_FILE and file.name in limits["long"]
    }
    circles = [" ".join(circle) for circle in _circles(everything.files)]
    kept = [circle for circle in limits["circles"] if circle in circles]
    written = "[tool.jackfield.size]\ncircles = [\n" + "".join(f'    "{circle}",\n' for circle in kept) + "]\n"
    for table, values in {"budget": limits["budget"], "ceiling": ceilings, "long": long}.items():
        rows = "".join(f'"{name}" = {number}\n' for name, number in values.items())
        written += f"\n[tool.jackfield.size.{table}]\n{rows}"
    path = ROOT / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(r"\[tool\.jackfield\.size\]\n.*?(?=\n\[tool\.(?!jackfield\.size))", lambda _: written, text, flags=re.S),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
