"""Manifests of plugins: their contents, parsing and checks."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs
from packaging.requirements import Requirement

from jackfield.abc import ABI_VERSIONS, KINDS
from jackfield.errors import PluginError
from jackfield.settings import structure

PluginKind = Literal["engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine"]
CapabilityLevel = Literal["full", "partial", "unsupported", "unverified"]


def invalid_manifest(message: str, where: str, **details: Any) -> PluginError:
    """Return the error of an invalid manifest or entry point."""
    fix = "correct the plugin's manifest and its entry point, then reinstall the plugin"
    return PluginError(message, code="plugin.manifest-invalid", where=where, fix=fix, **details)


def _form(expected: str, parse: Callable[[str], object]) -> Any:
    """Return a validator that parses a text, or each text of a tuple, with ``parse``. It accepts None."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        for text in value if isinstance(value, tuple) else (value,):
            try:
                right = text is None or parse(text)
            except ValueError:
                right = False
            if not right:
                raise ValueError(f"{text!r} is not {expected}")

    return check


_MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_is_module = _form("package.module", re.compile(_MODULE).fullmatch)
_is_object = _form("package.module:Attribute", re.compile(rf"{_MODULE}:[^\W\d]\w*").fullmatch)
_is_name = _form("lower-case letters, digits, '_' and '-'", re.compile("[a-z0-9_-]+").fullmatch)
_is_version = _form("major.minor", re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)").fullmatch)
_is_requirement = _form('PEP 508, like "torch>=2.8"', Requirement)
_is_date = _form("YYYY-MM-DD", datetime.date.fromisoformat)


@attrs.frozen(kw_only=True)
class EnvironmentRequirements:
    """The section ``[env]``, the requirements on the environment of a plugin."""

    #: PEP 508 requirements, checked in the interpreter where the plugin runs
    requires: tuple[str, ...] = attrs.field(default=(), validator=_is_requirement)
    #: top-level modules that are required, if several distributions can provide them
    modules: tuple[str, ...] = ()
    python: str | None = None  #: the path of the plugin's own interpreter; None: the host's


@attrs.frozen(kw_only=True)
class ConformanceException:
    """A conformance check that is known to fail, with the reason and a review date."""

    reason: str
    review: str = attrs.field(validator=_is_date)  #: ``YYYY-MM-DD``


@attrs.frozen(kw_only=True)
class ConformanceDeclaration:
    """The section ``[conformance]`` of a manifest."""

    fixture: str | None = attrs.field(default=None, validator=_is_object)  #: creates a small instance for the checks
    exceptions: Mapping[str, ConformanceException] = attrs.field(factory=dict)  #: by check id


@attrs.frozen(kw_only=True)
class Manifest:
    """The content of a ``plugin.toml``."""

    name: str = attrs.field(validator=_is_name)
    kind: PluginKind
    #: version of the kind's contract for which it was built
    abi: str = attrs.field(validator=_is_version)
    object: str = attrs.field(validator=_is_object)  #: the class, as ``package.module:Class``
    config: str = attrs.field(validator=_is_object)  #: the settings' frozen attrs class, importable without torch
    hooks: str | None = attrs.field(default=None, validator=_is_module)
    description: str = ""
    capabilities: Mapping[str, CapabilityLevel] = attrs.field(factory=dict)
    env: EnvironmentRequirements = attrs.field(factory=EnvironmentRequirements)
    conformance: ConformanceDeclaration = attrs.field(factory=ConformanceDeclaration)

    @property
    def label(self) -> str:
        """The kind and name for error messages."""
        return f"{self.kind} '{self.name}'"

    def requirement(self, module: str) -> str:
        """Return the requirement in ``[env]`` that names a missing module, or the module's name."""
        top = module.partition(".")[0]
        named = (text for text in self.env.requires if Requirement(text).name.replace("-", "_").lower() == top.lower())
        return next(named, top)

    def missing(self, where: str) -> Iterator[PluginError]:
        """Yield errors for requirements of ``[env]`` that this interpreter's metadata does not meet."""
        requirements = (Requirement(text) for text in self.env.requires)
        unmet = [lack for each in requirements if not each.marker or each.marker.evaluate() for lack in _unmet(each)]
        for module in self.env.modules:
            if importlib.util.find_spec(module) is None:
                fix = f"install it, or give the plugin an environment that has it: cluster.interpreters.{self.kind}"
                unmet.append((f"the module {module}", "not there", fix))
        for needed, found, fix in unmet:
            found = f"{found} in {sys.executable}"
            yield PluginError(f"the plugin needs {needed}", where=where, expected=needed, found=found, fix=fix)

    def require(self, capability: str, because: str) -> None:
        """Raise ``plugin.capability`` if a capability is not declared, or declared ``unsupported``.

        ``because`` names the need: ``"model.lora is set"``.
        """
        level = self.capabilities.get(capability)
        if level in ("full", "partial", "unverified"):
            return
        declared = ", ".join(f"{name} ({value})" for name, value in sorted(self.capabilities.items()))
        found = f"declared as {level}" if level else f"declared: {declared or 'none'}"
        message = f"the {self.label} does not have the capability '{capability}'"
        expected, fix = f"'{capability}', because {because}", f"choose another {self.kind}, or drop what asks for it"
        details = {"where": self.label, "expected": expected, "found": found, "fix": fix}
        raise PluginError(message, code="plugin.capability", **details)


def _unmet(requirement: Requirement) -> Iterator[tuple[str, str, str]]:
    """Yield what a requirement and its extras lack: the need, what was found, and the fix."""
    fix = f"{sys.executable} -m pip install '{str(requirement).partition(';')[0].strip()}'"
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        yield str(requirement), "not installed", fix
        return
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        yield str(requirement), f"{requirement.name} {distribution.version}", fix
    for text in distribution.requires or ():
        marker = Requirement(text).marker
        if marker is None or marker.evaluate({"extra": ""}):
            continue  # required without an extra
        if any(marker.evaluate({"extra": extra}) for extra in requirement.extras):
            yield from _unmet(Requirement(text.partition(";")[0]))


def parse_manifest(content: bytes, *, source: str, kind: str, name: str) -> Manifest:
    """Parse a manifest and check it against its entry point, or raise ``plugin.manifest-invalid``."""
    try:
        values = json.loads(json.dumps(tomllib.loads(content.decode()), default=str))  # TOML's dates become ISO texts
        manifest = structure(Manifest, values, error=PluginError)
    except ValueError as error:
        form = "UTF-8" if isinstance(error, UnicodeDecodeError) else "TOML"
        raise invalid_manifest(f"the manifest is not {form}", source, found=str(error)) from error
    except PluginError as error:
        raise invalid_manifest(error.message, source, expected=error.expected, found=error.found) from error
    if manifest.kind != kind or manifest.name != name:
        expected = f"kind = {kind!r}, name = {name!r} (from the entry point's group and name)"
        found = f"kind = {manifest.kind!r}, name = {manifest.name!r}"
        raise invalid_manifest("the manifest and its entry point disagree", source, expected=expected, found=found)
    return manifest


def parse_version(text: str) -> tuple[int, int]:
    """Split a version such as ``"1.2"`` into its major and minor number."""
    major, minor = text.split(".")
    return int(major), int(minor)


def check_abi(kind: str, abi: str, where: str) -> None:
    """Raise ``plugin.abi`` for a plugin with another major or a newer minor version of the contract."""
    host = ABI_VERSIONS[kind]
    (major, minor), (host_major, host_minor) = parse_version(abi), parse_version(host)
    if major == host_major and minor <= host_minor:
        return
    older = "the plugin" if major < host_major else "jackfield"
    fix = f"upgrade {older} to a release for {kind} ABI {max(abi, host, key=parse_version)} or later"
    fix += ": pip install --upgrade jackfield" if older == "jackfield" else ""
    details = {"where": where, "expected": f"{kind} ABI {host_major}.0 to {host}", "found": abi, "fix": fix}
    raise PluginError(f"the plugin was built for another version of the {kind} contract", code="plugin.abi", **details)


assert set(PluginKind.__args__) == set(KINDS)  # type: ignore[attr-defined]
