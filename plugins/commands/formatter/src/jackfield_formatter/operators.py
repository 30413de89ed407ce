"""The operators ``format`` and ``split_text``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs
import msgspec
from attrs.validators import ge, min_len

from jackfield.abc.operator import NewRow, Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType
from jackfield.data.formats import ROW
from jackfield.errors import ConfigError, DataError
from jackfield.settings import option
from jackfield_formatter.context import TEXT_PROMPT, FormatContext, FormatSettings
from jackfield_formatter.examples import Example
from jackfield_formatter.experience import ExperienceRow
from jackfield_formatter.files import named
from jackfield_formatter.formatter import Formatter, plain
from jackfield_formatter.functions import digest_of
from jackfield_formatter.models import SCHEMA, TAKEN, DataModel, SftRow
from jackfield_formatter.shapes import name_of, text_of

_TRUTH = "answer_key"
#: settings of ``data.format`` by the usual names of columns
_KEYS = {"prompt": "prompt_key", "answer": _TRUTH, "response": "response_key", "rejected": "rejected_key"}


class Format(Operator):
    """Makes one row of each record. Each record is recognised alone, if no shape is given."""

    type: ClassVar[OperatorType] = "mapper"

    def __init__(self, config: FormatSettings, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._formatter = Formatter(settings=config, clock=context.clock)
        model = self._formatter.model
        _refuse_experiences(context, "format")
        if issubclass(model, ExperienceRow):
            what, expected = "a pipeline of tasks has rows of texts", "task, sft or dpo"
            raise ConfigError(what, where="into", expected=expected, found=config.into)
        _check_columns(model, context)

    @property
    def reads(self) -> tuple[str, ...]:
        """All columns: a shape is known by them, and expressions may name any."""
        return ("*",)

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns of the model, and further ones."""
        return ("*",)

    @property
    def version(self) -> str:
        """The schema, and a digest of the function's code."""
        schema = self._formatter.model.schema_name()
        return schema if self.config.function is None else f"{schema} {digest_of(self.config.function)}"

    async def start(self) -> None:
        """Import the function."""
        await self._formatter.start()

    async def close(self) -> None:
        """End its process."""
        await self._formatter.close()

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Format the rows. A record of which there are no rows, or too many, is set aside."""
        records, aside = dict[str, dict[str, Any]](), dict[str, str]()
        for row in request.rows:
            try:
                records[row.key] = plain({name: row.values[name] for name in row.values if name != ROW})
            except DataError as error:
                aside[row.key] = _reason(error)
        found = await self._formatter.format(list(records.values())) if records else []
        updates = dict[str, Mapping[str, Any]]()
        for key, rows in zip(records, found, strict=True):
            if isinstance(rows, DataError):
                aside[key] = _reason(rows)
            elif not rows:
                aside[key] = "the function makes no row of it"
            elif len(rows) > 1:
                aside[key] = f"it becomes {len(rows)} rows: let split_text or function_synthesizer make them"
            else:
                formatted = _values(rows[0])
                updates[key] = {**dict.fromkeys(records[key].keys() & TAKEN - formatted.keys()), **formatted}
        return OperatorResult(updates=updates, set_aside=aside)


@attrs.frozen(kw_only=True)
class SplitTextConfig:
    """Settings of ``split_text``."""

    column: str = option("text", "column with the text", min_len(1))
    size: int = option(2000, "the most that a piece has", ge(1))
    unit: Literal["characters", "tokens"] = option("characters", "what `size` counts")
    text_prompt: str = option(TEXT_PROMPT, "the prompt of a piece; {before} is the piece before it")
    model: str | None = option(None, "folder of the model whose tokens are counted")

    def settings(self) -> FormatSettings:
        """Return these settings as those of the formatter."""
        own = attrs.asdict(self, filter=lambda field, _: field.name != "column")
        return FormatSettings(into="sft", **own)


class SplitText(Operator):
    """Makes rows for supervised training of a text's pieces: the first takes its place, the others are new."""

    type: ClassVar[OperatorType] = "synthesizer"

    def __init__(self, config: SplitTextConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        _refuse_experiences(context, "split_text")
        _check_columns(SftRow, context)
        self._context = FormatContext(settings=config.settings())

    @property
    def reads(self) -> tuple[str, ...]:
        """The text, and what names it."""
        return (self.config.column, "id", "data_source")

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns of a row for supervised training, and the text, which becomes null."""
        return (self.config.column, SCHEMA, "id", "data_source", "prompt", "completion", "ground_truth")

    @property
    def version(self) -> str:
        """The schema of the rows."""
        return SftRow.schema_name()

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Split the texts; a row without one is set aside."""
        updates, aside, made = dict[str, Mapping[str, Any]](), dict[str, str](), list[NewRow]()
        for row in request.rows:
            try:
                rows = self._pieces(row.values)
            except DataError as error:
                aside[row.key] = _reason(error)
                continue
            updates[row.key] = rows[0]
            made += [NewRow(parents=(row.key,), values=each) for each in rows[1:]]
        return OperatorResult(updates=updates, set_aside=aside, made=tuple(made))

    def _pieces(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        column = self.config.column
        example = Example(
            text=text_of(values, column), id=name_of(values, "id"), data_source=name_of(values, "data_source")
        )
        rows = [SftRow.make(each, self._context) for each in SftRow.of_example(example, self._context)]
        several = len(rows) > 1
        named_rows = (named(each, None, number if several else None) for number, each in enumerate(rows, 1))
        return [{**_values(each), column: None} for each in named_rows]


def _values(row: DataModel) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(row.record()))
    return found


def _reason(error: DataError) -> str:
    return " ".join(str(error).split())


def _refuse_experiences(context: OperatorContext, name: str) -> None:
    if context.target != "tasks":
        what, expected = f"the operator {name} works on raw records", "data.pipeline.tasks"
        raise ConfigError(what, where="data.pipeline.experiences", expected=expected, found=context.target)


def _check_columns(model: type[DataModel], context: OperatorContext) -> None:
    """Refuse to write columns that the run would not read."""
    if not (context.columns and model.reads):
        return
    wanted = {key: model.reads.get(usual) for usual, key in _KEYS.items()}
    found = {key: context.columns.get(usual) for usual, key in _KEYS.items()}
    needed = [key for key, column in wanted.items() if column is not None]
    is_read = all(found[key] == wanted[key] for key in needed if key != _TRUTH)
    if is_read and found[_TRUTH] in (wanted[_TRUTH], None):
        return
    shown = ", ".join(f"{key}: {wanted[key] or 'null'}" for key in dict.fromkeys((*needed, _TRUTH)))
    there = ", ".join(f"{key}: {column}" for key, column in found.items() if column) or "no keys"
    what, fix = "the run does not read the columns that are written", f"set data.format: {{{shown}}}"
    raise ConfigError(what, where="data.format", expected=f"{{{shown}}}", found=f"{{{there}}}", fix=fix)
