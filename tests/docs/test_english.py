"""Plain English in public texts, and error codes rather than wording in tests.

``english_exceptions.json`` has what is there today, room by room. It may only get shorter: a room with more than is
written there fails, and ``python tests/docs/test_english.py`` writes what is left after some has gone.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield import errors

pytestmark = pytest.mark.timeout(300)  # it reads every file

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = Path(__file__).with_name("english_exceptions.json")

BARRED = re.compile(r"\b(nobody|anew|whoever|told|somebody)\b", re.IGNORECASE)
FRAGMENT = re.compile(r"^(Of|What|Who|How|Whether|The same)\b")
LONGEST = 88  #: characters of a docstring's first line
OURS = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def faults_of_a_docstring(node: ast.AST, text: str) -> Iterator[str]:
    """Say what is wrong with the docstring of a public module, class or function."""
    first = text.strip().split("\n", 1)[0]
    sentence = re.split(r"(?<=[.:;])\s", " ".join(text.split("\n\n", 1)[0].split()))[0]
    if len(first) > LONGEST:
        yield f"the first line has {len(first)} characters, at most {LONGEST}"
    if len(sentence.split()) < 3:
        yield f"the first sentence has fewer than three words: {sentence!r}"
    if isinstance(node, Function) and FRAGMENT.match(sentence):
        yield f"not a sentence in the imperative: {sentence!r}"


def documented(tree: ast.Module) -> Iterator[tuple[ast.AST, int, str]]:
    """Find public docstrings: of the module, and of names without a leading underscore in public places."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            if getattr(node, "name", "").startswith("_"):
                continue
            text = ast.get_docstring(node)
            if text:
                yield node, getattr(node, "lineno", 1), text
            if not isinstance(node, Function):
                pending += node.body


def faults_of_a_module(path: Path) -> Iterator[str]:
    """Check public docstrings, and barred words in every text of a module: help, error messages, docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    place = path.relative_to(ROOT)
    for node, line, text in documented(tree):
        for fault in faults_of_a_docstring(node, text):
            yield f"{place}:{line}: {fault}"
    for each in ast.walk(tree):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            for word in BARRED.findall(each.value):
                yield f"{place}:{each.lineno}: {word!r}"


def faults_of_a_page(path: Path) -> Iterator[str]:
    """Check barred words in a page."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for word in BARRED.findall(line):
            yield f"{path.relative_to(ROOT)}:{number}: {word!r}"


def pinned_wording(path: Path) -> Iterator[str]:
    """Find ``pytest.raises(OurError, match=…)``: a test asserts the error's code instead."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "raises"
            and any(keyword.arg == "match" for keyword in node.keywords)
            and any(isinstance(name, ast.Name) and name.id in OURS for each in node.args for name in ast.walk(each))
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: match= on an error of ours: assert its code"


def room(path: Path) -> str:
    """The room that a file belongs to: a folder of the core, a plugin, or a folder of pages or tests."""
    parts = path.relative_to(ROOT).parts
    if "tests" in parts[:-1] and parts[:2] != ("tests", "conformance"):
        depth = parts.index("tests") + 2
    else:
        depth = {"core": 4, "plugins": 3, "tests": 2, "docs": 2}.get(parts[0], 1)
    return "/".join(parts[: min(depth, len(parts) - 1)]) or "."


def modules() -> Iterator[Path]:
    """Find the modules whose texts users read."""
    for pattern in ("core/src", "plugins/*/*/src", "tests/conformance/src"):
        for folder in sorted(ROOT.glob(pattern)):
            yield from sorted(folder.rglob("*.py"))


def pages() -> Iterator[Path]:
    """Find the pages that users read; decisions quote what was, and the reference is generated."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if not {"decisions", "reference"} & set(path.parts):
            yield path
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")


def modules_of_tests() -> Iterator[Path]:
    """Find all test files."""
    for folder in (ROOT / "core" / "tests", ROOT / "tests", *sorted((ROOT / "plugins").glob("*/*/tests"))):
        yield from sorted(path for path in folder.rglob("*.py") if "src" not in path.parts)


@functools.cache
def found() -> dict[str, dict[str, list[str]]]:
    """Find all faults: by kind and room."""
    result: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in ("texts", "pages", "match")}
    kinds = (
        ("texts", modules, faults_of_a_module),
        ("pages", pages, faults_of_a_page),
        ("match", modules_of_tests, pinned_wording),
    )
    for kind, paths, check in kinds:
        for path in paths():
            result[kind][room(path)] += check(path)
    return result


@pytest.mark.parametrize("kind", ["texts", "pages", "match"])
def test_no_room_has_more_exceptions_than_are_listed(kind: str) -> None:
    """A new text is plain English, and a new test asserts a code."""
    allowed: dict[str, int] = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))[kind]
    faults = {name: places for name, places in found()[kind].items() if len(places) > allowed.get(name, 0)}
    report = [
        f"{name}: {len(places)} found, {allowed.get(name, 0)} listed\n  " + "\n  ".join(places)
        for name, places in faults.items()
    ]
    assert not report, "\n".join(report)


def test_the_rules_find_what_they_are_for() -> None:
    """Each rule has an example of the style guide."""
    function = ast.parse("def f() -> None: ...").body[0]
    bad = [
        "Of a task.",
        "What holds producers back, unless a consumer waits.",
        "Stand.",
        "Enqueue a " + "long " * 20 + "line.",
    ]
    good = ["Enqueue a waiter; the next notification wakes it.", "Cancel an abandoned remote call."]
    assert all(list(faults_of_a_docstring(function, text)) for text in bad)
    assert not any(list(faults_of_a_docstring(function, text)) for text in good)


def write() -> None:
    """Write the exceptions that are left; a number is never raised."""
    old = json.loads(EXCEPTIONS.read_text(encoding="utf-8")) if EXCEPTIONS.exists() else {}
    new = {
        kind: {
            name: min(len(places), old.get(kind, {}).get(name, len(places) if not old else 0))
            for name, places in sorted(rooms.items())
        }
        for kind, rooms in found().items()
    }
    kept = {kind: {name: count for name, count in rooms.items() if count} for kind, rooms in new.items()}
    EXCEPTIONS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
