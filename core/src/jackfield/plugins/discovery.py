"""Which plugins are installed, found out without importing any of them.

Each installed distribution may name manifests under the entry-point groups in :data:`GROUPS`. The value of such
an entry point, ``package:file.toml``, is a file beside ``__init__.py`` of a top-level package. It is found through
the import system's finders (so editable installs work) and read; the package itself is not imported.
"""

from __future__ import annotations

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
from jackfield.errors import DuplicatePlugin, JackfieldError, ManifestError
from jackfield.plugins.abi import check_abi
from jackfield.plugins.manifest import Manifest, parse_manifest

__all__ = ["GROUPS", "PluginRecord", "find_plugins"]

#: The entry-point group of each kind.
GROUPS: dict[str, str] = {kind: f"jackfield.{kind}s" for kind in KINDS}

_KIND_OF_GROUP = {group: kind for kind, group in GROUPS.items()}
_VALUE = re.compile(r"(?P<package>[^\W\d]\w*):(?P<file>[A-Za-z0-9_.]+\.toml)")


@attrs.frozen(kw_only=True)
class PluginRecord:
    """One installed plugin, usable or not."""

    name: str
    kind: str
    abi: str | None  #: None: the manifest could not be read
    distribution: str
    version: str
    status: Literal["ok", "broken"]
    error: JackfieldError | None = None  #: why it is broken
    manifest: Manifest | None = None

    @property
    def label(self) -> str:
        """How messages name it: kind, name and where it comes from."""
        return f"{self.kind} '{self.name}' ({self.distribution} {self.version})"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready fields, what ``jackfield plugins list --json`` prints."""
        return {
            "name": self.name,
            "kind": self.kind,
            "abi": self.abi,
            "distribution": self.distribution,
            "version": self.version,
            "status": self.status,
            "error": None if self.error is None else self.error.as_dict(),
            "capabilities": dict(self.manifest.capabilities) if self.manifest else {},
            "description": self.manifest.description if self.manifest else "",
        }

    def broken(self, error: JackfieldError) -> PluginRecord:
        """The same record, refused."""
        return attrs.evolve(self, status="broken", error=error)


@attrs.frozen
class _Entry:
    """A line of an ``entry_points.txt``."""

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    problem: ManifestError | None = None

    @property
    def where(self) -> str:
        return f"{self.distribution} {self.version}, entry point {self.name} = {self.value}"


def find_plugins(path: Sequence[str] | None = None) -> tuple[PluginRecord, ...]:
    """Every plugin that is installed, in the order of kinds and names; broken ones carry their error.

    Args:
        path: folders to look into, like ``sys.path``; default: this interpreter's.
    """
    importlib.invalidate_caches()  # something may have been installed since the last look
    records = [_record(entry, path) for entry in _entries(path)]
    return tuple(sorted(_refuse_duplicates(records), key=lambda r: (KINDS.index(r.kind), r.name, r.distribution)))


def _entries(path: Sequence[str] | None) -> Iterator[_Entry]:
    seen: set[str] = set()
    search: dict[str, Any] = {} if path is None else {"path": list(path)}
    for distribution in importlib.metadata.distributions(**search):
        text = distribution.read_text("entry_points.txt") or ""
        if "jackfield." not in text:  # nearly all of them; parsing metadata is what takes time
            continue
        entries = list(_parse(text, *_identity(distribution)))
        if not entries:
            continue
        key = re.sub(r"[-_.]+", "-", entries[0].distribution).lower()
        if key not in seen:  # the first on the path hides the others, as in an import
            seen.add(key)
            yield from entries


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        return str(distribution.metadata["Name"]), str(distribution.metadata["Version"])
    except Exception:  # damaged metadata: still shown
        return "unknown", "unknown"


def _parse(text: str, distribution: str, version: str) -> Iterator[_Entry]:
    """Our groups of an ``entry_points.txt``, line by line, so that a bad line hides no good one."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            continue
        kind, problem = _kind_of(group, distribution)
        if kind is None:
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals:
            problem = ManifestError(
                "an entry point is not of the form name = package:file.toml", where=distribution, found=line
            )
        yield _Entry(kind, name, value, distribution, version, problem)


def _kind_of(group: str, distribution: str) -> tuple[str | None, ManifestError | None]:
    """The kind that a group stands for; a near miss is shown as a broken plugin of the likely kind."""
    if group in _KIND_OF_GROUP or not group.startswith("jackfield."):
        return _KIND_OF_GROUP.get(group), None
    close = difflib.get_close_matches(group, _KIND_OF_GROUP, n=1, cutoff=0.85)
    if not close:
        return None, None
    return _KIND_OF_GROUP[close[0]], ManifestError(
        f"no kind of plugin has the entry-point group '{group}' (did you mean '{close[0]}'?)",
        where=distribution,
        expected="one of " + ", ".join(_KIND_OF_GROUP),
        found=group,
        fix="correct the group in the plugin's pyproject.toml and reinstall it",
    )


def _record(entry: _Entry, path: Sequence[str] | None) -> PluginRecord:
    """Gate 1 for one entry point; no problem of one plugin reaches another."""
    record = PluginRecord(
        name=entry.name,
        kind=entry.kind,
        abi=None,
        distribution=entry.distribution,
        version=entry.version,
        status="ok",
    )
    try:
        if entry.problem is not None:
            raise entry.problem
        manifest = _manifest(entry, path)
        record = attrs.evolve(record, abi=manifest.abi, manifest=manifest)
        check_abi(manifest.kind, manifest.abi, record.label)
    except JackfieldError as error:
        return record.broken(error)
    return record


def _manifest(entry: _Entry, path: Sequence[str] | None) -> Manifest:
    parts = _VALUE.fullmatch(entry.value)
    if parts is None:
        raise ManifestError(
            "an entry point does not name a manifest",
            where=entry.where,
            expected="toplevel_package:file.toml",
            found=entry.value,
            fix="correct the entry point in the plugin's pyproject.toml and reinstall it",
        )
    spec = _find_package(parts["package"], path)
    if spec is None or spec.submodule_search_locations is None:
        raise ManifestError(
            f"the package '{parts['package']}' of a manifest is not installed",
            code="plugin.manifest-missing",
            where=entry.where,
            expected=f"a package '{parts['package']}' that holds {parts['file']}",
            found="no such package" if spec is None else f"a module, {spec.origin}",
            fix=f"reinstall {entry.distribution}",
        )
    content, source = _read_beside(spec, parts["file"], entry)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ManifestError("the manifest is not UTF-8", where=source, found=str(error)) from error
    return parse_manifest(text, source=source, kind=entry.kind, name=entry.name)


def _find_package(package: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Where a top-level package is; finding it imports nothing."""
    if path is not None:
        return PathFinder.find_spec(package, path)
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module without a spec, or a finder that failed
        return None


def _read_beside(spec: ModuleSpec, file: str, entry: _Entry) -> tuple[bytes, str]:
    """The content and place of a file in a package; a loader knows how to read a zip archive, too."""
    places = [str(Path(location, file)) for location in spec.submodule_search_locations or ()]
    for place in places:
        read = getattr(spec.loader, "get_data", None) or _read_file
        try:
            return read(place), place
        except OSError:
            continue
    raise ManifestError(
        "a manifest is not there",
        code="plugin.manifest-missing",
        where=entry.where,
        expected=" or ".join(places),
        found="no such file",
        fix=f"reinstall {entry.distribution}; its author has to ship {file} in the wheel",
    )


def _read_file(place: str) -> bytes:
    return Path(place).read_bytes()


def _refuse_duplicates(records: Iterable[PluginRecord]) -> Iterator[PluginRecord]:
    """Nobody wins when two distributions provide one name: each usable one is refused, naming all."""
    claims: defaultdict[tuple[str, str], list[PluginRecord]] = defaultdict(list)
    for record in records:
        claims[record.kind, record.name].append(record)
    for (kind, name), same in claims.items():
        if len(same) == 1:
            yield same[0]
            continue
        providers = ", ".join(sorted(f"{record.distribution} {record.version}" for record in same))
        error = DuplicatePlugin(
            f"{len(same)} distributions provide the {kind} '{name}'",
            where=f"{kind} '{name}'",
            expected="one",
            found=providers,
            fix="uninstall all but one of them",
        )
        for record in same:
            yield record if record.error else record.broken(error)
