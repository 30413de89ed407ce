"""Checks that do not run the plugin. The checks 001 to 009 are the same for every kind."""

from __future__ import annotations

import ast
import datetime
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs

from jackfield.errors import ConfigError, JackfieldError
from jackfield.plugins import PluginRecord
from jackfield.settings import structure
from jackfield_conformance.certificates import package_folder
from jackfield_conformance.registry import (
    EVERY_KIND,
    FIRST_BEHAVIOUR,
    PREFIXES,
    NotApplicable,
    Skipped,
    Subject,
    Warned,
    capabilities,
    check,
    checks,
)

#: Seconds for a fresh interpreter to import a plugin's settings.
IMPORT_DEADLINE = 50

#: Packages that settings must not import, because a process that only validates a configuration lacks them.
HEAVY = ("ray", "tensordict", "torch", "transformers")

#: Modules that plugins may import, each with everything below it.
ALLOWED: tuple[str, ...] = ("jackfield.abc", "jackfield.clock", "jackfield.errors", "jackfield.sdk")
ALLOWED += ("jackfield.algorithms", "jackfield.plugins.hooks")  # for packages of hooks

_PAGE = "docs/plugins/conformance.md#structure"
_IMPORT_CONFIG = """
import sys
from collections.abc import Callable
from jackfield.plugins import discover
discover().resolve(sys.argv[2], sys.argv[1]).settings_class
print(",".join(sorted(set(sys.argv[3].split(",")) & set(sys.modules))))
"""

_Function = Callable[[Subject], None]


def every_kind(number: int) -> Callable[[_Function], _Function]:
    """Make a function the check of this number for all kinds."""

    def register(function: _Function) -> _Function:
        for prefix in PREFIXES.values():
            check(f"{prefix}-{number:03d}", page=_PAGE, deadline_seconds=IMPORT_DEADLINE)(function)
        return function

    return register


@every_kind(1)
def manifest_is_valid(subject: Subject) -> None:
    """One distribution provides the plugin, and its manifest is complete and well-formed."""
    error = _record(subject).error
    assert error is None or error.code == "plugin.abi", str(error)


@every_kind(2)
def abi_is_accepted(subject: Subject) -> None:
    """This Jackfield accepts the manifest's ABI version."""
    error = _record(subject).error
    assert error is None or error.code != "plugin.abi", str(error)
    _need_manifest(subject)


@every_kind(3)
def class_fits_the_contract(subject: Subject) -> None:
    """The plugin's class can be imported and fits the abstract class of its contract."""
    record = _need_manifest(subject)
    try:
        record.cls, record.settings_class  # noqa: B018 - the first use imports and checks them
    except JackfieldError as error:
        if error.code != "plugin.config-class":  # the next check's subject
            raise AssertionError(str(error)) from None


@every_kind(4)
def settings_are_light(subject: Subject) -> None:
    """The settings are a frozen attrs class, and importing them imports no heavy package."""
    _need_manifest(subject)
    command = [sys.executable, "-c", _IMPORT_CONFIG, subject.kind, subject.name, ",".join(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    found = done.stdout.strip().splitlines()[-1:]
    assert found in ([], [""]), f"importing the settings also imported {found[0]}"


@every_kind(5)
def settings_have_defaults_or_say_which_not(subject: Subject) -> None:
    """Without settings the plugin's defaults apply, or the error names a setting without a default."""
    record = _need_manifest(subject)
    try:
        config_class = record.settings_class
    except JackfieldError as error:
        raise AssertionError(f"not checked: the settings were refused ({error.code})") from None
    required = [field.name for field in attrs.fields(config_class) if field.init and field.default is attrs.NOTHING]
    refused: ConfigError | None = None
    try:
        structure(config_class, {})
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert refused.code == "config.missing-key", f"the plugin's own defaults are refused: {refused}"
        assert any(name in refused.message for name in required), f"expected one of {required} to be named: {refused}"


@every_kind(6)
def capabilities_are_known(subject: Subject) -> None:
    """The contract knows every capability that the manifest declares."""
    _need_manifest(subject)
    known = capabilities(subject.kind)
    unknown = sorted(subject.capabilities.keys() - known.keys())
    assert not unknown, f"expected capabilities among {sorted(known)}, found {unknown}"


@every_kind(7)
def declared_is_implemented(subject: Subject) -> None:
    """The class implements what the manifest declares, and the manifest declares what it implements."""
    _need_class(subject)
    for name, capability in capabilities(subject.kind).items():
        if capability.detect is None:
            continue
        implemented, declared = capability.detect(subject), subject.has(name)
        if implemented and subject.capabilities.get(name) != "unverified":
            assert declared, (
                f"{subject.cls.__name__} implements '{name}' ({capability.what}), and the manifest does not declare it:"
                f' write {name} = "full" (or "unverified") under [capabilities]'
            )
        if declared:
            assert implemented, f"the manifest declares '{name}' ({capability.what}); {subject.cls.__name__} lacks it"


@every_kind(8)
def exceptions_are_in_order(subject: Subject) -> None:
    """Each exception in the manifest names a check that applies, gives a reason, and is not due for review."""
    _need_manifest(subject)
    problems = exception_problems(subject, datetime.date.today())
    assert not problems, "\n".join(problems)


@every_kind(9)
def fixture_makes_an_instance(subject: Subject) -> None:
    """The manifest's fixture, if there is one, returns plain values, and settings that the plugin accepts."""
    _need_class(subject)
    if subject.config is not None:
        return
    manifest = subject.manifest
    reason = subject.fixture.get("problem", "the settings of a small instance are not known")
    declared = manifest.conformance.fixture if manifest else None
    raise AssertionError(
        f"{reason}\nfix: correct {declared}"
        if declared
        else f'{reason}\nfix: name a function in the manifest: [conformance] fixture = "package.module:function"'
    )


@check(f"{EVERY_KIND}-004", page=_PAGE)
def imports_stay_within_the_sdk(subject: Subject) -> None:
    """The plugin imports only contracts, SDK, errors and clock of Jackfield; a warning names every other line."""
    folder = package_folder(subject.manifest) if subject.manifest else None
    if folder is None or folder.name == "jackfield":
        raise NotApplicable("the plugin's folder is not known" if folder is None else "it is a part of Jackfield")
    reaches = find_reaches(folder, folder.parent)
    if reaches:
        raise Warned("\n".join(f"{reach}, which may change in any release" for reach in reaches))


def find_reaches(folder: Path, root: Path) -> list[str]:
    """Find imports of other Jackfield modules below a folder, also inside of functions, without importing the files.

    Return ``FILE:LINE imports MODULE`` for each, with files relative to ``root``.
    """
    found = []
    allowed = tuple(f"{module}." for module in ALLOWED)
    for file in folder.rglob("*.py"):
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            ours = (name for name in names if f"{name}.".startswith("jackfield."))
            outside = (name for name in ours if not f"{name}.".startswith(allowed))
            found += [(file.relative_to(root), node.lineno, name) for name in outside]
    return [f"{file}:{line} imports {name}" for file, line, name in sorted(found)]


def exception_problems(subject: Subject, today: datetime.date) -> list[str]:
    """Find problems of the exceptions that a manifest declares."""
    declared = subject.manifest.conformance.exceptions if subject.manifest else {}
    known = {each.id: each for each in checks(subject.kind)}
    problems = []
    for id, exception in sorted(declared.items()):
        if id not in known:
            problems.append(f"{id}: there is no such check of {subject.kind}")
            continue
        if known[id].number < FIRST_BEHAVIOUR:
            problems.append(f"{id}: checks of the structure allow no exception")
        elif not known[id].applies(subject.abi, subject.capabilities):
            problems.append(f"{id}: the exception is stale, the check does not apply to this plugin; remove it")
        if not exception.reason.strip():
            problems.append(f"{id}: the reason is empty; say why the plugin cannot keep it")
        if datetime.date.fromisoformat(exception.review) < today:
            problems.append(f"{id}: the review was due on {exception.review}; look at it again, and set a new date")
    return problems


def _record(subject: Subject) -> PluginRecord:
    if subject.record is None:
        raise Skipped("the plugin is not installed")
    return subject.record


def _need_manifest(subject: Subject) -> PluginRecord:
    record = _record(subject)
    refused = record.manifest is None or record.error is not None
    assert not refused, f"not checked: the plugin was refused ({getattr(record.error, 'code', 'no manifest')})"
    return record


def _need_class(subject: Subject) -> None:
    _need_manifest(subject)
    assert subject.cls is not None, "not checked: the plugin's class was refused (see 003 and 004)"
