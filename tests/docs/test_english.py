"""Plain English in public texts, and error codes rather than wording in tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jackfield import errors

pytestmark = pytest.mark.timeout(300)  # it reads every file

ROOT = Path(__file__).resolve().parents[2]

BARRED = re.compile(r"\b(nobody|anew|whoever|told|somebody)\b", re.IGNORECASE)
FRAGMENT = re.compile(r"^(Of|What|Who|How|Whether|The same)\b")
OURS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def faults_of_a_docstring(node: ast.AST, text: str) -> Iterator[str]:
    """Say what is wrong with the docstring of a public module, class or function."""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n", 1)[0].split()))[0]
    if len(sentence.split()) < 3 and not sentence.startswith("See :"):
        yield f"the first sentence has fewer than three words: {sentence!r}"
    if isinstance(node, Function) and FRAGMENT.match(sentence) and not states_a_check(node):
        yield f"not a sentence in the imperative: {sentence!r}"


def states_a_check(node: Function) -> bool:
    """Say whether the docstring of a function states what a conformance check asserts."""
    names = {getattr(each.func, "id", None) for each in node.decorator_list if isinstance(each, ast.Call)}
    return "check" in names


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


@pytest.mark.parametrize(
    ("paths", "check"), [(modules, faults_of_a_module), (pages, faults_of_a_page), (modules_of_tests, pinned_wording)]
)
def test_texts_are_plain_english_and_tests_assert_codes(
    paths: Callable[[], Iterator[Path]], check: Callable[[Path], Iterator[str]]
) -> None:
    assert not [fault for path in paths() for fault in check(path)]


def test_the_rules_find_what_they_are_for() -> None:
    """Each rule has an example of the style guide."""
    function = ast.parse("def f() -> None: ...").body[0]
    bad = ["Of a task.", "What holds producers back, unless a consumer waits.", "Stand."]
    good = ["Enqueue a waiter; the next notification wakes it.", "Cancel an abandoned remote call."]
    assert all(list(faults_of_a_docstring(function, text)) for text in bad)
    assert not any(list(faults_of_a_docstring(function, text)) for text in good)
