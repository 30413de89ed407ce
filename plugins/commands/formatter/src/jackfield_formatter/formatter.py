"""Records become rows: by their shape, by a mapping, or by a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import msgspec

from jackfield.clock import Clock
from jackfield.data.formats import refusal
from jackfield.errors import ConfigError, DataError, JackfieldError
from jackfield_formatter.answers import AUTO, common_style
from jackfield_formatter.context import FormatContext, FormatSettings
from jackfield_formatter.functions import RecordFunction
from jackfield_formatter.mapping import Mapped
from jackfield_formatter.models import DataModel, truth_of
from jackfield_formatter.registry import model_of
from jackfield_formatter.shapes import Recognised, Shape, shape_of

#: rows of a record, of which there may be none, or why it has none
Formatted: TypeAlias = list[DataModel] | DataError


@attrs.define(kw_only=True, eq=False)
class Formatter:
    """Makes rows of records.

    After :meth:`learn`, all records have the shape of the first ones, and mark their answers alike if these do; without
    it, each record is recognised alone, whatever comes with it.
    """

    settings: FormatSettings
    clock: Clock = attrs.field(factory=Clock)
    model: type[DataModel] = attrs.field(init=False)
    shape: Shape | None = attrs.field(init=False, default=None)
    _context: FormatContext = attrs.field(init=False)
    _mapped: Mapped = attrs.field(init=False)
    _function: RecordFunction | None = attrs.field(init=False, default=None)
    _whole: bool = attrs.field(init=False)  # whether the mapping has all columns that a row needs

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.model, self._context = model_of(settings.into), FormatContext(settings=settings)
        columns = self.model.columns()
        self._mapped = Mapped(settings.map, columns)
        self._whole = bool(settings.map) and all(
            name in settings.map for name, is_needed in columns.items() if is_needed
        )
        if settings.shape is not None and settings.shape != Recognised.name:
            self.shape = shape_of([], settings.shape)
        if settings.function is not None:
            self._function = RecordFunction(settings.function, settings.seconds, self.clock)

    async def start(self) -> None:
        """Import the function, if there is one."""
        if self._function is not None:
            await self._function.start()

    async def close(self) -> None:
        """End its process."""
        if self._function is not None:
            await self._function.close()

    def learn(self, first: Sequence[Mapping[str, Any]]) -> None:
        """Find out what records are of which these are the first; ``data.format`` is raised if that is not known."""
        if self._function is not None or self._whole or not first:
            return
        shape = self.shape = self.shape or shape_of(first, self.settings.shape)
        if self.settings.answers == AUTO:
            truths = list[str]()
            for record in first:
                try:
                    truths.append(truth_of(shape.example(record)))
                except JackfieldError:
                    continue  # it is set aside when it is its turn
            style = common_style(filter(None, truths))
            self._context = FormatContext(settings=attrs.evolve(self.settings, answers=style))

    async def format(self, records: Sequence[Mapping[str, Any]]) -> list[Formatted]:
        """Return the rows of each record, or why it has none."""
        if self._function is None:
            return [self._rows(record) for record in records]
        found = await self._function.call(records)
        return [each if isinstance(each, DataError) else self._made(each) for each in found]

    def _rows(self, record: Mapping[str, Any]) -> Formatted:
        try:
            given = self._mapped.values(record)
            if self._whole:
                return self._made([given])
            shape = self.shape or shape_of([record], self.settings.shape)
            found = self.model.of_example(shape.example(record), self._context)
        except ConfigError:
            raise
        except DataError as error:
            return error
        except Exception as error:  # of the shape or the model of another package
            return _failed(error)
        return self._made([{**values, **given} for values in found])

    def _made(self, values: Sequence[Mapping[str, Any]]) -> Formatted:
        try:
            for each in values:
                self._check(each)
            return [self.model.make(each, self._context) for each in values]
        except ConfigError:
            raise
        except DataError as error:
            return error
        except Exception as error:
            return _failed(error)

    def _check(self, values: Mapping[str, Any]) -> None:
        """Refuse columns that the model does not have, and rows without one that it needs."""
        columns = self.model.columns()
        missing = [name for name, is_needed in columns.items() if is_needed and values.get(name) is None]
        if missing and "prompt_ids" in columns and values.get("prompt_ids") is not None:  # it has its tokens
            missing = []
        unknown = [name for name in values if name not in columns]
        if missing or unknown:
            what = f"a row has no {missing[0]!r}" if missing else f"a row has a column {unknown[0]!r} too many"
            found = f"the columns {', '.join(map(str, values)) or '(none)'}"
            fix = "correct what makes the columns; further ones belong into extra"
            raise refusal(what, f"the columns {', '.join(columns)}", found, fix, where=(missing or unknown)[0])


def plain(record: Any) -> dict[str, Any]:
    """Return a record as JSON values; bytes are a line of JSON. What is none raises ``data.malformed``."""
    try:
        text = record if isinstance(record, bytes) else msgspec.json.encode(record)
        found = msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise refusal("the record is not JSON", "a JSON object", f"{type(error).__name__}: {error}"[:300]) from error
    if not isinstance(found, dict):
        raise refusal("the record is not a JSON object", "a JSON object", type(found).__name__)
    return found


def _failed(error: Exception) -> DataError:
    return refusal("the record cannot be formatted", "a record of this shape", f"{type(error).__name__}: {error}"[:300])
