"""The installed operators, as a planner sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.abc.operator import OperatorContext
from jackfield.errors import JackfieldError
from jackfield.plugins.registry import PluginRecord, Registry
from jackfield_data_plan.parts import schema_part


@attrs.frozen(kw_only=True)
class KnownOperator:
    """An installed operator."""

    name: str
    type: str
    description: str
    settings: Mapping[str, Any]  #: JSON Schema of its settings with its name
    reads: tuple[str, ...] | None  #: columns with default settings; None: that depends on settings
    writes: tuple[str, ...] | None

    def as_dict(self) -> dict[str, Any]:
        """Return what a model is given."""
        depends = "depends on the settings"
        shown = {"name": self.name, "type": self.type, "description": self.description}
        columns = {"reads": depends if self.reads is None else self.reads}
        return {**shown, **columns, "writes": depends if self.writes is None else self.writes, "schema": self.settings}


@attrs.frozen(kw_only=True)
class Catalogue:
    """All installed operators that can be used."""

    operators: Mapping[str, KnownOperator]
    definitions: Mapping[str, Any]  #: schemas that others refer to
    left_out: tuple[str, ...]  #: why others cannot be used

    def answer_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a model's answer."""
        steps = {"type": "array", "items": {"anyOf": [dict(each.settings) for each in self.operators.values()]}}
        return {
            "type": "object",
            "properties": {"explanation": {"type": "string"}, "tasks": steps},
            "required": ["explanation", "tasks"],
            "additionalProperties": False,
            "$defs": dict(self.definitions),
        }


def catalogue(registry: Registry, names: Mapping[str, str]) -> Catalogue:
    """Look at the operators of a registry; ``names`` are those of usual columns in the data."""
    schemas, definitions, broken = schema_part().plugin_schemas(registry, "operator")
    found, left_out = (
        dict[str, KnownOperator](),
        [f"{label} cannot be used: {error.message}" for label, error in broken.items()],
    )
    for record in registry.records("operator"):
        if record.name not in schemas:
            continue
        try:
            found[record.name] = _known(record, schemas[record.name], names)
        except JackfieldError as error:
            left_out.append(f"{record.label} cannot be used: {error.message}")
    return Catalogue(operators=found, definitions=definitions, left_out=tuple(left_out))


def _known(record: PluginRecord, schema: Mapping[str, Any], names: Mapping[str, str]) -> KnownOperator:
    reads = writes = None
    cls: Any = record.cls
    try:
        operator = record.build({}, OperatorContext(columns=names))
        reads, writes = tuple(operator.reads), tuple(operator.writes)
    except Exception:  # settings without defaults, or a folder that is not given: any plugin may raise anything
        pass
    description = record.usable().description
    return KnownOperator(
        name=record.name, type=cls.type, description=description, settings=schema, reads=reads, writes=writes
    )
