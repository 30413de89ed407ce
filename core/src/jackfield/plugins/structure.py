"""Whether a plugin's class fits its contract, looked at after the import and before any use (gate 2)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from inspect import Parameter

import attrs

from jackfield.abc import CONTRACTS
from jackfield.errors import StructureError
from jackfield.plugins.members import Flavour, Member, describe_member, is_frozen, public_members

__all__ = ["check_config_class", "check_structure", "structure_problems"]

#: Contracts of these flavours are met by a plain function, too, that returns such an object.
_RETURNABLE: tuple[Flavour, ...] = ("async generator", "generator", "context manager", "async context manager")
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check_structure(kind: str, cls: object, where: str) -> None:
    """Refuse a class that does not fit.

    Raises:
        StructureError: the first of :func:`structure_problems`.
    """
    for problem in structure_problems(kind, cls, where):
        raise problem


def structure_problems(kind: str, cls: object, where: str) -> Iterator[StructureError]:
    """Everything in which ``cls`` does not fit the contract of ``kind``.

    Args:
        kind: of plugin.
        cls: what the manifest's ``object`` names.
        where: the plugin, for messages.

    Yields:
        ``plugin.not-a-subclass``, ``plugin.abstract-method``, ``plugin.sync-async`` or ``plugin.signature``.
    """
    contract = CONTRACTS[kind]
    if not (inspect.isclass(cls) and issubclass(cls, contract)):
        yield StructureError(
            f"the object of the {kind} plugin does not derive from {contract.__name__}",
            code="plugin.not-a-subclass",
            where=where,
            expected=f"a subclass of {contract.__module__}.{contract.__name__}",
            found=repr(cls),
            fix=f"derive the class from {contract.__name__}, or correct 'object' in the manifest",
        )
        return
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        yield StructureError(
            f"{cls.__name__} does not define {', '.join(missing)}",
            where=where,
            expected=f"every abstract method of {contract.__name__}",
            found="abstract: " + ", ".join(missing),
            fix="define " + "; ".join(describe_member(contract, name).signature for name in missing),
        )
    yield from _constructor_problems(cls, where)
    for name in public_members(contract):
        if name != "__init__" and name not in missing:
            yield from _member_problems(describe_member(contract, name), cls, where)


def check_config_class(config_class: object, where: str) -> None:
    """Refuse settings that are not a frozen attrs class.

    Raises:
        StructureError: ``plugin.config-class``.
    """
    if inspect.isclass(config_class) and attrs.has(config_class) and is_frozen(config_class):
        return
    raise StructureError(
        "the plugin's config is not a frozen attrs class",
        code="plugin.config-class",
        where=where,
        expected="a class made by @attrs.frozen",
        found=repr(config_class),
        fix="decorate the class with @attrs.frozen(kw_only=True), or correct 'config' in the manifest",
    )


def _constructor_problems(cls: type, where: str) -> Iterator[StructureError]:
    signature = inspect.signature(cls)
    try:
        signature.bind("config", "context")
    except TypeError as error:
        yield StructureError(
            f"{cls.__name__} cannot be constructed from a config and a context",
            code="plugin.signature",
            where=where,
            expected="__init__(config, context)",
            found=f"__init__{signature.replace(return_annotation=inspect.Signature.empty)}: {error}",
            fix="take exactly these two parameters",
        )


def _member_problems(contract: Member, cls: type, where: str) -> Iterator[StructureError]:
    try:
        found = describe_member(cls, contract.name)
    except (ValueError, TypeError):  # a builtin without a signature: nothing can be said
        return
    where = f"{where}, {cls.__name__}.{contract.name}"
    if (contract.flavour == "property") != (found.flavour == "property"):
        yield StructureError(
            f"{cls.__name__}.{contract.name} is {_noun(found)}, not {_noun(contract)}",
            code="plugin.signature",
            where=where,
            expected=_noun(contract),
            found=_noun(found),
            fix="define it as the contract does",
        )
    elif not _same_flavour(contract.flavour, found.flavour):
        yield StructureError(
            f"{cls.__name__}.{contract.name} is {_noun(found)}, not {_noun(contract)}",
            code="plugin.sync-async",
            where=where,
            expected=_noun(contract),
            found=_noun(found),
            fix=_flavour_fix(contract),
        )
    elif contract.flavour != "property":
        problem = _binding_problem(contract, found) or _parameter_problem(contract.parameters, found.parameters)
        if problem:
            yield StructureError(
                f"{cls.__name__}.{contract.name} {problem}",
                code="plugin.signature",
                where=where,
                expected=contract.signature,
                found=found.signature,
                fix="take the parameters of the contract; further ones need a default",
            )


def _same_flavour(contract: Flavour, found: Flavour) -> bool:
    return found == contract or (found == "sync" and contract in _RETURNABLE)


def _noun(member: Member) -> str:
    nouns: dict[Flavour, str] = {
        "sync": "a plain method (def)",
        "async": "a coroutine method (async def)",
        "generator": "a generator (def with yield)",
        "async generator": "an async generator (async def with yield)",
        "context manager": "a context manager",
        "async context manager": "an async context manager",
        "property": "a property",
    }
    return nouns[member.flavour]


def _flavour_fix(contract: Member) -> str:
    fixes: dict[Flavour, str] = {
        "async": f"write: async def {contract.signature}",
        "async generator": f"write: async def {contract.signature}, with yield",
        "context manager": "decorate it with @contextlib.contextmanager, or return a context manager",
        "async context manager": "decorate it with @contextlib.asynccontextmanager",
        "generator": f"write: def {contract.signature}, with yield",
    }
    return fixes.get(contract.flavour, f"write: def {contract.signature}")


def _binding_problem(contract: Member, found: Member) -> str | None:
    if contract.binding == "class" and found.binding == "instance":
        return "needs an instance, and is called on the class"
    return None


def _parameter_problem(expected: Sequence[Parameter], found: Sequence[Parameter]) -> str | None:
    """Why a call that fits ``expected`` would not fit ``found``; None: it always does."""
    kinds = {parameter.kind for parameter in found}
    for index, parameter in enumerate(expected):
        if parameter.kind is Parameter.VAR_POSITIONAL or parameter.kind is Parameter.VAR_KEYWORD:
            problem = None if parameter.kind in kinds else f"does not take {parameter}"
        elif parameter.kind is Parameter.KEYWORD_ONLY:
            problem = _named_problem(parameter, found)
        else:
            problem = _positional_problem(index, parameter, found)
        if problem:
            return problem
    names = {parameter.name for parameter in expected}
    for parameter in found:
        variadic = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if parameter.name not in names and parameter.default is Parameter.empty and not variadic:
            return f"needs a parameter '{parameter.name}' that the contract does not give"
    return None


def _named_problem(parameter: Parameter, found: Sequence[Parameter]) -> str | None:
    match = next((other for other in found if other.name == parameter.name), None)
    if match is None:
        takes_any = any(other.kind is Parameter.VAR_KEYWORD for other in found)
        return None if takes_any else f"has no parameter '{parameter.name}'"
    if match.kind not in _BY_NAME:
        return f"does not take '{parameter.name}' by name"
    return _default_problem(parameter, match)


def _positional_problem(index: int, parameter: Parameter, found: Sequence[Parameter]) -> str | None:
    in_place = [other for other in found if other.kind in _BY_POSITION]
    kinds = {other.kind for other in found}
    if index >= len(in_place):
        match = next((other for other in found if other.name == parameter.name), None)
        if match is not None and match.kind is Parameter.KEYWORD_ONLY:
            return f"does not take '{parameter.name}' by position"
        takes_any = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds
        return None if takes_any else f"has no parameter '{parameter.name}'"
    match = in_place[index]
    if parameter.kind is Parameter.POSITIONAL_ONLY:
        return _default_problem(parameter, match)
    if match.name != parameter.name:
        return f"has '{match.name}' in the place of '{parameter.name}'"
    if match.kind is Parameter.POSITIONAL_ONLY:
        return f"does not take '{parameter.name}' by name"
    return _default_problem(parameter, match)


def _default_problem(parameter: Parameter, match: Parameter) -> str | None:
    if parameter.default is not Parameter.empty and match.default is Parameter.empty:
        return f"needs '{match.name}', which the contract lets a caller leave out"
    return None
