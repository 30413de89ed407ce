"""What a plugin declares in its manifest, and whether it and its class fit the contract.

The class is checked after its import and before any use, without running any of its code.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any, Generic, Literal, Protocol

import attrs
from packaging.requirements import Requirement
from packaging.version import Version

from jackfield.abc import ABI_VERSIONS, CONTRACTS
from jackfield.errors import PluginError
from jackfield.settings import structure

PluginKind = Literal["engine", "rollout", "agent", "reward", "transfer_queue", "checkpoint_engine", "operator", "hooks"]
CapabilityLevel = Literal["full", "partial", "unsupported", "unverified"]
assert set(PluginKind.__args__) == set(ABI_VERSIONS)  # type: ignore[attr-defined]


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
    #: the class, as ``package.module:Class``; None: a package of hooks
    object: str | None = attrs.field(default=None, validator=_is_object)
    #: the settings' frozen attrs class, importable without torch; None: a package of hooks
    config: str | None = attrs.field(default=None, validator=_is_object)
    hooks: str | None = attrs.field(default=None, validator=_is_module)  #: the module with hooks
    description: str = ""
    capabilities: Mapping[str, CapabilityLevel] = attrs.field(factory=dict)
    env: EnvironmentRequirements = attrs.field(factory=EnvironmentRequirements)
    conformance: ConformanceDeclaration = attrs.field(factory=ConformanceDeclaration)

    def __attrs_post_init__(self) -> None:
        """Require what a plugin of this kind consists of, and refuse what would have no effect."""
        needed = {"hooks"} if self.kind == "hooks" else {"object", "config"}
        given = {name for name in ("object", "config", "hooks") if getattr(self, name) is not None}
        if missing := sorted(needed - given):
            raise ValueError(f"kind = '{self.kind}' needs {' and '.join(missing)}")
        if self.kind == "hooks" and given != needed:
            raise ValueError(f"kind = 'hooks' has no {' and no '.join(sorted(given - needed))}")

    @property
    def label(self) -> str:
        """The kind and name for error messages."""
        return f"{self.kind} '{self.name}'"

    @property
    def package(self) -> str:
        """The top-level package of its class or hooks."""
        return (self.object or str(self.hooks)).partition(":")[0].partition(".")[0]

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
        details = {"where": f"{self.kind}.name", "expected": expected, "found": found, "fix": fix}
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


def check_abi(kind: str, abi: str, where: str) -> None:
    """Raise ``plugin.abi`` for a plugin with another major or a newer minor version of the contract."""
    host, wanted = Version(ABI_VERSIONS[kind]), Version(abi)
    if host.major == wanted.major and wanted <= host:
        return
    older = "the plugin" if wanted < host else "jackfield"
    fix = f"upgrade {older} to a release for {kind} ABI {max(host, wanted)} or later"
    fix += ": pip install --upgrade jackfield" if older == "jackfield" else ""
    details = {"where": where, "expected": f"{kind} ABI {host.major}.0 to {host}", "found": abi, "fix": fix}
    raise PluginError(f"the plugin was built for another version of the {kind} contract", code="plugin.abi", **details)


#: Each flavour of method: how it is written, and the return annotations that make a plain function one.
_FLAVOURS: dict[str, tuple[str, str]] = {
    "sync": ("def", ""),
    "async": ("async def", "Awaitable Coroutine"),
    "async generator": ("async def with yield", "AsyncGenerator AsyncIterator AsyncIterable"),
    "generator": ("def with yield", "Generator Iterator Iterable"),
    "context manager": ("@contextlib.contextmanager", "AbstractContextManager ContextManager"),
    "async context manager": ("@contextlib.asynccontextmanager", "AbstractAsyncContextManager AsyncContextManager"),
    "property": ("@property", ""),
}
_TESTS = {
    "async": inspect.iscoroutinefunction,
    "async generator": inspect.isasyncgenfunction,
    "generator": inspect.isgeneratorfunction,
}
#: Flavours by code object. The decorators of contextlib return functions that share one code object.
_CODES = {
    contextlib.contextmanager(lambda: iter(())).__code__: "context manager",
    contextlib.asynccontextmanager(lambda: None).__code__: "async context manager",  # type: ignore[arg-type, return-value]
}


def structure_problems(kind: str, cls: Any, where: str) -> Iterator[PluginError]:
    """Yield all violations of a kind's contract by a class, without running any of its code.

    They are ``plugin.not-a-subclass``, ``plugin.abstract-method``, ``plugin.sync-async`` or ``plugin.signature``.
    """
    contract = CONTRACTS[kind]
    if not (inspect.isclass(cls) and issubclass(cls, contract)):
        message = f"the object of the {kind} plugin does not derive from {contract.__name__}"
        expected, found = f"a subclass of {contract.__module__}.{contract.__name__}", repr(cls)
        fix = f"derive the class from {contract.__name__}, or correct 'object' in the manifest"
        yield PluginError(message, code="plugin.not-a-subclass", where=where, expected=expected, found=found, fix=fix)
        return
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        message, found = f"{cls.__name__} does not define {', '.join(missing)}", f"abstract: {', '.join(missing)}"
        expected = f"every abstract method of {contract.__name__}"
        fix = "define " + "; ".join(f"{name}{_bare(contract, name)}" for name in missing)
        yield PluginError(message, code="plugin.abstract-method", where=where, expected=expected, found=found, fix=fix)
    for name in public_members(contract):
        if name not in missing and (problem := _problem(contract, cls, name)) is not None:
            place = f"{cls.__name__}.{name}"
            yield PluginError(f"{place} does not fit the contract", where=f"{where}, {place}", **problem)


def _problem(contract: type, cls: type, name: str) -> dict[str, str] | None:
    """Compare a member of a class with that of the contract."""
    wanted = flavour(contract, name)
    try:
        found = flavour(cls, name)
    except (ValueError, TypeError):  # a builtin without a signature
        return None
    returnable = found == "sync" and wanted not in ("sync", "async")  # a plain function may return such an object
    if wanted != found and "property" in (wanted, found):
        fix = "define it as the contract does"
        return {"code": "plugin.signature", "expected": wanted, "found": found, "fix": fix}
    if wanted != found and not returnable:
        expected, seen = (f"{each} ({_FLAVOURS[each][0]})" for each in (wanted, found))
        fix = f"write {name}{_bare(contract, name)} with {_FLAVOURS[wanted][0]}"
        return {"code": "plugin.sync-async", "expected": expected, "found": seen, "fix": fix}
    refusal = None if wanted == "property" else _refusal(contract, cls, name)
    if refusal is None:
        return None
    expected = "(config, context)" if name == "__init__" else str(_bare(contract, name))
    fix = "take the contract's parameters; others need a default"
    return {"code": "plugin.signature", "expected": f"{name}{expected}", "found": refusal, "fix": fix}


def _refusal(contract: type, cls: type, name: str) -> str | None:
    """Return why a class rejects calls that the contract allows: by position, by name, only required arguments.

    Each argument is its parameter's name, which shows the parameter that receives it.
    """
    on_class = isinstance(inspect.getattr_static(contract, name), classmethod)
    if on_class and not isinstance(inspect.getattr_static(cls, name), classmethod | staticmethod):
        return f"{name} needs an instance, and is called on the class"
    accepted, wanted = _bare(cls, name), _bare(contract, name).parameters.values()
    plain = [each.name for each in wanted if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    by_name = [each.name for each in wanted if each.kind is Parameter.KEYWORD_ONLY]
    by_name += ["another" for each in wanted if each.kind is Parameter.VAR_KEYWORD]
    required = [each.name for each in wanted if each.default is Parameter.empty and each.name in plain + by_name]
    calls: list[tuple[list[str], list[str]]] = [(plain, by_name), ([], plain + by_name), ([], required)]
    for positional, named in [(["config", "context"], [])] if name == "__init__" else calls:
        try:
            bound = accepted.bind(*positional, **{each: each for each in named}).arguments
        except TypeError as error:
            return f"{name}{accepted}: {error}"
        for own, value in bound.items():
            if isinstance(value, str) and own != value and name != "__init__":  # its parameters' names may differ
                return f"{name}{accepted}: '{own}' is in the place of '{value}'"
    return None


def public_members(cls: type) -> Iterator[str]:
    """Yield the names of public members of a class and its bases, and ``__init__``, as defined."""
    seen: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base in (object, ABC, Generic, Protocol):
            continue
        for name, value in vars(base).items():
            is_member = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if is_member and not inspect.isclass(value) and (not name.startswith("_") or name == "__init__"):
                seen.setdefault(name)
    return iter(seen)


def flavour(cls: type, name: str) -> str:
    """Return the flavour of a member (how it is called, what it yields) without running its code.

    The flavour follows from the code behind decorators or, for a plain function, from the return annotation.
    """
    raw = inspect.getattr_static(cls, name)
    function = inner = _function(raw)
    if isinstance(raw, property | functools.cached_property) or not callable(function):
        return "property"
    while inner is not None:
        if getattr(inner, "__code__", None) in _CODES:
            return _CODES[inner.__code__]
        for found, test in _TESTS.items():
            if test(inner):
                return found
        inner = getattr(inner, "__wrapped__", None)
    returns = annotation_text(inspect.signature(function).return_annotation).partition("[")[0].rpartition(".")[2]
    return next((found for found, (_, names) in _FLAVOURS.items() if returns in names.split()), "sync")


def signature_of(cls: type, name: str) -> Signature:
    """Return the signature of a member as its callers see it, without ``self`` or ``cls``.

    A property has its getter's signature, and a plain value an empty one.
    """
    raw = inspect.getattr_static(cls, name)
    function = _function(raw)
    if not callable(function):
        return Signature()
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not isinstance(raw, staticmethod) and parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL:
        del parameters[0]
    return signature.replace(parameters=parameters)


def _bare(cls: type, name: str) -> Signature:
    """Return the signature without annotations, for error messages and calls."""
    return Signature([each.replace(annotation=Parameter.empty) for each in signature_of(cls, name).parameters.values()])


def _function(raw: Any) -> Any:
    if isinstance(raw, property | functools.cached_property):
        return raw.fget if isinstance(raw, property) else raw.func
    return raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw


def annotation_text(annotation: Any) -> str:
    """Return an annotation as it is written; empty if there is none."""
    if annotation is Parameter.empty or annotation is None:
        return "" if annotation is Parameter.empty else "None"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
