"""The JSON Schema of config files, made from the classes of their settings.

Editors complete and check a file by it. What depends on several settings, or on files, is left to
``jackfield config validate``.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union

import attrs

from jackfield.algorithms import names
from jackfield.algorithms.settings import AlgorithmSettings, KLSettings
from jackfield.compose.parts import register_any
from jackfield.config.sections import PluginSection, RunConfig
from jackfield.errors import JackfieldError
from jackfield.plugins import HookManager, Registry
from jackfield.queue.meta import SAMPLERS, SamplerSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS = {bool: "boolean", int: "integer", str: "string"}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
#: YAML 1.1 parses 1e-6 as a text, which a run takes as a number.
_NUMBER = {"type": ["number", "string"], "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"}
_AUTOMATIC = ("transfer_queue", "checkpoint_engine")  #: kinds with the name ``auto``

Schema = dict[str, Any]


class SchemaWriter:
    """Collects the schemas of settings classes; ``registry`` has the plugins whose settings are included.

    A plugin that cannot be used is left out, with the reason in ``left_out``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._definitions: dict[str, Schema] = {}
        self._classes: dict[type, str] = {}
        self.left_out: dict[str, JackfieldError] = {}

    def run(self) -> Schema:
        """Return the schema of a whole file, which may have ``stages``."""
        self._register_parts()
        whole = self._of_class(RunConfig)
        stage = {"type": "object", "properties": dict(whole["properties"]), "additionalProperties": False}
        self._definitions["stage"] = stage
        whole["properties"]["stages"] = {
            "type": "object",
            "additionalProperties": {"$ref": "#/$defs/stage"},
            "description": "settings of runs that follow each other, by name; they replace those of the file",
        }
        whole["required"] = []  # a stage or an override may give what the file leaves out
        return {"$schema": DIALECT, "title": "A run of Jackfield", **whole, "$defs": self._definitions}

    def _register_parts(self) -> None:
        """Let the installed plugins register parts of algorithms and samplers, whose names the schema has."""
        for record in self._registry.records():
            if record.error is None and record.usable().hooks is not None:
                try:
                    HookManager((), [record.usable()]).call("register_parts", register=register_any)
                except JackfieldError as error:
                    self.left_out[record.label] = error

    def _of_class(self, cls: type) -> Schema:
        attrs.resolve_types(cls)
        fields = [field for field in attrs.fields(cls) if field.init]
        text = (inspect.getdoc(cls) or "").splitlines()[:1]
        return {
            "type": "object",
            **({"description": text[0]} if text else {}),
            "properties": {field.name: self._of_field(cls, field) for field in fields},
            "required": [field.name for field in fields if field.default is attrs.NOTHING],
            "additionalProperties": False,
        }

    def _of_field(self, cls: type, field: attrs.Attribute[Any]) -> Schema:
        if isinstance(field.default, PluginSection):
            schema = self._of_plugin(field.name, field.default.name)
        elif cls is RunConfig and field.name == "algorithm":
            schema = {"anyOf": [{"enum": [*names("algorithm")]}, self._of_type(field.type)]}
        elif (cls, field.name) in _NAMED:
            schema = {"enum": [*_NAMED[cls, field.name](), *([None] if field.default is None else [])]}
        else:
            schema = _bounded(self._of_type(field.type), field.validator)
        if help := field.metadata.get("help"):
            schema = {**schema, "description": help}
        if isinstance(field.default, bool | int | float | str) or field.default is None:
            schema = {**schema, "default": field.default}
        return schema

    def _of_type(self, kind: Any) -> Schema:
        origin, members = typing.get_origin(kind) or kind, typing.get_args(kind)
        if attrs.has(origin):
            return self._defined(origin)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self._of_type(member) for member in members]}
        if origin is Literal:
            return {"enum": list(members)}
        if origin is type(None):
            return {"type": "null"}
        if origin is float:
            return dict(_NUMBER)
        if origin in _SCALARS:
            return {"type": _SCALARS[origin]}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", **({"additionalProperties": self._of_type(members[1])} if members else {})}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return self._of_sequence(origin, members)
        return {}  # Any, and what only the class itself can check

    def _of_sequence(self, kind: type, members: tuple[Any, ...]) -> Schema:
        if not members:
            return {"type": "array"}
        if kind is tuple and members[-1] is not Ellipsis:
            items = [self._of_type(member) for member in members]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        return {"type": "array", "items": self._of_type(members[0])}

    def _defined(self, cls: type) -> Schema:
        """Return a reference to the definition of a class, which may contain itself."""
        if cls not in self._classes:
            taken = cls.__name__ in self._definitions
            self._classes[cls] = f"{cls.__module__}.{cls.__name__}" if taken else cls.__name__
            self._definitions[self._classes[cls]] = {}
            self._definitions[self._classes[cls]] = self._of_class(cls)
        return {"$ref": f"#/$defs/{self._classes[cls]}"}

    def _of_plugin(self, kind: str, default: str) -> Schema:
        """Return the schema of a plugin's section: its name alone, or its name and its settings."""
        if kind not in self._definitions:
            sections = list(self._sections(kind, default))
            known = [section["properties"]["name"]["const"] for section in sections]
            forms = [{"enum": known}, *sections]
            if kind == "reward":  # several rewards, which the plugin mix adds up
                forms.append({"type": "array", "items": {"type": "object"}})
            self._definitions[kind] = {"anyOf": forms}
        return {"$ref": f"#/$defs/{kind}"}

    @property
    def definitions(self) -> Schema:
        """The schemas that others refer to as ``#/$defs/NAME``."""
        return dict(self._definitions)

    def sections(self, kind: str) -> list[Schema]:
        """Return the schema of a section of each plugin of a kind, with its name."""
        return list(self._sections(kind, ""))

    def _sections(self, kind: str, default: str) -> Iterator[Schema]:
        for record in self._registry.records(kind):
            try:
                section = self._of_class(record.settings_class)
            except JackfieldError as error:
                self.left_out[record.label] = error
                continue
            section["properties"] = {"name": {"const": record.name}, **section["properties"]}
            section["required"] = ["name"] * (record.name != default) + section["required"]
            yield section
        if kind in _AUTOMATIC:
            yield {"type": "object", "properties": {"name": {"const": "auto"}}, "additionalProperties": False}


#: Settings that name a registered part.
_NAMED: Mapping[tuple[type, str], Any] = {
    (AlgorithmSettings, "name"): lambda: names("algorithm"),
    (AlgorithmSettings, "aggregation"): lambda: names("aggregation"),
    (KLSettings, "name"): lambda: names("kl"),
    (SamplerSpec, "name"): lambda: sorted(SAMPLERS),
}


def _bounded(schema: Schema, validator: Any) -> Schema:
    """Return a schema of a number with the bounds of attrs validators, as far as they are plain comparisons."""
    bounds = {_BOUNDS[each.compare_op]: each.bound for each in _comparisons(validator) if each.compare_op in _BOUNDS}
    if not bounds:
        return schema
    if "anyOf" in schema:
        return {"anyOf": [{**one, **bounds} if _is_number(one) else one for one in schema["anyOf"]]}
    return {**schema, **bounds} if _is_number(schema) else schema


def _is_number(schema: Schema) -> bool:
    return schema.get("type") in ("integer", _NUMBER["type"])


def _comparisons(validator: Any) -> Iterator[Any]:
    if inner := getattr(validator, "validator", None):
        yield from _comparisons(inner)
    for each in getattr(validator, "_validators", ()):
        yield from _comparisons(each)
    if hasattr(validator, "compare_op"):
        yield validator


def run_schema(registry: Registry) -> tuple[Schema, dict[str, JackfieldError]]:
    """Return the JSON Schema of a run's file with the settings of installed plugins, and the plugins left out."""
    writer = SchemaWriter(registry)
    return writer.run(), writer.left_out


def plugin_schemas(registry: Registry, kind: str) -> tuple[dict[str, Schema], Schema, dict[str, JackfieldError]]:
    """Return the JSON Schemas of the settings of plugins of a kind by name, with what they share under ``$defs``.

    The third are the plugins that were left out because they cannot be used.
    """
    writer = SchemaWriter(registry)
    sections = writer.sections(kind)
    return (
        {section["properties"]["name"]["const"]: section for section in sections},
        writer.definitions,
        writer.left_out,
    )
