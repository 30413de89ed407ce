"""The installed plugins by kind and name, and how one becomes an object."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import attrs

from jackfield.abc import KINDS
from jackfield.errors import PluginError, PluginImportError, PluginNotFound
from jackfield.imports import collection_paused
from jackfield.plugins.discovery import PluginRecord, find_plugins
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.structure import check_settings_class, check_structure
from jackfield.settings import structure

#: The word in the names of distributions that provide a kind.
_DISTRIBUTION_WORD = {"transfer_queue": "transport", "checkpoint_engine": "transport"}


@attrs.frozen
class LoadedPlugin:
    """A plugin that has passed the checks of its manifest and of its structure."""

    manifest: Manifest
    cls: type
    settings_class: type

    def build(self, settings: Mapping[str, Any], context: Any, where: str = "") -> Any:
        """Build the plugin's object.

        Args:
            settings: Plain values of the plugin's own section of the configuration.
            context: The kind's context (``EngineContext``, ``RolloutContext``, …).
            where: The path of ``settings`` in the configuration, for errors.

        Raises:
            ConfigError: The settings do not fit the plugin's settings class; the error has the path.
        """
        return self.cls(structure(self.settings_class, settings, where), context)


class Registry:
    """The plugins that were found, usable or not."""

    def __init__(self, records: Iterable[PluginRecord]) -> None:
        self._records = tuple(records)
        self._loaded: dict[tuple[str, str], LoadedPlugin] = {}

    def records(self, kind: str | None = None) -> tuple[PluginRecord, ...]:
        """Return all plugins, or those of one kind, broken ones included, in the order of kinds and names."""
        return tuple(record for record in self._records if kind is None or record.kind == kind)

    def find(self, kind: str, name: str) -> Manifest:
        """Return the manifest of a usable plugin.

        Raises:
            PluginNotFound: No distribution provides it; the message lists the plugins that are installed.
            PluginError: The plugin is broken; the error says why.
        """
        return self._record(kind, name).usable()

    def resolve(self, name: str, kind: str | None = None) -> PluginRecord:
        """Return the record, broken or not, of a plugin that a person has named, perhaps without its kind.

        Raises:
            PluginNotFound: There is none.
            PluginError: ``plugin.ambiguous`` when plugins of several kinds have the name.
        """
        matches = [record for record in self.records(kind) if record.name == name]
        if not matches:
            raise self._not_found(kind, name)
        kinds = sorted({record.kind for record in matches}, key=KINDS.index)
        if len(kinds) > 1:
            raise PluginError(
                f"plugins of several kinds have the name '{name}'",
                code="plugin.ambiguous",
                expected="one kind",
                found=", ".join(kinds),
                fix=f"say which: --kind {kinds[0]}",
            )
        return matches[0]

    def load(self, kind: str, name: str) -> LoadedPlugin:
        """Import a plugin and check its structure.

        Raises:
            PluginImportError: Its module raised; the original error is chained.
            PluginError: It cannot be used, or its class or its settings do not fit the contract.
        """
        if (kind, name) not in self._loaded:
            record, manifest = self._record(kind, name), self.find(kind, name)
            cls = import_object(manifest.object, manifest, record.label)
            check_structure(kind, cls, record.label)
            self._loaded[kind, name] = LoadedPlugin(manifest, cls, self.settings_class(kind, name))
        return self._loaded[kind, name]

    def settings_class(self, kind: str, name: str) -> type:
        """Return the class of a plugin's settings; imports only the module that holds it.

        Raises:
            PluginError: As :meth:`load`.
        """
        record, manifest = self._record(kind, name), self.find(kind, name)
        return check_settings_class(import_object(manifest.config, manifest, record.label), record.label)

    def _record(self, kind: str, name: str) -> PluginRecord:
        matches = [record for record in self.records(kind) if record.name == name]
        if not matches:
            raise self._not_found(kind, name)
        return min(matches, key=lambda record: record.error is None)  # where there are several, each is broken

    def _not_found(self, kind: str | None, name: str) -> PluginNotFound:
        if kind is not None and kind not in KINDS:
            expected = "one of " + ", ".join(KINDS)
            return PluginNotFound(f"there is no kind of plugin '{kind}'", expected=expected, found=repr(kind))
        candidates = self.records(kind)
        usable = [record.name for record in candidates if record.error is None]
        broken = [f"{each.name} ([{each.error.code}] {each.error.message})" for each in candidates if each.error]
        close = difflib.get_close_matches(name, [record.name for record in candidates], n=1)
        others = sorted({record.kind for record in self._records if record.name == name})
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        hint += f" (there is a {', '.join(others)} of this name)" if others else ""
        noun = kind or "plugin"
        return PluginNotFound(
            f"no {noun} '{name}' is installed{hint}",
            expected=f"a distribution that provides the {noun} '{name}'",
            found=f"installed: {', '.join(usable) or 'none'}" + (f"; broken: {', '.join(broken)}" if broken else ""),
            fix="correct the name, or install it (by convention: pip install "
            f"jackfield-{_DISTRIBUTION_WORD.get(noun, noun)}-{name}); `jackfield plugins list` shows what is there",
        )


def discover(path: Sequence[str] | None = None) -> Registry:
    """Look for installed plugins; imports none.

    Args:
        path: Folders to look into, like ``sys.path``; None: this interpreter's.
    """
    return Registry(find_plugins(path))


@functools.cache
def installed() -> Registry:
    """Return this process's registry; ``installed.cache_clear()`` forgets it."""
    return discover()


def load_plugin(kind: str, name: str) -> LoadedPlugin:
    """Call :meth:`Registry.load` on this process's registry."""
    return installed().load(kind, name)


def import_module(module: str, manifest: Manifest, where: str) -> ModuleType:
    """Import a module of a plugin; an exception that it raises becomes an error that names the plugin.

    Raises:
        PluginError: ``plugin.object-missing`` when the module itself does not exist.
        PluginImportError: It raised; the original error is chained.
    """
    try:
        with collection_paused():
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # an import may do anything, sys.exit() included
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise _missing(f"module {module}", where) from error
        fix = "correct the plugin's module, or reinstall the plugin; `jackfield plugins doctor` tries it on its own"
        raise PluginImportError(
            f"importing {module} failed",
            where=where,
            expected=f"{module} to be imported",
            found=f"{type(error).__name__}: {error}",
            fix=f"install what it needs: pip install '{_requirement(missing, manifest)}'" if missing else fix,
        ) from error


def import_object(reference: str, manifest: Manifest, where: str) -> Any:
    """Import what ``package.module:Attribute`` names.

    Raises:
        PluginError: ``plugin.object-missing``.
        PluginImportError: The module raised.
    """
    module_name, _, attribute = reference.partition(":")
    module = import_module(module_name, manifest, where)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise _missing(f"object {reference}", where, sorted(n for n in vars(module) if n[0] != "_")) from error


def _missing(what: str, where: str, names: Sequence[str] = ()) -> PluginError:
    return PluginError(
        f"the manifest names the {what}, which does not exist",
        code="plugin.object-missing",
        where=where,
        expected=what,
        found=f"the module has {', '.join(names)}" if names else "nothing there",
        fix="correct the manifest, or reinstall the plugin",
    )


def _requirement(module: str, manifest: Manifest) -> str:
    """Return the manifest's requirement that names a missing module, or the module's name."""
    from packaging.requirements import Requirement

    top = module.partition(".")[0]
    name = top.lower().replace("_", "-")
    declared = (text for text in manifest.env.requires if Requirement(text).name.lower().replace("_", "-") == name)
    return next(declared, top)
