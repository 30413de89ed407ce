"""Columns of rows as expressions over the columns of a record."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined
from jinja2.exceptions import TemplateRuntimeError, UndefinedError
from jinja2.sandbox import SandboxedEnvironment

from jackfield.data.formats import refusal
from jackfield.errors import ConfigError, DataError, did_you_mean
from jackfield_formatter.answers import AUTO, final_answer

ROW = "row"  #: the whole record, for names that are no words of Python: ``row['the question']``
_UNKNOWN = re.compile(r"'(\w+)' is undefined")
_EXAMPLE = "an expression of Jinja, such as question, answer | final('####'), row['the question'] or 'a text'"


class _Environment(SandboxedEnvironment):
    """Finds a value of a record by its name first, and not a method of dicts."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return obj[attribute] if isinstance(obj, Mapping) and attribute in obj else super().getattr(obj, attribute)


def _final(text: str, how: str = AUTO) -> str:
    return final_answer(text, how)


def _after(text: str, mark: str) -> str:
    """Return what follows the last mark."""
    found = text.rpartition(mark)
    if not found[1]:
        raise refusal(f"the text has no {mark!r}", repr(mark), repr(text)[-200:])
    return found[2].strip()


def _constant(value: Any, **_: Any) -> Any:
    return value


def _before(text: str, mark: str) -> str:
    """Return what precedes the first mark."""
    found = text.partition(mark)
    if not found[1]:
        raise refusal(f"the text has no {mark!r}", repr(mark), repr(text)[:200])
    return found[0].strip()


def _environment() -> SandboxedEnvironment:
    made = _Environment(undefined=StrictUndefined, autoescape=False)
    made.filters.update({"final": _final, "after": _after, "before": _before, "json": json.loads})
    return made


class Mapped:
    """Computes columns of a row from a record. Wrong expressions raise ``config.invalid-value``."""

    def __init__(self, given: Mapping[str, Any], known: Mapping[str, bool], where: str = "map") -> None:
        self.names = list(given)
        self._columns: dict[str, Callable[..., Any]] = {}
        environment = _environment()
        for name, expression in given.items():
            top = name.partition(".")
            if top[0] not in known or (top[1] and top[0] not in ("extra", "extra_info", "tags")):
                what = f"the model has no column {name!r}{did_you_mean(name, known)}"
                fix = "correct the name; a further column is extra.NAME, where the model has extra"
                raise ConfigError(what, where=where, expected=f"one of {', '.join(known)}", found=name, fix=fix)
            self._columns[name] = self._compiled(environment, expression, f"{where}.{name}")

    def _compiled(self, environment: SandboxedEnvironment, expression: Any, where: str) -> Callable[..., Any]:
        if not isinstance(expression, str):
            return functools.partial(_constant, expression)
        try:
            return environment.compile_expression(expression, undefined_to_none=False)
        except TemplateSyntaxError as error:
            what = "an expression cannot be read"
            raise ConfigError(what, where=where, expected=_EXAMPLE, found=f"{expression!r}: {error.message}") from error

    def values(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a record's row; an expression that cannot be computed raises ``data.malformed``."""
        found = dict[str, Any]()
        for name, compute in self._columns.items():
            top, dotted, rest = name.partition(".")
            value = self._computed(name, compute, record)
            if dotted:
                found.setdefault(top, {})[rest] = value
            else:
                found[name] = value
        return found

    def _computed(self, name: str, compute: Callable[..., Any], record: Mapping[str, Any]) -> Any:
        try:
            value = compute(**{**{str(key): each for key, each in record.items()}, ROW: record})
            if isinstance(value, Undefined):
                str(value)  # raises what is missing
            return value
        except DataError as error:
            error.where = name if error.where is None else error.where
            raise
        except UndefinedError as error:
            missing = _UNKNOWN.search(str(error))
            hint = did_you_mean(missing[1], record) if missing else ""
            there = f"the columns {', '.join(map(str, record))}" if record else "no columns"
            raise refusal(f"column {name!r}: {error}{hint}", "a column of the record", there, where=name) from error
        except (TemplateRuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"[:300]
            expected = "a value of the expression"
            raise refusal(f"column {name!r} cannot be computed", expected, found, where=name) from error
