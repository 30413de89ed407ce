"""Read the manifest of a plugin, which says what it is, needs and can do."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from jackfield.abc import ABI_VERSIONS, KINDS
from jackfield.errors import PluginError
from jackfield.settings import structure

PluginKind = Literal["engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine"]
CapabilityLevel = Literal["full", "partial", "unsupported", "unverified"]


def invalid_manifest(message: str, where: str, **details: Any) -> PluginError:
    """Make the error of a manifest, or of an entry point, that is not as it has to be."""
    fix = details.pop("fix", None) or "correct the plugin's manifest and its entry point, then reinstall the plugin"
    return PluginError(message, code="plugin.manifest-invalid", where=where, fix=fix, **details)


def _text(pattern: str, expected: str) -> Any:
    """Make a validator of texts; None passes."""
    form = re.compile(pattern)

    def check(_: Any, attribute: attrs.Attribute[Any], value: str | None) -> None:
        if value is not None and not form.fullmatch(value):
            place = attribute.name
            raise invalid_manifest(f"wrong value at {place}", place, expected=expected, found=repr(value))

    return check


def _is_iso_date(_: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    try:
        datetime.date.fromisoformat(value)
    except ValueError:
        message, found = f"wrong value at {attribute.name}", repr(value)
        raise invalid_manifest(message, attribute.name, expected="YYYY-MM-DD", found=found) from None


def _are_requirements(_: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    if not value:
        return
    from packaging.requirements import InvalidRequirement, Requirement  # late: most manifests need no parser

    for text in value:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            message, expected = f"wrong requirement in {attribute.name}", 'PEP 508, like "torch>=2.8"'
            raise invalid_manifest(message, attribute.name, expected=expected, found=text) from error


_MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_is_object = _text(rf"{_MODULE}:[^\W\d]\w*", "package.module:Attribute")


@attrs.frozen(kw_only=True)
class EnvironmentRequirements:
    """The section ``[env]``: where a plugin can run."""

    #: PEP 508 requirements, checked in the interpreter where the plugin runs
    requires: tuple[str, ...] = attrs.field(default=(), validator=_are_requirements)
    #: top-level modules that have to be there, where distributions of several names bring them
    modules: tuple[str, ...] = ()
    python: str | None = None  #: the path of an interpreter of its own; None: the host's


@attrs.frozen(kw_only=True)
class ConformanceException:
    """A conformance check that is known to fail, why, and when to look again."""

    reason: str
    review: str = attrs.field(validator=_is_iso_date)  #: ``YYYY-MM-DD``


@attrs.frozen(kw_only=True)
class ConformanceDeclaration:
    """The section ``[conformance]``."""

    fixture: str | None = attrs.field(default=None, validator=_is_object)  #: makes a small instance for the checks
    exceptions: Mapping[str, ConformanceException] = attrs.field(factory=dict)  #: by check id


@attrs.frozen(kw_only=True)
class Manifest:
    """The content of a ``plugin.toml``.

    Raises:
        PluginError: ``plugin.manifest-invalid`` when a value is not of the form given here.
    """

    name: str = attrs.field(validator=_text("[a-z0-9_-]+", "lower-case letters, digits, '_' and '-'"))
    kind: PluginKind
    #: version of the kind's contract that it was built for
    abi: str = attrs.field(validator=_text(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)", "major.minor"))
    object: str = attrs.field(validator=_is_object)  #: the class, as ``package.module:Class``
    config: str = attrs.field(validator=_is_object)  #: the settings' frozen attrs class, importable without torch
    hooks: str | None = attrs.field(default=None, validator=_text(_MODULE, "package.module"))
    description: str = ""
    capabilities: Mapping[str, CapabilityLevel] = attrs.field(factory=dict)
    env: EnvironmentRequirements = attrs.field(factory=EnvironmentRequirements)
    conformance: ConformanceDeclaration = attrs.field(factory=ConformanceDeclaration)

    @property
    def label(self) -> str:
        """The kind and name, for messages."""
        return f"{self.kind} '{self.name}'"


def parse_manifest(text: str, *, source: str, kind: str, name: str) -> Manifest:
    """Read a manifest and check that it is the one its entry point promises.

    Args:
        text: The file's content.
        source: The file, for errors.
        kind: The kind that the entry point's group stands for.
        name: The entry point's name.

    Raises:
        PluginError: ``plugin.manifest-invalid``, naming the file and the key.
    """
    try:
        values = json.loads(json.dumps(tomllib.loads(text), default=str))  # TOML's dates become ISO texts
        manifest = structure(Manifest, values, error=PluginError)
    except tomllib.TOMLDecodeError as error:
        raise invalid_manifest("the manifest is not TOML", source, found=str(error)) from error
    except PluginError as error:
        raise invalid_manifest(error.message, source, expected=error.expected, found=error.found) from error
    if manifest.kind != kind or manifest.name != name:
        raise invalid_manifest(
            "the manifest and its entry point disagree",
            source,
            expected=f"kind = {kind!r}, name = {name!r} (from the entry point's group and name)",
            found=f"kind = {manifest.kind!r}, name = {manifest.name!r}",
        )
    return manifest


def parse_version(text: str) -> tuple[int, int]:
    """Split ``"1.2"`` into its major and minor number."""
    major, minor = text.split(".")
    return int(major), int(minor)


def check_abi(kind: str, abi: str, where: str, host: str | None = None) -> None:
    """Accept a plugin of the host's major version and of no newer minor version.

    Args:
        kind: The kind of plugin; each kind has versions of its own.
        abi: The version that the plugin was built for.
        where: The plugin, for messages.
        host: The host's version; None: this Jackfield's.

    Raises:
        PluginError: ``plugin.abi``.
    """
    host = host or ABI_VERSIONS[kind]
    (major, minor), (host_major, host_minor) = parse_version(abi), parse_version(host)
    if major == host_major and minor <= host_minor:
        return
    older = "the plugin" if major < host_major else "jackfield"
    raise PluginError(
        f"the plugin was built for another version of the {kind} contract",
        code="plugin.abi",
        where=where,
        expected=f"{kind} ABI {host_major}.0 to {host}",
        found=abi,
        fix=f"upgrade {older} to a release for {kind} ABI {max(abi, host, key=parse_version)} or later"
        + (": pip install --upgrade jackfield" if older == "jackfield" else ""),
    )


def require_capability(manifest: Manifest, capability: str, because: str) -> None:
    """Refuse a request that a plugin cannot serve, instead of letting it be ignored.

    Args:
        manifest: The manifest of the plugin.
        capability: The capability that the request needs.
        because: The setting that needs it, for the message: ``"model.lora is set"``.

    Raises:
        PluginError: ``plugin.capability`` when the manifest does not declare it, or as ``unsupported``.
    """
    level = manifest.capabilities.get(capability)
    if level in ("full", "partial", "unverified"):
        return
    declared = ", ".join(f"{name} ({value})" for name, value in sorted(manifest.capabilities.items()))
    raise PluginError(
        f"the {manifest.label} does not have the capability '{capability}'",
        code="plugin.capability",
        where=manifest.label,
        expected=f"'{capability}', because {because}",
        found=f"declared as {level}" if level else f"declared: {declared or 'none'}",
        fix=f"choose another {manifest.kind}, or drop what asks for it",
    )


assert set(PluginKind.__args__) == set(KINDS)  # type: ignore[attr-defined]
