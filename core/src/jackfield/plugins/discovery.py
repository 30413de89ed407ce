"""Find the installed plugins without importing any of them.

Each installed distribution may name manifests under the entry-point groups in :data:`GROUPS`. The value of such
an entry point, ``package:file.toml``, is a file beside ``__init__.py`` of a top-level package. It is found through
the import system's finders (so editable installs work) and read; the package itself is not imported.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.abc import KINDS
from jackfield.errors import JackfieldError, PluginError
from jackfield.plugins.manifest import Manifest, check_abi, invalid_manifest, parse_manifest

#: The entry-point group of each kind.
GROUPS: dict[str, str] = {kind: f"jackfield.{kind}s" for kind in KINDS}

_KIND_OF_GROUP = {group: kind for kind, group in GROUPS.items()}
_VALUE = re.compile(r"(?P<package>[^\W\d]\w*):(?P<file>[A-Za-z0-9_.]+\.toml)")


@attrs.frozen(kw_only=True)
class PluginRecord:
    """One installed plugin, usable or not."""

    name: str
    kind: str
    distribution: str
    version: str
    error: JackfieldError | None = None  #: why it cannot be used
    manifest: Manifest | None = None

    @property
    def abi(self) -> str | None:
        """The version of the contract that it was built for; None: the manifest could not be read."""
        return None if self.manifest is None else self.manifest.abi

    @property
    def status(self) -> Literal["ok", "broken"]:
        """The word for a plugin that can be used, as far as its manifest shows, or not."""
        return "ok" if self.error is None else "broken"

    @property
    def label(self) -> str:
        """The kind, name and distribution, for messages."""
        return f"{self.kind} '{self.name}' ({self.distribution} {self.version})"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready fields, as ``jackfield plugins list --json`` prints them."""
        names = ("name", "kind", "abi", "distribution", "version", "status")
        return {
            **{name: getattr(self, name) for name in names},
            "error": None if self.error is None else self.error.as_dict(),
            "capabilities": dict(self.manifest.capabilities) if self.manifest else {},
            "description": self.manifest.description if self.manifest else "",
        }

    def usable(self) -> Manifest:
        """Return the manifest of a plugin that can be used.

        Raises:
            JackfieldError: The reason why it cannot be used.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self.manifest is not None, "a record that is not broken has a manifest"
        return self.manifest


def find_plugins(path: Sequence[str] | None = None) -> tuple[PluginRecord, ...]:
    """Find every installed plugin, in the order of kinds and names; broken ones carry their error.

    Args:
        path: Folders to look into, like ``sys.path``; None: this interpreter's.
    """
    importlib.invalidate_caches()  # something may have been installed since the last look
    records = _refuse_duplicates(_records(path))
    return tuple(sorted(records, key=lambda record: (KINDS.index(record.kind), record.name, record.distribution)))


def _records(path: Sequence[str] | None) -> Iterator[PluginRecord]:
    seen: set[str] = set()
    search: dict[str, Any] = {} if path is None else {"path": list(path)}
    for distribution in importlib.metadata.distributions(**search):
        text = distribution.read_text("entry_points.txt") or ""
        if "jackfield." not in text:  # nearly all of them; parsing metadata is what takes time
            continue
        name, version = _identity(distribution)
        records = list(_parse(text, name, version, path))
        key = re.sub(r"[-_.]+", "-", name).lower()
        if records and key not in seen:  # the first on the path hides the others, as in an import
            seen.add(key)
            yield from records


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        return str(distribution.metadata["Name"]), str(distribution.metadata["Version"])
    except Exception:  # damaged metadata: still shown
        return "unknown", "unknown"


def _parse(text: str, distribution: str, version: str, path: Sequence[str] | None) -> Iterator[PluginRecord]:
    """Read our groups of an ``entry_points.txt`` line by line, so that a bad line hides no good one."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif line and not line.startswith(("#", ";")) and (kind := _kind_of(group)):
            name, _, value = (part.strip() for part in line.partition("="))
            record = PluginRecord(name=name, kind=kind, distribution=distribution, version=version)
            try:
                _check_group(group, distribution)
                manifest = _manifest(record, value, path)
                record = attrs.evolve(record, manifest=manifest)
                check_abi(kind, manifest.abi, record.label)
            except JackfieldError as error:  # no problem of one plugin reaches another
                record = attrs.evolve(record, error=error)
            yield record


def _kind_of(group: str) -> str | None:
    """Return the kind of a group, or the likely kind of a group that is misspelt."""
    if not group.startswith("jackfield."):
        return None
    close = difflib.get_close_matches(group, _KIND_OF_GROUP, n=1, cutoff=0.85)
    return _KIND_OF_GROUP[close[0]] if close else None


def _check_group(group: str, distribution: str) -> None:
    if group not in _KIND_OF_GROUP:
        raise invalid_manifest(
            f"no kind of plugin has the entry-point group '{group}' (did you mean '{GROUPS[str(_kind_of(group))]}'?)",
            distribution,
            expected="one of " + ", ".join(_KIND_OF_GROUP),
            found=group,
        )


def _manifest(record: PluginRecord, value: str, path: Sequence[str] | None) -> Manifest:
    where = f"{record.distribution} {record.version}, entry point {record.name} = {value}"
    parts = _VALUE.fullmatch(value)
    if parts is None:
        expected = "name = toplevel_package:file.toml"
        raise invalid_manifest("an entry point does not name a manifest", where, expected=expected, found=value)
    spec = find_package(parts["package"], path)
    places = [str(Path(each, parts["file"])) for each in (spec and spec.submodule_search_locations) or ()]
    for place in places:
        with contextlib.suppress(OSError):
            content = _read(spec, place)
            return parse_manifest(_decoded(content, place), source=place, kind=record.kind, name=record.name)
    raise PluginError(
        "a manifest is not there",
        code="plugin.manifest-missing",
        where=where,
        expected=" or ".join(places) or f"a package '{parts['package']}' that holds {parts['file']}",
        found="no such file" if places else "no such package",
        fix=f"reinstall {record.distribution}; its author has to ship {parts['file']} in the wheel",
    )


def find_package(package: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Find a top-level package, importing nothing."""
    if path is not None:
        return PathFinder.find_spec(package, path)
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module without a spec, or a finder that failed
        return None


def _read(spec: ModuleSpec | None, place: str) -> bytes:
    """Read a file of a package; a loader knows how to read a zip archive, too."""
    read = getattr(spec and spec.loader, "get_data", None)
    return bytes(read(place)) if read else Path(place).read_bytes()


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise invalid_manifest("the manifest is not UTF-8", place, found=str(error)) from error


def _refuse_duplicates(records: Iterable[PluginRecord]) -> Iterator[PluginRecord]:
    """Refuse each plugin whose kind and name several distributions provide, naming all of them."""
    claims: defaultdict[tuple[str, str], list[PluginRecord]] = defaultdict(list)
    for record in records:
        claims[record.kind, record.name].append(record)
    for (kind, name), same in claims.items():
        error = PluginError(
            f"{len(same)} distributions provide the {kind} '{name}'",
            code="plugin.duplicate",
            where=f"{kind} '{name}'",
            expected="one",
            found=", ".join(sorted(f"{record.distribution} {record.version}" for record in same)),
            fix="uninstall all but one of them",
        )
        for record in same:
            yield record if len(same) == 1 or record.error else attrs.evolve(record, error=error)
