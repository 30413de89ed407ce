"""Snapshots of the contracts as an implementer sees them, and what a difference means for implementers.

``python -m jackfield.plugins.abi_snapshot check`` compares the code with ``core/abi/<kind>.json``: it fails where
they differ and ``abi_version`` was not bumped accordingly, or was bumped for nothing. ``write`` renews the files, and
refuses likewise. A snapshot holds, for each kind: the methods and properties of the contract and its ``__init__``
(abstractness, what a call yields, parameters, return annotation), its class attributes, the methods of protocols that
the host implements, the fields of the frozen attrs classes in its module, and type aliases.

*Major*: a new abstract method, a method that becomes abstract, a new parameter on a method, any changed parameter,
return or flavour (synchronous, asynchronous, …), a removed method, class or field, a changed field type, a new required
field. *Minor*: a new method with a default body, an abstract method that becomes concrete, a new defaulted field or a
field that gets a default, a new class or alias. *None*: another order.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from jackfield.abc import CONTRACTS
from jackfield.errors import JackfieldError
from jackfield.plugins.abi import parse_version
from jackfield.plugins.members import annotation_text, describe_member, is_frozen, public_members

__all__ = ["Change", "check_kind", "compare", "describe", "main", "next_version", "required_bump"]

Level = Literal["major", "minor", "none"]
Snapshot = Mapping[str, Any]

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
    """The snapshot of a contract: plain values that fit into JSON.

    Args:
        kind: of plugin.
        contract: its abstract class.
        module: where the contract's records, protocols and aliases are; default: the contract's own.

    Raises:
        JackfieldError: ``lint`` when an attrs class of the module is not frozen or has positional fields, and so
            could not grow.
    """
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
        "attributes": _attributes(contract),
        "protocols": protocols,
        "records": records,
        "aliases": _aliases(module),
    }


def _methods(cls: type) -> dict[str, Any]:
    methods = {}
    for name in public_members(cls):
        member = describe_member(cls, name)
        methods[name] = {
            "abstract": member.abstract,
            "flavour": member.flavour,
            "binding": member.binding,
            "parameters": [
                {
                    "name": parameter.name,
                    "kind": parameter.kind.name.lower(),
                    "default": parameter.default is not inspect.Parameter.empty,
                    "type": annotation_text(parameter.annotation),
                }
                for parameter in member.parameters
            ],
            "returns": member.returns,
        }
    return methods


def _attributes(contract: type) -> dict[str, Any]:
    """Class attributes that an implementer sets."""
    return {
        name: {"type": annotation_text(annotation), "default": hasattr(contract, name)}
        for name, annotation in inspect.get_annotations(contract).items()
        if not name.startswith("_") and name != "abi_version"
    }


def _fields(record: type) -> dict[str, Any]:
    fields = attrs.fields(record)
    if not is_frozen(record) or not all(field.kw_only for field in fields):
        raise JackfieldError(
            f"the ABI class {record.__name__} cannot grow",
            code="lint",
            where=record.__module__,
            expected="@attrs.frozen(kw_only=True)",
            fix="make it frozen and keyword-only",
        )
    annotations: dict[str, Any] = {}  # as written: whoever structures a class has attrs replace its types by objects
    for base in reversed(record.__mro__):
        annotations.update(vars(base).get("__annotations__", {}))
    return {
        field.name: {"type": annotation_text(annotations[field.name]), "default": field.default is not attrs.NOTHING}
        for field in fields
    }


def _is_protocol(cls: type) -> bool:
    return bool(getattr(cls, "_is_protocol", False)) and cls is not Protocol


def _aliases(module: types.ModuleType) -> dict[str, str]:
    """Names that the module annotates as type aliases, with their values as text."""
    return {
        name: str(getattr(module, name))
        for name, annotation in inspect.get_annotations(module).items()
        if annotation_text(annotation).rpartition(".")[2] == "TypeAlias"
    }


def compare(old: Snapshot, new: Snapshot) -> list[Change]:
    """Every difference between two snapshots of one kind, and what it means for an implementer."""
    changes = list(_compare_values(old, new, ("contract",)))
    changes += _compare_methods("methods", old["methods"], new["methods"], implemented_by_host=False)
    changes += _compare_fields("attributes", old["attributes"], new["attributes"])
    for section in ("protocols", "records"):
        for name in old[section].keys() | new[section].keys():
            path = f"{section}.{name}"
            if name not in new[section]:
                changes.append(Change("major", path, "removed"))
            elif name not in old[section]:
                changes.append(Change("minor", path, "new"))
            elif section == "records":
                changes += _compare_fields(path, old[section][name], new[section][name])
            else:
                changes += _compare_methods(path, old[section][name], new[section][name], implemented_by_host=True)
    for name in old["aliases"].keys() | new["aliases"].keys():
        before, after = old["aliases"].get(name), new["aliases"].get(name)
        if before != after:
            level: Level = "minor" if before is None else "major"
            changes.append(Change(level, f"aliases.{name}", f"{before} became {after}"))
    return sorted(changes, key=lambda change: (-_ORDER.index(change.level), change.path, change.text))


def _compare_values(old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Change]:
    for key in keys:
        if old[key] != new[key]:
            yield Change("major", key, f"{old[key]} became {new[key]}")


def _order_change(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    if old.keys() == new.keys() and list(old) != list(new):
        yield Change("none", path, "another order")


def _compare_methods(
    path: str, old: Mapping[str, Any], new: Mapping[str, Any], *, implemented_by_host: bool
) -> Iterator[Change]:
    yield from _order_change(path, old, new)
    for name in old.keys() | new.keys():
        here = f"{path}.{name}"
        if name not in new:
            yield Change("major", here, "removed")
        elif name not in old:
            abstract = new[name]["abstract"] and not implemented_by_host
            yield Change("major" if abstract else "minor", here, "new, abstract" if abstract else "new")
        else:
            yield from _compare_method(here, old[name], new[name])


def _compare_method(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    if old["abstract"] != new["abstract"]:
        level: Level = "major" if new["abstract"] else "minor"
        yield Change(level, path, "became abstract" if new["abstract"] else "is no longer abstract")
    for key, noun in (("flavour", "flavour"), ("binding", "binding"), ("returns", "return annotation")):
        if old[key] != new[key]:
            yield Change("major", path, f"{noun} {old[key]!r} became {new[key]!r}")
    before = {parameter["name"]: parameter for parameter in old["parameters"]}
    after = {parameter["name"]: parameter for parameter in new["parameters"]}
    for name in before.keys() | after.keys():
        if name not in after:
            yield Change("major", path, f"parameter '{name}' was removed")
        elif name not in before:
            yield Change("major", path, f"new parameter '{name}', which implementers do not take")
        elif before[name] != after[name]:
            yield Change("major", path, f"parameter {_words(before[name])} became {_words(after[name])}")
    if before.keys() == after.keys() and list(before) != list(after):
        yield Change("major", path, "parameters have another order")


def _words(parameter: Mapping[str, Any]) -> str:
    default = " with a default" if parameter["default"] else ""
    return f"'{parameter['name']}: {parameter['type']}' ({parameter['kind'].replace('_', ' ')}{default})"


def _compare_fields(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    yield from _order_change(path, old, new)
    for name in old.keys() | new.keys():
        here = f"{path}.{name}"
        if name not in new:
            yield Change("major", here, "removed")
        elif name not in old:
            defaulted = new[name]["default"]
            yield Change("minor" if defaulted else "major", here, "new, " + ("defaulted" if defaulted else "required"))
        else:
            if old[name]["type"] != new[name]["type"]:
                yield Change("major", here, f"type {old[name]['type']!r} became {new[name]['type']!r}")
            if old[name]["default"] != new[name]["default"]:
                lost = old[name]["default"]
                yield Change("major" if lost else "minor", here, "lost its default" if lost else "got a default")


def required_bump(changes: Sequence[Change]) -> Level:
    """The greatest level among changes."""
    return max((change.level for change in changes), key=_ORDER.index, default="none")


def next_version(version: str, bump: Level) -> str:
    """The version that follows ``version`` after a bump: ``1.4`` becomes ``1.5`` or ``2.0``."""
    major, minor = parse_version(version)
    return {"none": version, "minor": f"{major}.{minor + 1}", "major": f"{major + 1}.0"}[bump]


def check_kind(old: Snapshot | None, new: Snapshot) -> tuple[list[str], list[str]]:
    """Judge one kind.

    Args:
        old: the committed snapshot; None: there is none.
        new: what the code says now.

    Returns:
        Failures and remarks, lines of text.
    """
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


def _default_folder() -> Path:
    """``core/abi`` of the source tree that this module runs from, or of the working directory."""
    folder = Path(__file__).parents[3] / "abi"
    return folder if folder.is_dir() else Path("core/abi")


def main(arguments: Sequence[str] | None = None, contracts: Mapping[str, type] = CONTRACTS) -> int:
    """Entry point of ``python -m jackfield.plugins.abi_snapshot``; returns the exit code, 0 or 1.

    Args:
        arguments: of the command line; default: ``sys.argv``.
        contracts: the abstract class of each kind.
    """
    parser = argparse.ArgumentParser(prog="abi_snapshot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("--folder", type=Path, default=_default_folder(), help="where the snapshots are")
    parser.add_argument(
        "--unreleased", action="store_true", help="write whatever changed: no release has these versions yet"
    )
    options = parser.parse_args(arguments)
    failed = False
    for kind, contract in contracts.items():
        file = options.folder / f"{kind}.json"
        old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        new = describe(kind, contract)
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
        print(f"{len(contracts)} contracts agree with their snapshots")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
