"""Certificates of conformance: where they are kept, and whether one still speaks of the plugin that is installed.

``jackfield plugins check`` (distribution jackfield-conformance) makes them. They are found in two places:

* *local*: in the environment, :func:`certificate_folder`, made on this machine;
* *shipped*: in the plugin's own package, ``certificate.json`` (or ``<kind>.certificate.json`` where a package holds
  several kinds) beside the manifest, made by who published it.

A certificate counts only for the very files that were checked: it carries a digest of the plugin's package. Reading
imports no plugin.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.errors import PluginError
from jackfield.plugins.discovery import PluginRecord
from jackfield.plugins.manifest import Manifest

__all__ = [
    "FOLDER_VARIABLE",
    "FORMAT",
    "Certification",
    "certificate_folder",
    "find_certification",
    "keep",
    "plugin_digest",
    "run_checks",
]

#: Version of the JSON file's layout.
FORMAT = 1

#: Environment variable that names another folder for local certificates.
FOLDER_VARIABLE = "JACKFIELD_CERTIFICATES"

_IGNORED_FOLDERS = ("__pycache__",)
_IGNORED_SUFFIXES = (".pyc", "certificate.json")


@attrs.frozen(kw_only=True)
class Certification:
    """That a plugin is certified, since when, how far, and who says so."""

    date: str  #: YYYY-MM-DD
    level: str  #: ``partial``, ``base`` or ``full``
    source: Literal["local", "shipped"]
    conformance: str  #: version of jackfield-conformance
    stale: str = ""  #: what has changed since the checks ran, so that the certificate does not count; empty: nothing

    def as_dict(self) -> dict[str, str]:
        """JSON-ready fields."""
        return attrs.asdict(self)


def certificate_folder() -> Path:
    """Where local certificates are: ``$JACKFIELD_CERTIFICATES``, or in the environment, or in the user's data folder.

    Not in the plugin's ``.dist-info``: pip would leave the folder behind at an upgrade, and then trip over it.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    shared = Path(sys.prefix, "share")
    if os.access(shared if shared.exists() else sys.prefix, os.W_OK):
        return shared / "jackfield" / "certificates"
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    return data / "jackfield" / "certificates" / environment


def keep(certificate: Mapping[str, Any]) -> Path:
    """Write a certificate where :func:`find_certification` looks, in the place of an older one of the plugin.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = certificate_folder()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{certificate['kind']}-{certificate['plugin']}.json"
    scratch = file.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(certificate, indent=2) + "\n", encoding="utf-8")
    scratch.replace(file)
    return file


def find_certification(record: PluginRecord) -> Certification | None:
    """Find the certificate of a plugin.

    A local certificate comes first: where it is of the installed files and says no, a shipped one does not count. One
    that counts comes before a stale one.

    Returns:
        The certificate; with ``stale`` set where the plugin has changed since the checks ran; None: there is none.
    """
    manifest = record.manifest
    if manifest is None or record.error is not None:
        return None
    stale = None
    for source, file in _places(manifest):
        found = _read(file)
        if found is None or (found["kind"], found["plugin"]) != (record.kind, record.name):
            continue
        change = _change(found, record, manifest)
        certified = found["level"] in ("partial", "base", "full")
        if not change:
            return _certification(found, source, "") if certified else None
        if certified and stale is None:
            stale = _certification(found, source, change)
    return stale


def _certification(found: Mapping[str, Any], source: Literal["local", "shipped"], stale: str) -> Certification:
    return Certification(
        date=str(found["date"])[:10],
        level=found["level"],
        source=source,
        conformance=str(found["versions"].get("jackfield-conformance") or "unknown"),
        stale=stale,
    )


def plugin_digest(manifest: Manifest) -> str | None:
    """SHA-256 over the paths and contents of the top-level package that holds the plugin's class.

    Compiled files and certificates are left out. None: the package is not a folder.
    """
    folder = _package_folder(manifest)
    return None if folder is None else _folder_digest(folder)


def run_checks(
    name: str, kind: str | None = None, *, tiers: Collection[str] = (), deadline: float = 1800.0, quiet: bool = False
) -> tuple[dict[str, Any], Path | None]:
    """Run the conformance checks on an installed plugin, in the interpreter where it runs, and keep the certificate.

    What the checks print goes to this process's own stdout, or with ``quiet`` to its stderr.

    Args:
        name: of the plugin.
        kind: of the plugin, where several kinds have one of this name.
        tiers: of checks that run beside the default ones.
        deadline: seconds for all checks together.
        quiet: leave stdout alone.

    Returns:
        The certificate, also of a plugin that failed, and the file where it is kept; None: nowhere can be written.

    Raises:
        PluginError: there is no such plugin, no such interpreter, or ``plugin.check``: the checks could not be run.
    """
    from jackfield.plugins.interpreters import resolve_interpreter
    from jackfield.plugins.registry import discover

    record = discover().resolve(name, kind)
    python = resolve_interpreter(record.manifest.env.python if record.manifest else None)
    with tempfile.TemporaryDirectory(prefix="jackfield-certificate-") as folder:
        file = Path(folder, "certificate.json")
        command = [python, "-P", "-m", "jackfield_conformance", "--plugin", f"{record.kind}:{record.name}"]
        command += ["--certificate", str(file), *(f"--tier={tier}" for tier in tiers)]
        code = _run([*command, "--quiet-stdout"] if quiet else command, deadline, record)
        found = _read(file)
    if found is None:
        raise PluginError(
            "the conformance checks could not be run",
            code="plugin.check",
            where=record.label,
            expected="jackfield-conformance in the interpreter of the plugin",
            found=f"exit code {code} of {python} -m jackfield_conformance, and no certificate; it says why above",
            fix=f"{python} -m pip install jackfield-conformance",
        )
    try:
        return found, keep(found)
    except OSError:
        return found, None


def _run(command: list[str], deadline: float, record: PluginRecord) -> int:
    """Run to the end; at the deadline or an interrupt the child and all that it started are killed."""
    sys.stdout.flush()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return child.wait(deadline)
    except subprocess.TimeoutExpired:
        raise PluginError(
            "the conformance checks did not end in time",
            code="plugin.check",
            where=record.label,
            expected=f"an end within {deadline:g} s",
            fix="look at the last check that is named above, or raise --deadline",
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()  # it has been killed: this ends


def _places(manifest: Manifest) -> Iterator[tuple[Literal["local", "shipped"], Path]]:
    yield "local", certificate_folder() / f"{manifest.kind}-{manifest.name}.json"
    folder = _package_folder(manifest)
    if folder is not None:
        yield "shipped", folder / f"{manifest.kind}.certificate.json"
        yield "shipped", folder / "certificate.json"


def _read(file: Path) -> dict[str, Any] | None:
    """A certificate; None for what is missing, damaged or of another format: it certifies nothing."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and {"kind", "plugin", "level", "date", "versions", "abi", "digest"} <= found.keys()
    return found if whole and found.get("format") == FORMAT and isinstance(found["versions"], dict) else None


def _change(found: Mapping[str, Any], record: PluginRecord, manifest: Manifest) -> str:
    """What is not as it was when the checks ran; empty: nothing that the certificate speaks of."""
    for what, then, now in (
        ("distribution", found.get("distribution"), record.distribution),
        ("version", found["versions"].get("plugin"), record.version),
        ("ABI", found["abi"], record.abi),
    ):
        if then != now:
            return f"the checks ran on {what} {then}, {now} is installed"
    unchanged = found["digest"] is not None and found["digest"] == plugin_digest(manifest)
    return "" if unchanged else "the plugin's files have changed since the checks ran"


def _package_folder(manifest: Manifest) -> Path | None:
    package = manifest.object.partition(":")[0].partition(".")[0]
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)  # of a top-level package: imports nothing
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.isdir(location):
            return Path(location)
    return None


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        inner = path.relative_to(folder)
        if path.is_dir() or path.name.endswith(_IGNORED_SUFFIXES) or set(inner.parts) & set(_IGNORED_FOLDERS):
            continue
        content = path.read_bytes()
        digest.update(f"{inner.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
