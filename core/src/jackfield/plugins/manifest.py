"""The manifest of a plugin: what it is, what it needs and what it can do, readable without importing it (gate 1)."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import attrs

from jackfield.abc import KINDS
from jackfield.errors import ManifestError, PluginError
from jackfield.settings import structure

__all__ = [
    "CapabilityLevel",
    "ConformanceDeclaration",
    "ConformanceException",
    "EnvironmentRequirements",
    "Manifest",
    "PluginKind",
    "parse_manifest",
    "require_capability",
]

PluginKind = Literal["engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine"]
CapabilityLevel = Literal["full", "partial", "unsupported", "unverified"]

_NAME = re.compile(r"[a-z0-9_-]+")
_ABI = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _refuse(attribute: attrs.Attribute[Any], value: object, expected: str) -> NoReturn:
    raise ManifestError(f"wrong value at {attribute.name}", where=attribute.name, expected=expected, found=repr(value))


def _matches(pattern: re.Pattern[str], expected: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_: Any, attribute: attrs.Attribute[Any], value: str | None) -> None:
        if value is not None and not pattern.fullmatch(value):
            _refuse(attribute, value, expected)

    return check


def _is_iso_date(_: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    try:
        datetime.date.fromisoformat(value)
    except ValueError:
        _refuse(attribute, value, "a date, YYYY-MM-DD")


def _are_requirements(_: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    if not value:
        return
    from packaging.requirements import InvalidRequirement, Requirement  # late: most manifests do without

    for text in value:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            raise ManifestError(
                f"wrong requirement in {attribute.name}: {text!r}",
                where=attribute.name,
                expected='requirements of PEP 508, like "torch>=2.8"',
                found=str(error).splitlines()[0],
            ) from error


_is_object = _matches(_OBJECT, "package.module:Attribute")


@attrs.frozen(kw_only=True)
class EnvironmentRequirements:
    """Section ``[env]``: where a plugin can run."""

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
    """Section ``[conformance]``."""

    fixture: str | None = attrs.field(default=None, validator=_is_object)  #: makes a small instance for the checks
    exceptions: Mapping[str, ConformanceException] = attrs.field(factory=dict)  #: by check id


@attrs.frozen(kw_only=True)
class Manifest:
    """What ``plugin.toml`` says.

    Raises:
        ManifestError: when a value is not of the form given here.
    """

    name: str = attrs.field(validator=_matches(_NAME, "lower-case letters, digits, '_' and '-'"))  #: unique per kind
    kind: PluginKind
    abi: str = attrs.field(validator=_matches(_ABI, "major.minor"))  #: version of the kind's contract it was built for
    object: str = attrs.field(validator=_is_object)  #: the class, as ``package.module:Class``
    config: str = attrs.field(validator=_is_object)  #: the settings' frozen attrs class, importable without torch
    hooks: str | None = attrs.field(default=None, validator=_matches(_MODULE, "package.module"))
    description: str = ""
    capabilities: Mapping[str, CapabilityLevel] = attrs.field(factory=dict)
    env: EnvironmentRequirements = attrs.field(factory=EnvironmentRequirements)
    conformance: ConformanceDeclaration = attrs.field(factory=ConformanceDeclaration)

    @property
    def label(self) -> str:
        """How messages name the plugin: its kind and name."""
        return f"{self.kind} '{self.name}'"


def parse_manifest(text: str, *, source: str, kind: str, name: str) -> Manifest:
    """Read a manifest and check that it is the one its entry point promises.

    Args:
        text: the file's content.
        source: where it comes from, for errors.
        kind: the kind that the entry point's group stands for.
        name: the entry point's name.

    Raises:
        ManifestError: ``plugin.manifest-invalid``, naming the file and the key.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(
            "the manifest is not TOML", where=source, found=str(error), fix="correct the line that is named"
        ) from error
    try:
        manifest = structure(Manifest, _dates_as_text(data), error=ManifestError)
    except ManifestError as error:
        # the same error, at home in its file and under the manifest's own code
        raise ManifestError(
            error.message,
            where=source,
            expected=error.expected,
            found=error.found,
            fix=error.fix or "correct the manifest and reinstall the plugin",
        ) from error
    if manifest.kind != kind or manifest.name != name:
        raise ManifestError(
            "the manifest and its entry point disagree",
            where=source,
            expected=f"kind = {kind!r}, name = {name!r} (from the entry point's group and name)",
            found=f"kind = {manifest.kind!r}, name = {manifest.name!r}",
            fix="make the entry point and the manifest agree, then reinstall the plugin",
        )
    return manifest


def require_capability(manifest: Manifest, capability: str, because: str) -> None:
    """Refuse a request that a plugin cannot serve, instead of letting it be ignored.

    Args:
        manifest: of the plugin that would be asked.
        capability: what the request needs.
        because: which request or setting needs it, for the message: ``"model.lora is set"``.

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


def _dates_as_text(value: Any) -> Any:
    """TOML has dates of its own; manifests keep them as ISO texts."""
    if isinstance(value, dict):
        return {key: _dates_as_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_dates_as_text(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime.date) else value


assert set(PluginKind.__args__) == set(KINDS)  # type: ignore[attr-defined]
