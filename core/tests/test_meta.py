"""Rules that hold for every module of the core."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from jackfield.errors import JackfieldError

#: Of the core that is under test, be it the source tree's or an installed wheel's.
PACKAGE = Path(find_spec("jackfield").origin).parent  # type: ignore[union-attr, arg-type]
REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "ray", "transformers", "tensordict", "numpy")

# One fresh interpreter that forks for each module: nothing of ours is imported before the first fork. The modules of a
# package are forks of a process that has imported the package, because any import of them begins so. Third-party
# packages which the core needs anyway are warm, which makes forks cheap.
ZYGOTE = """
import json, os, sys, traceback
import asyncio, attrs, click, importlib.metadata, pluggy, ssl, yaml
modules, heavy = json.loads(sys.argv[1])
assert not [name for name in sys.modules if name.partition(".")[0] == "jackfield"]

def visit(module):
    child = os.fork()
    if child == 0:
        try:
            __import__(module)
            loaded = [name for name in heavy if name in sys.modules]
            problem = f"loads {loaded}" if loaded else None
        except BaseException:
            problem = traceback.format_exc()
        print(json.dumps([module, problem]), flush=True)
        for inner in modules:
            if inner.rpartition(".")[0] == module:
                visit(inner)
        os._exit(0)
    os.waitpid(child, 0)

visit("jackfield")
"""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def literals(path: Path) -> set[str]:
    """The texts in a file that stand in its code, docstrings and comments left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare
    }


@pytest.mark.timeout(180)
def test_every_module_imports_alone_without_a_warning_and_loads_nothing_heavy():
    modules = [name_of(path) for path in SOURCES]
    arguments = json.dumps([modules, HEAVY])
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", ZYGOTE, arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert 0 == result.returncode, result.stderr
    answers = dict(json.loads(line) for line in result.stdout.splitlines())
    assert set(modules) == set(answers), "a module ended its interpreter"
    problems = {module: problem for module, problem in answers.items() if problem}
    assert {} == problems, "\n\n".join(f"{module}: {problem}" for module, problem in problems.items())


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_all_lists_what_is_promised_and_what_a_package_gathers(path: Path):
    """Elsewhere a leading underscore says what is private; ``core/abi`` lists contracts, ``errors.md`` errors."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    promised = name_of(path).rpartition(".")[0] == "jackfield.sdk"  # its modules may say what plugins may use
    gathers = path.name == "__init__.py" and any(
        isinstance(node, ast.ImportFrom) and node.module != "__future__" for node in tree.body
    )
    exported = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["__all__"]
    ]
    if path.name != "__init__.py":
        assert promised or not exported
    assert bool(exported) or not gathers
    for names in exported:
        assert _like_ruff(names) == names
        assert len(set(names)) == len(names)


def _like_ruff(names: list[str]) -> list[str]:
    """Constants, then classes, then the rest: the order of ruff's RUF022."""
    return sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[:1].isupper() else 2, name))


PLUGINS = [file for top in ("plugins", "tests/conformance") for file in REPOSITORY.glob(f"{top}/**/src/**/*.py")]


@pytest.fixture(scope="module")
def error_page() -> str:
    page = REPOSITORY / "docs" / "reference" / "errors.md"
    if not page.is_file():
        pytest.skip("the documentation is not beside this package")
    return page.read_text(encoding="utf-8")


def test_the_page_of_errors_lists_the_codes_that_are_raised(error_page: str):
    """By the core, or by a package of this repository; a code for nobody is a promise for nothing."""
    listed = re.findall(r"^\| `([a-z-]+(?:\.[a-z-]+)?)` \| .*\. \|$", error_page, re.M)
    assert len(listed) == len(set(listed)) > 90
    raised, used = set(), set()
    for path in (*SOURCES, *PLUGINS):
        used |= literals(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                raised.add(node.value.value)
    assert set() == {code for code in raised if isinstance(code, str)} - set(listed)
    assert set() == set(listed) - used


def test_the_page_of_errors_has_the_tree_of_classes(error_page: str):
    rows = re.findall(r"^\| ((?:&emsp;)*)`([A-Za-z]+)` \| (.*) \| `(.*)` \|$", error_page, re.M)
    assert [(len(cls.__mro__) - 4, cls.__name__, summary(cls), cls.default_code) for cls in tree(JackfieldError)] == [
        (indent.count(";"), name, text, code) for indent, name, text, code in rows
    ]


def tree(cls: type[JackfieldError]) -> Iterator[type[JackfieldError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == "jackfield.errors":
            yield from tree(child)


def summary(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]
