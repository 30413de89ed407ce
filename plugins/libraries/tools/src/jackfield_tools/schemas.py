"""The schema of a function for the model, made from its signature and docstring, and the reading of arguments by it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import attrs
import msgspec

from jackfield.errors import ConfigError

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*")
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD = re.compile(r":param\s+(?:\S+\s+)?(\w+):\s*(.*)")
_CALL = "__call__"
_EMPTY = (list, dict, set, bytearray)
_HOLDERS = (dict, list, tuple, Mapping)  #: what may hold keys; the quick tests first


@attrs.frozen(kw_only=True, eq=False)
class Signature:
    """What a function takes."""

    name: str
    description: str
    parameters: Mapping[str, Any]  #: a JSON schema of an object
    fields: Any  #: a msgspec class with a field per parameter

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in OpenAI's form."""
        return schema(self.name, self.description, self.parameters)

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the function's keyword arguments; ``ValueError`` says what is wrong with the given ones."""
        try:
            found = msgspec.convert(dict(arguments), self.fields, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(str(error).replace("`$.", "`").replace("$.", "")) from None
        if unknown := _unknown(dict(arguments), self.parameters, ""):
            raise ValueError(f"unknown field `{unknown}`")
        return {name: getattr(found, name) for name in self.fields.__struct_fields__}


def schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema in OpenAI's form."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def load(target: str, where: str) -> Any:
    """Import what ``file.py:name`` or ``package.module:name`` names; ``config.invalid-value`` if that fails."""
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        expected = "file.py:name or package.module:name"
        raise ConfigError("it does not say where the code is", where=where, expected=expected, found=target)
    try:
        module = _import_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, name)
    except Exception as error:  # of any kind: it is the user's code
        found = f"{type(error).__name__}: {error}"
        fix = "check the path, and that the code imports with this interpreter: " + sys.executable
        raise ConfigError(f"{target} cannot be imported", where=where, found=found, fix=fix) from error


def _import_file(path: Path) -> types.ModuleType:
    """Import a file once; its neighbours can be imported by their names while it is."""
    name = "jackfield_tools_file_" + re.sub(r"\W", "_", os.path.abspath(path))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
    return module


def describe(
    function: Callable[..., Any], name: str, where: str, description: str | None = None, *, bound: bool = True
) -> Signature:
    """Return the signature of a function; the first parameter of one that is not ``bound`` is left out.

    Types come from annotations; ``Annotated[int, "text"]`` describes a parameter, as the docstring's ``Args`` do.
    """
    about, of_parameters = parse_docstring(inspect.getdoc(function) or "")
    if _yields(function):
        fix = "return a list, or a text"
        raise ConfigError(f"{name} yields values", where=where, expected="a function", found="a generator", fix=fix)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[0 if bound else 1 :]
        fields = [_field(each, hints.get(each.name, Any), of_parameters.get(each.name)) for each in parameters]
        made = msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True, kw_only=True)
        content = _plain_schema(made)
    except Exception as error:  # of a name that is not there, of a type that has no JSON form
        found = f"{type(error).__name__}: {error}"
        fix = "annotate parameters with int, float, str, bool, lists, dicts, Literal, Optional or dataclasses"
        raise ConfigError(f"{name} has no schema", where=where, found=found, fix=fix) from error
    return Signature(
        name=name, description=about if description is None else description, parameters=content, fields=made
    )


def _yields(function: Any) -> bool:
    """Return whether a function, or the call of an object, is a generator function."""
    own = (function, getattr(function, _CALL, None))
    return any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in own)


def _unknown(value: Any, content: Mapping[str, Any], path: str) -> str | None:
    """Return the place of a key that the schema does not have; dataclasses would ignore it."""
    if choices := content.get("anyOf"):
        kind = "object" if isinstance(value, Mapping) else "array" if isinstance(value, list) else None
        found = [_unknown(value, each, path) for each in choices if each.get("type", kind) == kind]
        return found[0] if found and all(found) else None
    inside: list[tuple[Any, Any, str]] = []
    if isinstance(value, Mapping):
        known, others = content.get("properties", {}), content.get("additionalProperties")
        for key, each in value.items():
            if "properties" in content and key not in known and not others:
                return f"{path}{key}"
            inside.append((each, known.get(key, others), f"{path}{key}."))
    elif isinstance(value, list | tuple):
        first, further = content.get("prefixItems", ()), content.get("items")
        for number, each in enumerate(value):
            of_item = first[number] if number < len(first) else further
            inside.append((each, of_item, f"{path.removesuffix('.')}[{number}]."))
    holders = [each for each in inside if isinstance(each[0], _HOLDERS) and isinstance(each[1], Mapping)]
    return next(filter(None, (_unknown(*each) for each in holders)), None)


def _field(parameter: inspect.Parameter, hint: Any, text: str | None) -> tuple[Any, ...]:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"{parameter} is no parameter that is given by its name")
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
        texts = [note for note in notes if isinstance(note, str)]
        others = [note for note in notes if not isinstance(note, str)]
        text = texts[0] if texts else text
        hint = Annotated[(kind, *others)] if others else kind
    if text:
        hint = Annotated[hint, msgspec.Meta(description=text)]
    if parameter.default is parameter.empty:
        return parameter.name, hint
    default = parameter.default
    if isinstance(default, _EMPTY):
        default = msgspec.field(default_factory=lambda: copy.deepcopy(parameter.default))
    return parameter.name, hint, default


def _plain_schema(made: Any) -> dict[str, Any]:
    """Return the schema of a class without references, which many chat templates do not show."""
    (top,), parts = msgspec.json.schema_components([made], ref_template="#/$defs/{name}")
    inside = {f"#/$defs/{name}": part for name, part in parts.items()}
    content: dict[str, Any] = _inlined(top, inside, ())
    content.pop("title", None)
    content.setdefault("properties", {})
    content.setdefault("required", [])
    content.pop("additionalProperties", None)
    return content


def _inlined(value: Any, parts: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_inlined(each, parts, within) for each in value]
    if not isinstance(value, dict):
        return value
    name = str(value.get("$ref"))
    if name in within:
        raise TypeError(f"{name} refers to itself")
    if name in parts:
        further = {key: each for key, each in value.items() if key != "$ref"}
        return {**_inlined(parts[name], parts, (*within, name)), **further}
    return {key: _inlined(each, parts, within) for key, each in value.items()}


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says about the function, and about its parameters (Google's style, or ``:param``)."""
    about: list[str] = []
    found: dict[str, str] = {}
    section, name = "", ""
    for line in text.splitlines():
        if heading := _SECTION.fullmatch(line.strip()):
            section, name = heading[1], ""
        elif given := _FIELD.match(line.strip()):
            section, name = "param", given[1]
            found[name] = given[2]
        elif section in ("Args", "Arguments", "Parameters"):
            entry = _ENTRY.match(line.strip())
            if entry and (not name or len(line) - len(line.lstrip()) <= 4):
                name = entry[1]
                found[name] = entry[2]
            elif name and line.strip():
                found[name] += f" {line.strip()}"
        elif section == "param" and line[:1].isspace() and line.strip():
            found[name] += f" {line.strip()}"
        elif not section or (not line.startswith((" ", ":")) and section != "param" and line.strip()):
            section = ""
            about.append(line)
    return "\n".join(about).strip(), {key: value.strip() for key, value in found.items()}
