"""The ABI check: which change of a contract is major, which is minor, and what it demands of the version."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc import CONTRACTS
from jackfield_conformance import abi_snapshot
from jackfield_conformance.abi_snapshot import (
    check_kind,
    compare,
    describe,
    describe_sdk,
    next_version,
    required_bump,
)

BASE = """
from __future__ import annotations
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol, TypeAlias
import attrs

@attrs.frozen(kw_only=True)
class Request:
    key: str
    mode: Literal["a", "b"] = "a"

@attrs.frozen(kw_only=True)
class Result:
    value: float

class Host(Protocol):
    def look_up(self, key: str) -> str: ...

Function: TypeAlias = Callable[..., int]

class Contract(ABC):
    abi_version: ClassVar[str] = "1.4"
    durable: ClassVar[bool] = False

    def __init__(self, config: Any, context: Any) -> None: ...

    @abstractmethod
    async def ask(self, request: Request) -> Result: ...

    @abstractmethod
    def stream(self, request: Request) -> AsyncGenerator[Result, None]: ...

    @abstractmethod
    def mode(self) -> AbstractContextManager[None]: ...

    @property
    @abstractmethod
    def layout(self) -> int: ...

    @classmethod
    @abstractmethod
    def topology(cls, request: Request) -> Result: ...

    def close(self, force: bool = False) -> None: ...

    def _private(self) -> None: ...
"""

ASK = "    @abstractmethod\n    async def ask(self, request: Request) -> Result: ..."
CLOSE = "    def close(self, force: bool = False) -> None: ..."

#: name of the change: what to replace by what, the level, and what the report names
VARIANTS: dict[str, tuple[str, str, str, str]] = {
    "new abstract method": (
        CLOSE,
        f"{CLOSE}\n    @abstractmethod\n    def more(self) -> None: ...",
        "major",
        "methods.more",
    ),
    "method becoming abstract": (CLOSE, f"    @abstractmethod\n{CLOSE}", "major", "methods.close"),
    "new keyword on an overridable method": (
        "force: bool = False",
        "force: bool = False, *, why: str = ''",
        "major",
        "why: str",
    ),
    "new keyword on an abstract method": (
        "ask(self, request: Request)",
        "ask(self, request: Request, n: int = 1)",
        "major",
        "n: int",
    ),
    "new parameter of the constructor": (
        "config: Any, context: Any",
        "config: Any, context: Any, x: int = 0",
        "major",
        "__init__",
    ),
    "removed parameter": ("force: bool = False", "", "major", "became none"),
    "renamed parameter": ("force: bool = False", "hard: bool = False", "major", "hard: bool"),
    "changed parameter type": ("force: bool", "force: int", "major", "force: int"),
    "parameter that becomes keyword-only": ("self, force", "self, *, force", "major", "keyword only"),
    "changed return": (
        "def close(self, force: bool = False) -> None",
        "def close(self, force: bool = False) -> int",
        "major",
        "'int'",
    ),
    "changed return of a property": ("def layout(self) -> int", "def layout(self) -> str", "major", "methods.layout"),
    "sync becoming async": (CLOSE, CLOSE.replace("def", "async def"), "major", "'sync' became 'async'"),
    "async becoming sync": ("async def ask", "def ask", "major", "'async' became 'sync'"),
    "async generator becoming a coroutine": ("def stream", "async def stream", "major", "methods.stream"),
    "context manager becoming async": (
        "AbstractContextManager[None]: ...",
        "AbstractAsyncContextManager[None]: ...",
        "major",
        "methods.mode",
    ),
    "property becoming a method": ("    @property\n", "", "major", "methods.layout"),
    "class method becoming an instance method": ("    @classmethod\n", "", "major", "methods.topology"),
    "removed method": (CLOSE, "", "major", "methods.close: removed"),
    "removed abstract method": (ASK, "", "major", "methods.ask: removed"),
    "new method with default body": (CLOSE, f"{CLOSE}\n    def more(self) -> None: ...", "minor", "methods.more: new"),
    "abstract becoming concrete": (ASK, ASK.replace("    @abstractmethod\n", ""), "minor", "no longer abstract"),
    "new defaulted field": (
        "    key: str",
        "    key: str\n    extra: int = 0",
        "minor",
        "Request.extra: new, defaulted",
    ),
    "new required field": ("    key: str", "    key: str\n    extra: int", "major", "Request.extra: new, required"),
    "removed field": ('    mode: Literal["a", "b"] = "a"', "", "major", "Request.mode: removed"),
    "changed field type": ("value: float", "value: int", "major", "'float' became 'int'"),
    "changed literal": ('Literal["a", "b"]', 'Literal["a", "b", "c"]', "major", "Request.mode"),
    "field that loses its default": (
        'mode: Literal["a", "b"] = "a"',
        'mode: Literal["a", "b"]',
        "major",
        "lost its default",
    ),
    "field that gets a default": ("value: float", "value: float = 0.0", "minor", "got a default"),
    "new record": (
        "class Host",
        "@attrs.frozen(kw_only=True)\nclass New:\n    x: int\n\nclass Host",
        "minor",
        "records.New",
    ),
    "removed record": ("@attrs.frozen(kw_only=True)\nclass Result:\n    value: float", "", "major", "records.Result"),
    "new class attribute with a value": (
        "durable:",
        "fast: ClassVar[bool] = True\n    durable:",
        "minor",
        "attributes.fast",
    ),
    "new class attribute without a value": (
        "durable:",
        "fast: ClassVar[bool]\n    durable:",
        "major",
        "attributes.fast",
    ),
    "new method that the host offers": (
        "class Host(Protocol):",
        "class Host(Protocol):\n    def more(self) -> str: ...",
        "minor",
        "Host.more",
    ),
    "removed method that the host offered": (
        "    def look_up(self, key: str) -> str: ...",
        "    x = 1",
        "major",
        "Host.look_up",
    ),
    "changed alias": ("Callable[..., int]", "Callable[..., str]", "major", "aliases.Function"),
    "renamed contract": ("class Contract", "class Renamed", "major", "contract"),
    "another order of fields": (
        '    key: str\n    mode: Literal["a", "b"] = "a"',
        '    mode: Literal["a", "b"] = "a"\n    key: str',
        "none",
        "",
    ),
    "private method": ("def _private(self)", "def _private(self, x: int)", "none", ""),
    "comment and body": (CLOSE, CLOSE.replace("...", "return  # as before"), "none", ""),
}


def contract(source: str) -> type:
    """The contract that a module's source defines."""
    module = types.ModuleType("fake_contract_module")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, module.__name__, "exec", dont_inherit=True), module.__dict__)
        cls = next(v for k, v in vars(module).items() if k in ("Contract", "Renamed"))
        cls._module = module
    finally:
        del sys.modules[module.__name__]
    return cls


def snapshot(source: str) -> dict[str, Any]:
    cls = contract(source)
    return describe("fake", cls, cls._module)  # type: ignore[attr-defined]


def variant(name: str, version: str = "1.4") -> str:
    old, new, _, _ = VARIANTS[name]
    assert old in BASE
    imports = "from contextlib import AbstractAsyncContextManager\n"
    changed = BASE.replace(old, new, 1).replace("import attrs\n", f"import attrs\n{imports}")
    return changed.replace('"1.4"', f'"{version}"')


@pytest.mark.parametrize("name", list(VARIANTS))
def test_each_change_has_its_level_and_is_named(name: str):
    _, _, level, text = VARIANTS[name]
    changes = compare(snapshot(BASE), snapshot(variant(name)))
    assert level == required_bump(changes)
    assert text in "\n".join(map(str, changes))


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("version", ["1.3", "1.4", "1.5", "1.6", "2.0", "2.1", "3.0"])
def test_exactly_the_right_bump_passes(name: str, version: str):
    level = VARIANTS[name][2]
    failures, _ = check_kind(snapshot(BASE), snapshot(variant(name, version)))
    right = {"major": "2.0", "minor": "1.5", "none": "1.4"}[level]
    assert (version != right) == bool(failures)
    if failures and level != "none":
        assert f"a {level} bump is needed" in failures[-1]
        assert right in failures[-1]


def test_a_bump_without_a_change_fails():
    failures, _ = check_kind(snapshot(BASE), snapshot(BASE.replace('"1.4"', '"1.5"')))
    assert ["fake: nothing changed for implementers, but Contract.abi_version went from 1.4 to 1.5"] == failures


def test_minor_and_major_changes_together_are_major():
    both = variant("new method with default body").replace("value: float", "value: int")
    changes = compare(snapshot(BASE), snapshot(both))
    assert ["major", "minor"] == [change.level for change in changes]
    assert "major" == required_bump(changes)


def test_versions_count_on():
    assert ["1.9", "1.10", "2.0"] == [next_version("1.9", bump) for bump in ("none", "minor", "major")]  # type: ignore[arg-type]


@pytest.mark.parametrize("decorator", ["@attrs.define(kw_only=True)", "@attrs.frozen"])
def test_a_record_that_cannot_grow_is_refused(decorator: str):
    with pytest.raises(AssertionError, match="Request cannot grow"):
        snapshot(BASE.replace("@attrs.frozen(kw_only=True)", decorator, 1))


def test_a_snapshot_survives_its_file():
    described = snapshot(BASE)
    assert [] == compare(json.loads(json.dumps(described)), described)


class Folder:
    """A snapshot folder and the tool that works on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "fake.json"
        self.folder = folder
        self.monkeypatch = monkeypatch

    def tool(self, command: str, source: str, *options: str) -> int:
        cls = contract(source)
        self.monkeypatch.setitem(sys.modules, "fake_contract_module", cls._module)  # type: ignore[attr-defined]
        return abi_snapshot.main([command, "--folder", str(self.folder), *options], contracts={"fake": cls})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


def test_check_fails_without_a_snapshot_and_passes_after_the_first_write(folder: Folder):
    assert 1 == folder.tool("check", BASE)
    assert 1 == folder.tool("write", BASE)
    assert 0 == folder.tool("write", BASE, "--unreleased")
    assert 0 == folder.tool("check", BASE)


def test_check_names_each_change_and_the_version_it_needs(folder: Folder, capsys: pytest.CaptureFixture[str]):
    folder.tool("write", BASE, "--unreleased")
    assert 1 == folder.tool("check", variant("removed method"))
    printed = capsys.readouterr().out
    assert "fake: major: methods.close: removed" in printed
    assert "a major bump is needed: Contract.abi_version has to be 2.0, and is 1.4" in printed


def test_write_refuses_without_the_bump_and_leaves_the_file(folder: Folder):
    folder.tool("write", BASE, "--unreleased")
    before = folder.file.read_text()
    assert 1 == folder.tool("write", variant("new defaulted field"))
    assert before == folder.file.read_text()
    assert 0 == folder.tool("write", variant("new defaulted field", "1.5"))
    assert "1.5" == json.loads(folder.file.read_text())["abi_version"]
    assert 0 == folder.tool("check", variant("new defaulted field", "1.5"))


def test_unreleased_writes_whatever_changed(folder: Folder):
    folder.tool("write", BASE, "--unreleased")
    assert 0 == folder.tool("write", variant("removed method"), "--unreleased")
    assert 0 == folder.tool("check", variant("removed method"))


def test_check_with_the_right_bump_reminds_of_write(folder: Folder, capsys: pytest.CaptureFixture[str]):
    folder.tool("write", BASE, "--unreleased")
    assert 0 == folder.tool("check", variant("new defaulted field", "1.5"))
    assert "run: write" in capsys.readouterr().out


@pytest.mark.parametrize("kind", list(CONTRACTS))
def test_the_committed_snapshots_are_those_of_the_code(kind: str):
    file = Path(__file__).parents[3] / "core" / "abi" / f"{kind}.json"
    assert json.loads(file.read_text(encoding="utf-8")) == describe(kind, CONTRACTS[kind])


def test_the_committed_snapshot_of_the_sdk_is_that_of_the_code():
    file = Path(__file__).parents[3] / "core" / "abi" / "sdk.json"
    assert json.loads(file.read_text(encoding="utf-8")) == describe_sdk()


@pytest.mark.parametrize(
    ("section", "change", "level"),
    [
        ("methods", lambda names: names.pop("buckets.digest"), "major"),
        ("methods", lambda names: names["buckets.put"]["parameters"].pop(), "major"),
        ("methods", lambda names: names.update({"buckets.new": names["buckets.digest"]}), "minor"),
        ("classes", lambda names: names.pop("receiver.WeightReceiver"), "major"),
        ("classes", lambda names: names["receiver.WeightReceiver"].pop("tensors"), "major"),
        ("classes", lambda names: names["transfer.OneSenderEngine"]["heard"].update(abstract=True), "major"),
        ("aliases", lambda names: names.pop("transfer.TRANSFER"), "major"),
    ],
    ids=["function", "parameter", "new function", "class", "method", "abstract method", "constant"],
)
def test_a_change_of_the_sdk_demands_a_version(section: str, change: Any, level: str):
    before, after = describe_sdk(), describe_sdk()
    change(after[section])
    assert level == required_bump(compare(before, after))
    assert check_kind(before, after)[0]
