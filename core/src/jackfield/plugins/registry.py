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
from jackfield.errors import JackfieldError, PluginError, PluginImportError, PluginNotFound, StructureError
from jackfield.imports import collection_paused
from jackfield.plugins.discovery import PluginRecord, find_plugins
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.structure import check_config_class, check_structure
from jackfield.settings import structure

__all__ = ["LoadedPlugin", "Registry", "discover", "import_module", "import_object", "installed", "load_plugin"]

#: The word in the names of distributions that provide a kind.
_DISTRIBUTION_WORD = {"transfer_queue": "transport", "checkpoint_engine": "transport"}


@attrs.frozen
class LoadedPlugin:
    """A plugin that has passed the manifest and the structure gate."""

    manifest: Manifest
    cls: type
    config_class: type

    def build(self, settings: Mapping[str, Any], context: Any, where: str = "") -> Any:
        """Make the plugin's object.

        Args:
            settings: plain values of the plugin's own section of the configuration.
            context: the kind's context (``EngineContext``, ``RolloutContext``, …).
            where: the path of ``settings`` in the configuration, for errors.

        Raises:
            ConfigError: when the settings do not fit the plugin's config class, with the path.
        """
        return self.cls(structure(self.config_class, settings, where), context)


class Registry:
    """The plugins that were found, usable or not."""

    def __init__(self, records: Iterable[PluginRecord]) -> None:
        self._records = tuple(records)
        self._loaded: dict[tuple[str, str], LoadedPlugin] = {}

    def records(self, kind: str | None = None) -> tuple[PluginRecord, ...]:
        """All plugins, or those of one kind, broken ones included, in the order of kinds and names."""
        return tuple(record for record in self._records if kind is None or record.kind == kind)

    def find(self, kind: str, name: str) -> Manifest:
        """The manifest of a usable plugin.

        Raises:
            PluginNotFound: no distribution provides it; the message lists what is there.
            DuplicatePlugin: several do.
            ManifestError: its manifest is missing or malformed.
            AbiError: it was built for another version of the contract.
        """
        manifest = self._record(kind, name).manifest
        assert manifest is not None, "a record that is not broken has a manifest"
        return manifest

    def resolve(self, name: str, kind: str | None = None) -> PluginRecord:
        """The record, broken or not, of a plugin that a person has named, perhaps without its kind.

        Raises:
            PluginNotFound: there is none.
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
        """Import a plugin and look at its structure.

        Raises:
            PluginError: as :meth:`find`.
            PluginImportError: its module raised; the original error is chained.
            StructureError: its class or its config does not fit the contract.
        """
        key = (kind, name)
        if key not in self._loaded:
            record = self._record(kind, name)
            manifest = self.find(kind, name)
            cls = import_object(manifest.object, manifest, record.label)
            check_structure(kind, cls, record.label)
            self._loaded[key] = LoadedPlugin(manifest, cls, self.config_class(kind, name))
        return self._loaded[key]

    def config_class(self, kind: str, name: str) -> type:
        """The class of a plugin's settings; imports only the module that holds it.

        Raises:
            PluginError: as :meth:`load`.
        """
        record = self._record(kind, name)
        manifest = self.find(kind, name)
        config_class = import_object(manifest.config, manifest, record.label)
        check_config_class(config_class, record.label)
        return config_class  # type: ignore[no-any-return]

    def _record(self, kind: str, name: str) -> PluginRecord:
        matches = [record for record in self._records if (record.kind, record.name) == (kind, name)]
        if not matches:
            raise self._not_found(kind, name)
        for record in matches:
            if record.error is not None:
                raise record.error.with_traceback(None)
        return matches[0]

    def _not_found(self, kind: str | None, name: str) -> PluginNotFound:
        if kind is not None and kind not in KINDS:
            return PluginNotFound(
                f"there is no kind of plugin '{kind}'", expected="one of " + ", ".join(KINDS), found=repr(kind)
            )
        candidates = self.records(kind)
        usable = [record.name for record in candidates if record.error is None]
        broken = [
            f"{record.name} ([{record.error.code}] {record.error.message})"
            for record in candidates
            if record.error is not None
        ]
        found = "installed: " + (", ".join(usable) or "none")
        if broken:
            found += "; broken: " + ", ".join(broken)
        close = difflib.get_close_matches(name, [record.name for record in candidates], n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        others = sorted({record.kind for record in self._records if record.name == name})
        if others:
            hint += f" (there is a {', '.join(others)} of this name)"
        noun = kind or "plugin"
        word = _DISTRIBUTION_WORD.get(noun, noun)
        return PluginNotFound(
            f"no {noun} '{name}' is installed{hint}",
            expected=f"a distribution that provides the {noun} '{name}'",
            found=found,
            fix=f"correct the name, or install it (by convention: pip install jackfield-{word}-{name});"
            " `jackfield plugins list` shows what is there",
        )


def discover(path: Sequence[str] | None = None) -> Registry:
    """Look for installed plugins; imports none.

    Args:
        path: folders to look into, like ``sys.path``; default: this interpreter's.
    """
    return Registry(find_plugins(path))


@functools.cache
def installed() -> Registry:
    """This process's registry, discovered at the first call (``installed.cache_clear()`` forgets it)."""
    return discover()


def load_plugin(kind: str, name: str) -> LoadedPlugin:
    """:meth:`Registry.load` on this process's registry."""
    return installed().load(kind, name)


def import_module(module: str, manifest: Manifest, where: str) -> ModuleType:
    """Import a module of a plugin; whatever it raises becomes an error that names the plugin.

    Raises:
        StructureError: ``plugin.object-missing`` when the module itself does not exist.
        PluginImportError: when it raises; the original error is chained.
    """
    try:
        with collection_paused():
            return importlib.import_module(module)
    except JackfieldError as error:
        raise _import_error(module, manifest, where, error) from error
    except (Exception, SystemExit) as error:  # an import may do anything, sys.exit() included
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise _missing(f"module {module}", where) from error
        raise _import_error(module, manifest, where, error, missing) from error


def import_object(reference: str, manifest: Manifest, where: str) -> Any:
    """What ``package.module:Attribute`` names.

    Raises:
        StructureError: ``plugin.object-missing``.
        PluginImportError: the module raised.
    """
    module_name, _, attribute = reference.partition(":")
    module = import_module(module_name, manifest, where)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise _missing(f"object {reference}", where, sorted(n for n in vars(module) if n[0] != "_")) from error


def _missing(what: str, where: str, names: Sequence[str] = ()) -> StructureError:
    return StructureError(
        f"the manifest names the {what}, which does not exist",
        code="plugin.object-missing",
        where=where,
        expected=what,
        found=f"the module has {', '.join(names)}" if names else "nothing there",
        fix="correct the manifest, or reinstall the plugin",
    )


def _import_error(
    module: str, manifest: Manifest, where: str, error: BaseException, missing: str | None = None
) -> PluginImportError:
    fix = "correct the plugin's module, or reinstall the plugin; `jackfield plugins doctor` tries it on its own"
    if missing:
        top = missing.partition(".")[0]
        declared = [text for text in manifest.env.requires if _distribution_of(text) == top.lower().replace("_", "-")]
        fix = f"install what it needs into this interpreter: pip install '{declared[0] if declared else top}'"
    return PluginImportError(
        f"importing {module} failed",
        where=where,
        expected=f"{module} to be imported",
        found=f"{type(error).__name__}: {error}",
        fix=fix,
    )


def _distribution_of(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name.lower().replace("_", "-")
