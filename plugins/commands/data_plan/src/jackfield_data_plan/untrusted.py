"""What settings that a model wrote may not hold: names of files, code, addresses and secrets.

A model reads rows of data, and a row may hold instructions. So its answer is refused where a setting could reach
anything outside the rows, unless a person allows that setting. In doubt it is refused.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.errors import ConfigError, did_you_mean
from jackfield.plugins.registry import Registry
from jackfield_data_plan.parts import plain

_LARGEST = 1_000_000  #: numbers above may cost all memory
_LONGEST = 2000  #: characters of a text
_WORDS = (
    "address cache class code command credential dir directory endpoint env environment expression file folder "
    "function header host interpreter key library module password path pattern plugin program python regex script "
    "secret template token uri url"
)
_NAMES = frozenset(_WORDS.split())  #: words in names of settings with which a text is refused
_HELP = re.compile(
    r"\b(files?|folders?|paths?|URLs?|addresses|environment variables?|commands?|modules?|functions?|code|interpreters?"
    r"|packages?|regular expressions?)\b",
    re.IGNORECASE,
)
_MARKS = re.compile(r"[\\/~$`\x00-\x08\x0e-\x1f]|\.\.|\{\{|\{%")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  #: module:object
_SUFFIX = re.compile(r"\S+\.[A-Za-z]\w{0,7}")  #: of a file, or module.object


def check_allowed(allowed: Collection[str], registry: Registry) -> None:
    """Refuse names of operators and settings that do not exist: a mistake would allow nothing, or something else."""
    for each in allowed:
        operator, dot, setting = each.partition(".")
        known = attrs.fields_dict(registry.load("operator", operator).settings_class)
        if dot and setting not in known:
            what = f"the operator {operator} has no setting {setting!r}{did_you_mean(setting, known)}"
            raise ConfigError(what, where="--allow", expected=", ".join(known), found=each)


def refusals(operator: str, cls: type, settings: Mapping[str, Any], allowed: Collection[str]) -> Iterator[str]:
    """Yield why settings of an operator are refused when a model wrote them.

    ``allowed`` has ``OPERATOR`` or ``OPERATOR.SETTING`` for each operator or setting that a person allows.
    """
    if operator in allowed:
        return
    fields = {field.name: field for field in attrs.fields(attrs.resolve_types(cls))}
    for name, value in settings.items():
        field = fields.get(name)
        if field is None or f"{operator}.{name}" in allowed or value == field.default or not (value or value == 0):
            continue
        if why := _refused(field, value):
            yield f"{operator}.{name}: {why}; only a person can allow it, with --allow {operator}.{name}"


def _refused(field: attrs.Attribute[Any], value: Any) -> str | None:
    if _opaque(field.type):
        return "its values have no schema, so that they cannot be checked"
    if not _is_literal(field.type) and any(True for _ in _texts(value)):
        if word := next(iter(_words(field.name) & _NAMES), None):
            return f"its name has {word!r}"
        if found := _HELP.search(str(field.metadata.get("help", ""))):
            return f"its description has {found[0]!r}"
    if not _is_literal(field.type):
        for text in _texts(value):
            if why := _refused_text(text):
                return why
    return _inner(value)


def _refused_text(text: str) -> str | None:
    if _MARKS.search(text) or _REFERENCE.fullmatch(text) or _SUFFIX.fullmatch(text) or _exists(text):
        return f"{plain(text, 60)!r} may name a file, an address or code"
    if not all(letter.isprintable() or letter in "\n\t" for letter in text):
        return "a text with characters that are not shown"
    return f"a text of more than {_LONGEST} characters" if len(text) > _LONGEST else None


def _inner(value: Any) -> str | None:
    """Refuse large numbers at any depth, and texts under keys of objects that have a word of the list."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return f"a number above {_LARGEST}"
    if isinstance(value, Mapping):
        for key, each in value.items():
            if _words(str(key)) & _NAMES and any(True for _ in _texts(each)):
                return f"the name of {plain(key, 60)!r}"
            if why := _inner(each):
                return why
    if isinstance(value, Sequence) and not isinstance(value, str):
        return next((why for each in value if (why := _inner(each))), None)
    return None


def _words(name: str) -> set[str]:
    """Return the words of a name, also without the ending of a plural."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return {*words, *(word.removesuffix("s") for word in words), *(word.removesuffix("es") for word in words)}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each)


def _opaque(kind: Any) -> bool:
    """Return whether values of a type can be anything."""
    origin, members = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Any or origin is object:
        return True
    if attrs.has(origin):
        return any(_opaque(field.type) for field in attrs.fields(attrs.resolve_types(origin)) if field.type is not kind)
    if isinstance(origin, type) and issubclass(origin, Mapping | Sequence) and origin not in (str, bytes):
        return not members or any(_opaque(member) for member in members if member is not Ellipsis)
    return origin is not Literal and any(_opaque(member) for member in members)


def _is_literal(kind: Any) -> bool:
    """Return whether a type lists its values."""
    if typing.get_origin(kind) is Literal:
        return True
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    return bool(members) and all(map(_is_literal, members))


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return True
