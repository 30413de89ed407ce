"""Certificates of conformance: find a plugin's and check that it is for the installed files.

``jackfield plugins check`` (distribution jackfield-conformance) writes certificates. There are two places for them:

* *local*: in the environment, :func:`certificate_folder`, written on this machine;
* *shipped*: in the plugin's own package, ``certificate.json`` (or ``<kind>.certificate.json`` if a package has several
  kinds) beside the manifest, written by its publisher.

A certificate is valid only for the files that were checked: it has a digest of the package. No plugin is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import PluginRecord, find_package

#: Version of the JSON file's layout.
FORMAT = 1

_KEYS = {"kind", "plugin", "distribution", "level", "date", "versions", "abi", "digest"}


@attrs.frozen(kw_only=True)
class Certification:
    """The certificate of a plugin: its date, level and source, and whether it is still valid."""

    date: str  #: YYYY-MM-DD
    level: str  #: ``partial``, ``base`` or ``full``
    source: Literal["local", "shipped"]
    conformance: str  #: version of jackfield-conformance
    #: what has changed since the checks ran, which makes the certificate invalid, and the fix; empty: nothing
    stale: str = ""


def certificate_folder() -> Path:
    """Return the folder of local certificates.

    It is ``$JACKFIELD_CERTIFICATES``, or in the environment, or in the user's data folder. It is not the plugin's
    ``.dist-info``, since pip would leave that folder behind at an upgrade and then fail on it.
    """
    given = os.environ.get("JACKFIELD_CERTIFICATES")
    if given:
        return Path(given)
    shared = Path(sys.prefix, "share")
    if os.access(shared if shared.exists() else sys.prefix, os.W_OK):
        return shared / "jackfield" / "certificates"
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "jackfield" / "certificates" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]


def find_certification(record: PluginRecord) -> Certification | None:
    """Return the certificate of a plugin, stale if the plugin has changed since the checks ran; None: there is none.

    A local certificate takes precedence: if it is for the installed files and negative, a shipped one is ignored. A
    valid certificate takes precedence over a stale one.
    """
    if record.manifest is None or record.error is not None:
        return None
    folder, stale = package_folder(record.manifest), None
    places: list[tuple[Literal["local", "shipped"], Path]] = [
        ("local", certificate_folder() / f"{record.kind}-{record.name}.json")
    ]
    shipped = (f"{record.kind}.certificate.json", "certificate.json")
    places += [("shipped", folder / name) for name in shipped] if folder else []
    now = {"distribution": record.distribution, "version": record.version, "ABI": record.abi}
    for source, file in places:
        found = read_certificate(file)
        if found is None or (found["kind"], found["plugin"]) != (record.kind, record.name):
            continue
        then = {"distribution": found["distribution"], "version": found["versions"].get("plugin"), "ABI": found["abi"]}
        other = [what for what in now if then[what] != now[what]]
        changes = [f"the checks ran on {what} {then[what]}, {now[what]} is installed" for what in other]
        if not changes and (found["digest"] is None or found["digest"] != plugin_digest(record.manifest)):
            changes = ["the plugin's files have changed since the checks ran"]
        again = f"`jackfield plugins check {record.name} --kind {record.kind}` checks it again"
        certification, why = None, f"{changes[0]}; {again}" if changes else ""
        if found["level"] in ("partial", "base", "full"):
            version = str(found["versions"].get("jackfield-conformance") or "unknown")
            fields = {"level": found["level"], "source": source, "conformance": version, "stale": why}
            certification = Certification(date=str(found["date"])[:10], **fields)
        if not changes:
            return certification
        stale = stale or certification
    return stale


def plugin_digest(manifest: Manifest) -> str | None:
    """Return the SHA-256 of the paths and contents of the plugin's top-level package.

    Compiled files and certificates are excluded. None: the package is not a folder.
    """
    folder = package_folder(manifest)
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        inner = path.relative_to(folder)
        if path.is_file() and not path.name.endswith((".pyc", "certificate.json")) and "__pycache__" not in inner.parts:
            content = path.read_bytes()
            digest.update(f"{inner.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def read_certificate(file: Path) -> dict[str, Any] | None:
    """Read a certificate; return None if it is missing, damaged or of another format."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and found.keys() >= _KEYS and isinstance(found["versions"], dict)
    return found if whole and found.get("format") == FORMAT else None


def package_folder(manifest: Manifest) -> Path | None:
    """Return the folder of the plugin's top-level package; None: the package is not a folder."""
    spec = find_package(manifest.package)
    locations = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(location) for location in locations if os.path.isdir(location)), None)
