"""The registry of installed plugins, which are found without an import and loaded one by one.

Each installed distribution may name manifests in the entry-point groups of :data:`GROUPS`. The value of such an entry
point, ``package:file.toml``, is a file beside ``__init__.py`` of a top-level package, which is not imported.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from jackfield.abc import KINDS
from jackfield.errors import JackfieldError, PluginError, PluginNotFound, did_you_mean
from jackfield.imports import collection_paused
from jackfield.plugins.manifest import Manifest, check_abi, invalid_manifest, parse_manifest, structure_problems
from jackfield.settings import structure

#: The entry-point group of each kind.
GROUPS: dict[str, str] = {**{kind: f"jackfield.{kind}s" for kind in KINDS}, "hooks": "jackfield.hooks"}

_VALUE = re.compile(r"(?P<package>[^\W\d]\w*):(?P<file>[A-Za-z0-9_.]+\.toml)")
#: The word for a kind in the names of distributions that provide it.
_DISTRIBUTION_WORD = {"transfer_queue": "transport", "checkpoint_engine": "transport"}


@attrs.frozen(kw_only=True)
class PluginRecord:
    """One installed plugin, usable or not. Its class and its settings class are imported at their first use."""

    name: str
    kind: str
    distribution: str
    version: str
    error: JackfieldError | None = None  #: why it cannot be used
    manifest: Manifest | None = None

    @property
    def abi(self) -> str | None:
        """The version of the contract for which it was built; None: the manifest could not be read."""
        return None if self.manifest is None else self.manifest.abi

    @property
    def label(self) -> str:
        """The kind, name and distribution for error messages."""
        return f"{self.kind} '{self.name}' ({self.distribution} {self.version})"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields, as ``jackfield plugins list --json`` prints them."""
        return {
            **{name: getattr(self, name) for name in ("name", "kind", "abi", "distribution", "version")},
            "status": "ok" if self.error is None else "broken",
            "error": None if self.error is None else self.error.as_dict(),
            "capabilities": dict(self.manifest.capabilities) if self.manifest else {},
            "description": self.manifest.description if self.manifest else "",
        }

    def identity(self) -> dict[str, Any]:
        """Return what must be equal in every process that loads the plugin, as plain values."""
        found = {name: getattr(self, name) for name in ("distribution", "version", "abi")}
        return {**found, "capabilities": dict(self.usable().capabilities)}

    def usable(self) -> Manifest:
        """Return the manifest of a usable plugin, or raise the error of a broken one."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self.manifest is not None, "a record that is not broken has a manifest"
        return self.manifest

    def imported(self, reference: str | None) -> Any:
        """Import the object ``package.module:Name``, or raise ``plugin.object-missing`` or ``plugin.import``."""
        module_name, _, attribute = str(reference).partition(":")
        module = import_module(module_name, self.usable(), self.label)
        try:
            return getattr(module, attribute)
        except AttributeError as error:
            names = ", ".join(sorted(name for name in vars(module) if name[0] != "_"))
            raise _missing(f"object {reference}", self.label, f"the module has {names}") from error

    @functools.cached_property
    def cls(self) -> type:
        """The plugin's class, which fits its contract. A ``PluginError`` is raised if it cannot be used."""
        if self.kind == "hooks":
            return type(self.name, (), {"hooks": import_module(str(self.usable().hooks), self.usable(), self.label)})
        cls: type = self.imported(self.usable().object)
        for problem in structure_problems(self.kind, cls, self.label):
            raise problem
        return cls

    @functools.cached_property
    def settings_class(self) -> type:
        """The frozen attrs class of the plugin's settings. Only its module is imported."""
        if self.kind == "hooks":
            return attrs.make_class("NoSettings", {}, frozen=True)
        cls = self.imported(self.usable().config)
        if inspect.isclass(cls) and attrs.has(cls) and is_frozen(cls):
            return cls
        message, expected = "the plugin's config is not a frozen attrs class", "a class made by @attrs.frozen"
        fix = "decorate the class with @attrs.frozen(kw_only=True), or correct 'config' in the manifest"
        details = {"where": self.label, "expected": expected, "found": repr(cls), "fix": fix}
        raise PluginError(message, code="plugin.config-class", **details)

    def build(self, settings: Mapping[str, Any], context: Any, where: str = "") -> Any:
        """Build the plugin's object from plain settings and the kind's context (``EngineContext``, …).

        ``where`` is the path of ``settings`` in the configuration, for a ``ConfigError``.
        """
        return self.cls(structure(self.settings_class, settings, where), context)


@attrs.frozen
class Registry:
    """The plugins that were found, including broken ones."""

    _records: tuple[PluginRecord, ...]

    def records(self, kind: str | None = None) -> tuple[PluginRecord, ...]:
        """Return all plugins, or those of one kind, including broken ones, sorted by kind and name."""
        return tuple(record for record in self._records if kind is None or record.kind == kind)

    def resolve(self, name: str, kind: str | None = None) -> PluginRecord:
        """Return the record, usable or broken, of a plugin that a user named, possibly without its kind.

        Raise ``plugin.not-found``, or ``plugin.ambiguous`` if plugins of several kinds have the name.
        """
        candidates = self.records(kind)
        matches = [record for record in candidates if record.name == name]
        kinds = list(dict.fromkeys(record.kind for record in matches))
        if len(kinds) > 1:
            message, fix = f"plugins of several kinds have the name '{name}'", f"say which: --kind {kinds[0]}"
            raise PluginError(message, code="plugin.ambiguous", expected="one kind", found=", ".join(kinds), fix=fix)
        if matches:
            return matches[0]  # if there are several, each is broken
        if kind is not None and kind not in GROUPS:
            expected = "one of " + ", ".join(GROUPS)
            raise PluginNotFound(f"there is no kind of plugin '{kind}'", expected=expected, found=repr(kind))
        usable = [record.name for record in candidates if record.error is None]
        broken = [f"{each.name} ([{each.error.code}] {each.error.message})" for each in candidates if each.error]
        others = sorted({record.kind for record in self._records if record.name == name})
        hint = did_you_mean(name, [record.name for record in candidates])
        hint += f" (there is a {', '.join(others)} of this name)" if others else ""
        noun = kind or "plugin"
        raise PluginNotFound(
            f"no {noun} '{name}' is installed{hint}",
            expected=f"a distribution that provides the {noun} '{name}'",
            found=f"installed: {', '.join(usable) or 'none'}" + (f"; broken: {', '.join(broken)}" if broken else ""),
            fix="correct the name, or install it (by convention: pip install "
            f"jackfield-{_DISTRIBUTION_WORD.get(noun, noun)}-{name}); `jackfield plugins list` shows what is there",
        )

    def load(self, kind: str, name: str) -> PluginRecord:
        """Import a plugin and check its structure. Raise a ``PluginError`` if it cannot be used."""
        record = self.resolve(name, kind)
        record.cls, record.settings_class  # noqa: B018 - the first use imports and checks them
        return record


def discover(path: Sequence[str] | None = None) -> Registry:
    """Find installed plugins, sorted by kind and name, without importing them. Broken ones have their error.

    ``path`` has the folders to search, like ``sys.path``; None: this interpreter's.
    """
    importlib.invalidate_caches()  # a plugin may have been installed since the last search
    kinds = [*GROUPS]
    found = sorted(_installed(path), key=lambda record: (kinds.index(record.kind), record.name, record.distribution))
    for number, record in enumerate(found):
        key, what = (record.kind, record.name), f"{record.kind} '{record.name}'"
        same = [f"{each.distribution} {each.version}" for each in found if (each.kind, each.name) == key]
        if record.error is None and len(same) > 1:
            details: dict[str, Any] = {"where": what, "expected": "one", "found": ", ".join(same)}
            message, fix = f"{len(same)} distributions provide the {what}", "uninstall all but one of them"
            error = PluginError(message, code="plugin.duplicate", fix=fix, **details)
            found[number] = attrs.evolve(record, error=error)
    return Registry(tuple(found))


@functools.cache
def installed() -> Registry:
    """Return this process's registry; ``installed.cache_clear()`` drops it."""
    return discover()


def load_plugin(kind: str, name: str) -> PluginRecord:
    """Call :meth:`Registry.load` on this process's registry."""
    return installed().load(kind, name)


def _installed(path: Sequence[str] | None) -> Iterator[PluginRecord]:
    """Yield the plugins of each distribution. A bad line of an ``entry_points.txt`` does not hide others."""
    seen: set[str] = set()
    kinds = {group: kind for kind, group in GROUPS.items()}
    search: dict[str, Any] = {} if path is None else {"path": list(path)}
    for distribution in importlib.metadata.distributions(**search):
        text = distribution.read_text("entry_points.txt") or ""
        if "jackfield." not in text:  # true for nearly all; parsing metadata takes most of the time
            continue
        project = version = "unknown"
        with contextlib.suppress(Exception):  # damaged metadata: still shown
            project, version = str(distribution.metadata["Name"]), str(distribution.metadata["Version"])
        key, group, records = re.sub(r"[-_.]+", "-", project).lower(), "", list[PluginRecord]()
        for line in map(str.strip, text.splitlines()):
            if line.startswith("[") and line.endswith("]"):
                group = line[1:-1].strip()
            elif line and not line.startswith(("#", ";")) and group.startswith("jackfield."):
                name, _, value = (part.strip() for part in line.partition("="))
                for likely in difflib.get_close_matches(group, kinds, n=1, cutoff=0.85):  # include misspelt groups
                    record = PluginRecord(name=name, kind=kinds[likely], distribution=project, version=version)
                    try:
                        record = attrs.evolve(record, manifest=_manifest(record, group, value, path))
                        check_abi(record.kind, str(record.abi), record.label)
                    except JackfieldError as error:  # a problem of one plugin does not affect others
                        record = attrs.evolve(record, error=error)
                    records.append(record)
        if records and key not in seen:  # the first on the path takes precedence, as in an import
            seen.add(key)
            yield from records


def _manifest(record: PluginRecord, group: str, value: str, path: Sequence[str] | None) -> Manifest:
    where = f"{record.distribution} {record.version}, entry point {record.name} = {value}"
    parts, right = _VALUE.fullmatch(value), GROUPS[record.kind]
    if group != right:
        message = f"no kind of plugin has the entry-point group '{group}' (did you mean '{right}'?)"
        raise invalid_manifest(message, where, expected="one of " + ", ".join(GROUPS.values()), found=group)
    if parts is None:
        expected = "name = toplevel_package:file.toml"
        raise invalid_manifest("an entry point does not name a manifest", where, expected=expected, found=value)
    spec = find_package(parts["package"], path)
    places = [str(Path(each, parts["file"])) for each in (spec and spec.submodule_search_locations) or ()]
    read = getattr(spec and spec.loader, "get_data", None)  # a loader can also read a zip archive
    for place in places:
        with contextlib.suppress(OSError):
            content = read(place) if read else Path(place).read_bytes()
            return parse_manifest(content, source=place, kind=record.kind, name=record.name)
    expected = " or ".join(places) or f"a package '{parts['package']}' that holds {parts['file']}"
    fix = f"reinstall {record.distribution}; its author has to ship {parts['file']} in the wheel"
    details = {"where": where, "expected": expected, "found": f"no such {'file' if places else 'package'}", "fix": fix}
    raise PluginError("a manifest is not there", code="plugin.manifest-missing", **details)


def find_package(package: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Find a top-level package without importing it."""
    if path is not None:
        return PathFinder.find_spec(package, path)
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module without a spec, or a finder that failed
        return None


def is_frozen(cls: type) -> bool:
    """Return whether instances of an attrs class refuse assignment, by trying one."""
    try:
        setattr(object.__new__(cls), "x", None)  # noqa: B010
    except Exception as error:
        return isinstance(error, attrs.exceptions.FrozenInstanceError)
    return False


def import_module(module: str, manifest: Manifest, where: str) -> ModuleType:
    """Import a module of a plugin, or raise ``plugin.object-missing`` or ``plugin.import`` with its cause."""
    try:
        with collection_paused():
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # an import may do anything, including sys.exit()
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise _missing(f"module {module}", where) from error
        fix = "correct the plugin's module, or reinstall the plugin; `jackfield plugins doctor` tries it on its own"
        fix = f"install what it needs: pip install '{manifest.requirement(missing)}'" if missing else fix
        details = {"where": where, "expected": f"{module} to be imported", "found": f"{type(error).__name__}: {error}"}
        raise PluginError(f"importing {module} failed", code="plugin.import", fix=fix, **details) from error


def _missing(what: str, where: str, found: str = "nothing there") -> PluginError:
    message, fix = f"the manifest names the {what}, which does not exist", "correct the manifest, or reinstall it"
    return PluginError(message, code="plugin.object-missing", where=where, expected=what, found=found, fix=fix)
