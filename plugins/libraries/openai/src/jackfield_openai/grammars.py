"""Grammars of whole answers, as clients ask for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jackfield_huggingface.shaping import Grammar
from jackfield_openai.text import refused


def read_grammar(form: Mapping[str, Any] | None, structured: Mapping[str, Any] | None = None) -> Grammar | None:
    """Return the grammar of OpenAI's ``response_format`` or vLLM's ``structured_outputs``; ``ClientError``."""
    if structured:
        if form is not None and form.get("type") != "text":
            raise refused("structured_outputs", "nothing beside response_format", structured)
        return _structured({name: value for name, value in structured.items() if value is not None})
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json", json.dumps({"type": "object"}))
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if kind != "json_schema":
        raise refused("response_format.type", "text, json_object or json_schema", kind)
    if not isinstance(schema, Mapping):
        raise refused("response_format.json_schema.schema", "a JSON schema", schema)
    return Grammar("json", json.dumps(schema))


def _structured(given: Mapping[str, Any]) -> Grammar:
    (kind, value), *rest = given.items() if given else [(None, None)]
    if not rest and kind == "json" and isinstance(value, str | Mapping):
        return Grammar("json", value if isinstance(value, str) else json.dumps(value))
    if not rest and kind == "json_object" and value is True:
        return Grammar("json", json.dumps({"type": "object"}))
    if not rest and kind == "regex" and isinstance(value, str):
        return Grammar("regex", value)
    if not rest and kind == "choice" and isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return Grammar("regex", "|".join(map(re.escape, value)))
    raise refused("structured_outputs", "one of json, json_object, regex and choice", dict(given))
