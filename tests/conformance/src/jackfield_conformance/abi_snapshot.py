"""Compare the contracts with their snapshots, and say what a change means for plugins.

``python -m jackfield_conformance.abi_snapshot check`` compares the code with ``core/abi/<kind>.json``. It fails if they
differ and ``abi_version`` was not raised accordingly, or was raised without a difference. ``write`` writes the files,
and refuses in the same cases. A snapshot has the methods and properties of the contract and its ``__init__``
(abstractness, flavour, parameters, return annotation), its class attributes, the methods of protocols that the host
implements, the fields of the frozen attrs classes in its module, and type aliases. ``core/abi/sdk.json`` has the same
of the public names of :mod:`jackfield.sdk`.

*Major*: a new abstract method, a method that becomes abstract, a new parameter on a method, any changed parameter,
return or flavour (synchronous, asynchronous, …), a removed method, class or field, a changed field type, a new required
field. *Minor*: a new method with a default body, an abstract method that becomes concrete, a new defaulted field or a
field that gets a default, a new class or alias. *None*: another order.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
from packaging.version import Version

import jackfield.sdk
from jackfield.abc import CONTRACTS
from jackfield.plugins.manifest import annotation_text, flavour, public_members, signature_of
from jackfield.plugins.registry import is_frozen

Level = Literal["major", "minor", "none"]
Snapshot = Mapping[str, Any]
Judge = Callable[[Any, Any], Iterable[tuple[Level, str]]]

_ORDER: tuple[Level, ...] = ("none", "minor", "major")


@attrs.frozen
class Change:
    """One difference between a snapshot and the code."""

    level: Level
    path: str  #: ``methods.generate``, ``records.ScoreRequest.attempt``
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.path}: {self.text}"


def describe(kind: str, contract: type, module: types.ModuleType | None = None) -> dict[str, Any]:
    """Return the JSON-ready snapshot of a contract; its records are in ``module``, by default its own."""
    module = module or sys.modules[contract.__module__]
    classes = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    records = {name: _fields(value) for name, value in classes.items() if attrs.has(value)}
    protocols = {name: _methods(value) for name, value in classes.items() if _is_protocol(value)}
    for methods in protocols.values():
        methods.pop("__init__", None)  # typing's own
    return {
        "kind": kind,
        "abi_version": contract.abi_version,  # type: ignore[attr-defined]
        "contract": contract.__name__,
        "methods": _methods(contract),
        "attributes": {  # those that an implementer sets
            name: {"type": annotation_text(annotation), "default": hasattr(contract, name)}
            for name, annotation in inspect.get_annotations(contract).items()
            if not name.startswith("_") and name != "abi_version"
        },
        "protocols": protocols,
        "records": records,
        "aliases": _aliases(module),
    }


def describe_sdk(package: types.ModuleType = jackfield.sdk) -> dict[str, Any]:
    """Make the snapshot of a package's public names, those of its modules included: plain values that fit into JSON."""
    functions: dict[str, Any] = {}
    classes: dict[str, type] = {}
    aliases: dict[str, str] = {}
    for found in (None, *(each for each in pkgutil.iter_modules(package.__path__) if not each.name.startswith("_"))):
        module = package if found is None else importlib.import_module(f"{package.__name__}.{found.name}")
        for name in _public(module) - {"abi_version"}:
            value, path = getattr(module, name), name if found is None else f"{found.name}.{name}"
            if inspect.isclass(value):
                classes[path] = value
            elif inspect.isroutine(value):
                functions[path] = staticmethod(value)
            else:
                aliases[path] = str(value) if isinstance(value, str | int | float) else type(value).__name__
    holder = type("Functions", (), functions)
    return {
        "kind": "sdk",
        "abi_version": package.abi_version,
        "contract": package.__name__,
        "methods": {path: _method(holder, path) for path in sorted(functions)},
        "attributes": {},
        "protocols": {},
        "classes": {path: _methods(classes[path]) for path in sorted(classes)},
        "records": {path: _fields(cls) for path, cls in sorted(classes.items()) if attrs.has(cls) and is_frozen(cls)},
        "aliases": dict(sorted(aliases.items())),
    }


def _public(module: types.ModuleType) -> set[str]:
    """Return the names in ``__all__``, or those that a module without it defines with no leading underscore."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    nodes = ast.parse(inspect.getsource(module)).body
    targets = [target for node in nodes for target in getattr(node, "targets", [getattr(node, "target", node)])]
    names = {getattr(target, "id", getattr(target, "name", "_")) for target in targets}
    return {name for name in names if not name.startswith("_")}


def _methods(cls: type) -> dict[str, Any]:
    return {name: _method(cls, name) for name in public_members(cls)}


def _method(cls: type, name: str) -> dict[str, Any]:
    raw = inspect.getattr_static(cls, name)
    binding = "class" if isinstance(raw, classmethod) else "static" if isinstance(raw, staticmethod) else "instance"
    return {
        "abstract": bool(getattr(raw, "__isabstractmethod__", False)),
        "flavour": flavour(cls, name),
        "binding": binding,
        "parameters": [
            {
                "name": parameter.name,
                "kind": parameter.kind.name.lower(),
                "default": parameter.default is not inspect.Parameter.empty,
                "type": annotation_text(parameter.annotation),
            }
            for parameter in signature_of(cls, name).parameters.values()
        ],
        "returns": annotation_text(signature_of(cls, name).return_annotation),
    }


def _fields(record: type) -> dict[str, Any]:
    fields = attrs.fields(record)
    can_grow = is_frozen(record) and all(field.kw_only for field in fields)
    assert can_grow, f"{record.__module__}.{record.__name__} cannot grow: write @attrs.frozen(kw_only=True)"
    annotations: dict[str, Any] = {}  # as written: structuring a class replaces its fields' types by objects
    for base in reversed(record.__mro__):
        annotations.update(vars(base).get("__annotations__", {}))
    return {
        field.name: {"type": annotation_text(annotations[field.name]), "default": field.default is not attrs.NOTHING}
        for field in fields
    }


def _is_protocol(cls: type) -> bool:
    return bool(getattr(cls, "_is_protocol", False)) and cls is not Protocol


def _aliases(module: types.ModuleType) -> dict[str, str]:
    """Return the module's type aliases, with their values as text."""
    return {
        name: str(getattr(module, name))
        for name, annotation in inspect.get_annotations(module).items()
        if annotation_text(annotation).rpartition(".")[2] == "TypeAlias"
    }


def compare(old: Snapshot, new: Snapshot) -> list[Change]:
    """Find every difference between two snapshots of one kind, and what it means for an implementer."""
    changes = [*_members("methods", old["methods"], new["methods"], _compare_method)]
    changes += _members("attributes", old["attributes"], new["attributes"], _compare_field)
    changes += _members("aliases", old["aliases"], new["aliases"], _compare_value)
    changes += _members("", {"contract": old["contract"]}, {"contract": new["contract"]}, _compare_value)
    judges = {"protocols": _compare_host_method, "classes": _compare_method, "records": _compare_field}
    for section, judge in judges.items():
        before, after = old.get(section, {}), new.get(section, {})
        for name in before.keys() | after.keys():
            path = f"{section}.{name}"
            if name not in before:
                changes.append(Change("minor", path, "new"))
            elif name not in after:
                changes.append(Change("major", path, "removed"))
            else:
                changes += _members(path, before[name], after[name], judge)
    return sorted(changes, key=lambda change: (-_ORDER.index(change.level), change.path, change.text))


def _members(path: str, old: Mapping[str, Any], new: Mapping[str, Any], judge: Judge) -> Iterator[Change]:
    """Compare what two mappings hold by name; their order means nothing."""
    for name in old.keys() | new.keys():
        removed: Iterable[tuple[Level, str]] = [("major", "removed")]
        found = judge(old.get(name), new[name]) if name in new else removed
        yield from (Change(level, f"{path}.{name}".lstrip("."), text) for level, text in found)


def _compare_method(old: Any, new: Any) -> Iterator[tuple[Level, str]]:
    if old is None:
        yield ("major", "new, abstract") if new["abstract"] else ("minor", "new")
        return
    if old["abstract"] != new["abstract"]:
        yield ("major", "became abstract") if new["abstract"] else ("minor", "is no longer abstract")
    for key in ("flavour", "binding", "returns", "parameters"):
        if old[key] != new[key]:
            yield "major", f"{key}: {_words(old[key])} became {_words(new[key])}"


def _compare_host_method(old: Any, new: Any) -> Iterator[tuple[Level, str]]:
    """Compare a method that the host implements, and plugins only call."""
    yield from _compare_method(old and {**old, "abstract": False}, {**new, "abstract": False})


def _compare_field(old: Any, new: Any) -> Iterator[tuple[Level, str]]:
    if old is None:
        yield ("minor", "new, defaulted") if new["default"] else ("major", "new, required")
        return
    if old["type"] != new["type"]:
        yield "major", f"type {old['type']!r} became {new['type']!r}"
    if old["default"] != new["default"]:
        yield ("minor", "got a default") if new["default"] else ("major", "lost its default")


def _compare_value(old: Any, new: Any) -> Iterator[tuple[Level, str]]:
    if old != new:
        yield "minor" if old is None else "major", f"{old} became {new}"


def _words(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    ends = ((each["kind"].replace("_", " "), ", defaulted" if each["default"] else "") for each in value)
    described = zip(value, ends, strict=True)
    return ", ".join(f"'{each['name']}: {each['type']}' ({kind}{end})" for each, (kind, end) in described) or "none"


def required_bump(changes: Sequence[Change]) -> Level:
    """Return the highest level among changes."""
    return max((change.level for change in changes), key=_ORDER.index, default="none")


def next_version(version: str, bump: Level) -> str:
    """Return the version after a bump: ``1.4`` becomes ``1.5`` or ``2.0``."""
    found = Version(version)
    return {"none": version, "minor": f"{found.major}.{found.minor + 1}", "major": f"{found.major + 1}.0"}[bump]


def check_kind(old: Snapshot | None, new: Snapshot) -> tuple[list[str], list[str]]:
    """Compare the committed snapshot, if there is one, with what the code says now; return failures and remarks."""
    kind = new["kind"]
    if old is None:
        return [f"{kind}: no snapshot is committed; run: write --unreleased"], []
    changes = compare(old, new)
    bump = required_bump(changes)
    expected, found = next_version(old["abi_version"], bump), new["abi_version"]
    lines = [f"{kind}: {change}" for change in changes]
    if expected != found:
        contract = f"{new['contract']}.abi_version"
        if bump == "none":
            why = f"nothing changed for implementers, but {contract} went from {old['abi_version']} to {found}"
        else:
            why = f"a {bump} bump is needed: {contract} has to be {expected}, and is {found}"
        return [*lines, f"{kind}: {why}"], []
    remark = [f"{kind}: the snapshot is of {old['abi_version']} and the code is {found}; run: write"] if changes else []
    return [], [*lines, *remark]


def main(arguments: Sequence[str] | None = None, contracts: Mapping[str, type] | None = None) -> int:
    """Run ``python -m jackfield_conformance.abi_snapshot`` and return the exit code, 0 or 1.

    ``contracts`` are the abstract class of each kind; without them, those of Jackfield, and the SDK.
    """
    parser = argparse.ArgumentParser(prog="abi_snapshot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("check", "write"))
    source = Path(__file__).parents[4] / "core" / "abi"
    folder = source if source.is_dir() else Path("core/abi")
    parser.add_argument("--folder", type=Path, default=folder, help="where the snapshots are")
    parser.add_argument(
        "--unreleased", action="store_true", help="write whatever changed: no release has these versions yet"
    )
    options = parser.parse_args(arguments)
    failed = False
    snapshots = [describe(kind, contract) for kind, contract in (contracts or CONTRACTS).items()]
    for new in snapshots if contracts is not None else (*snapshots, describe_sdk()):
        file = options.folder / f"{new['kind']}.json"
        old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        failures, remarks = check_kind(old, new)
        if options.command == "write" and (options.unreleased or not failures):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"wrote {file}")
            continue
        for line in (*failures, *remarks):
            print(line)
        failed = failed or bool(failures)
    if not failed and options.command == "check":
        print(f"{len(snapshots)} contracts agree with their snapshots")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
