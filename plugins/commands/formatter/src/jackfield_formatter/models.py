"""The typed rows that records become, each with the name and the version of its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import attrs

from jackfield.data.formats import ROW, is_conversation, refusal
from jackfield.errors import ConfigError, DataError
from jackfield.settings import structure
from jackfield_formatter.answers import final_answer, thoughts, without_thoughts
from jackfield_formatter.context import FormatContext
from jackfield_formatter.examples import Example, Messages, Said, prompt_of, text_of, turns_of

SCHEMA = "_schema"  #: the column with name and version of a row's schema, such as ``jackfield.task/1``
Values: TypeAlias = dict[str, Any]
Upgrade: TypeAlias = Callable[[Values], Values]

#: columns that say what a record is, which no row has beside its own
TAKEN = {"messages", "conversations", "instruction", "reward_model", "completion", "chosen", "rejected", "label"}
TAKEN |= {"prompt_ids", "answers", "self", "sampling_params", ROW, SCHEMA}
_MESSAGES = "a text, or a list of messages, each with a role and content"


@attrs.frozen(kw_only=True)
class DataModel:
    """The base of models. A model is a frozen attrs class whose fields are the columns of its rows.

    A later version changes ``version`` and adds to ``upgrades``, by the version that it starts from, a function that
    returns a record of the next one. ``reads`` says which column a run reads as ``prompt``, ``answer`` (the ground
    truth), ``response`` and ``rejected``.
    """

    schema: ClassVar[str]
    version: ClassVar[int] = 1
    upgrades: ClassVar[Mapping[int, Upgrade]] = {}
    reads: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def columns(cls) -> dict[str, bool]:
        """Return the columns that a mapping or a function may give, and whether each is needed."""
        return {field.name: field.default is attrs.NOTHING for field in attrs.fields(cls)}

    @classmethod
    def of_example(cls, example: Example, context: FormatContext) -> list[Values]:
        """Return the columns of each row that an example becomes."""
        what, fix = f"the model {cls.schema} is not made from recognised records", "map its columns, or give a function"
        raise refusal(what, "a mapping or a function", "neither", fix)

    @classmethod
    def make(cls, values: Mapping[str, Any], context: FormatContext) -> Any:
        """Return the row with these columns; wrong ones raise ``data.malformed``."""
        return structured(cls, values)

    def record(self) -> Values:
        """Return the row as JSON values, with its schema."""
        values = attrs.asdict(self, recurse=False, filter=lambda _, value: value not in (None, (), {}))
        extra = values.pop("extra", {})
        return {SCHEMA: self.schema_name(), **values, **extra}

    @classmethod
    def schema_name(cls) -> str:
        """Return name and version."""
        return f"{cls.schema}/{cls.version}"

    @classmethod
    def schema_of(cls, record: Mapping[str, Any]) -> Any:
        """Return name and version of a record's schema; None: it has none."""
        return record.get(SCHEMA)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Any:
        """Return the row of a record that :meth:`record` or an older version has made.

        Another schema, and a newer version, raise ``data.schema``; what does not fit the schema ``data.malformed``.
        """
        found = cls.schema_of(record)
        name, _, version = str(found).rpartition("/")
        if name != cls.schema or not version.isdecimal() or int(version) > cls.version:
            newer = name == cls.schema and version.isdecimal()
            what = "the rows have a newer schema than this package knows" if newer else "the rows have another schema"
            fix = "install a newer version of the package that has the model" if newer else "read them with their model"
            raise refusal(what, cls.schema_name(), repr(found), fix, "data.schema")
        values = dict(record)
        for number in range(int(version), cls.version):
            if number not in cls.upgrades:
                known = ", ".join(map(str, (*sorted(cls.upgrades), cls.version)))
                fix = "format the data again"
                raise refusal(
                    "rows of this version cannot be read", f"versions {known}", repr(found), fix, "data.schema"
                )
            values = cls.upgrades[number](values)
        return structured(cls, cls.fields_of(values))

    @classmethod
    def fields_of(cls, record: Values) -> Values:
        """Return the fields of a record of the current version."""
        left_out = {SCHEMA, ROW, *(name for name in TAKEN if record.get(name) is None)}
        values = {name: value for name, value in record.items() if name not in left_out}
        names = {field.name for field in attrs.fields(cls)}
        if "extra" in names:
            extra = {name: values.pop(name) for name in values.keys() - names}
            values |= {"extra": extra} if extra else {}
        return values


def structured(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Return an instance of a model, whose wrong values raise ``data.malformed`` with their column."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return structure(cls, given, error=DataError)
    except (DataError, ConfigError) as error:
        if error.code.startswith("data."):
            raise
        fix = error.fix or "correct the record, or what its columns are mapped from"
        raise refusal(error.message, str(error.expected), str(error.found), fix, where=error.where) from error


def _said(instance: Any, field: attrs.Attribute[Any], value: Said) -> None:
    """Refuse what is neither a text nor a conversation."""
    if not (value.strip() if isinstance(value, str) else is_conversation(list(value))):
        raise refusal(f"column {field.name!r} has nothing to read", _MESSAGES, repr(value)[:200], where=field.name)


def _prompt(instance: Any, field: attrs.Attribute[Any], value: Said) -> None:
    _said(instance, field, value)
    if not isinstance(value, str) and value[-1]["role"] == "assistant":
        what, expected = f"column {field.name!r} ends with the assistant's message", "a message to be answered"
        raise refusal(what, expected, repr(value[-1])[:200], where=field.name)


def _answer(instance: Any, field: attrs.Attribute[Any], value: Said) -> None:
    _said(instance, field, value)
    roles = [] if isinstance(value, str) else [message["role"] for message in value]
    if roles and (roles[0], roles[-1]) != ("assistant", "assistant"):
        expected = "messages from the assistant's first to its last"
        raise refusal(
            f"column {field.name!r} is no answer", expected, f"the roles {', '.join(roles)}", where=field.name
        )


@attrs.frozen(kw_only=True)
class _TextRow(DataModel):
    """What rows of texts have in common."""

    prompt: str | Messages = attrs.field(validator=_prompt)  #: a text, or a conversation that ends with a question
    id: str | None = None  #: unique in the file
    data_source: str | None = None  #: name of the data for rewards and metrics
    tools: Messages = ()  #: schemas for the chat template
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)  #: variables of the chat template
    extra: Mapping[str, Any] = attrs.field(factory=dict)  #: further columns, for agent and reward

    def __attrs_post_init__(self) -> None:
        """Refuse further columns that would say something else of the row."""
        taken = TAKEN | {field.name for field in attrs.fields(type(self))}
        if name := next((each for each in self.extra if each in taken), None):
            fix, where = "rename it", f"extra.{name}"
            raise refusal(f"a further column has the name {name!r}", "another name", name, fix, where=where)

    @classmethod
    def _common(cls, example: Example) -> Values:
        if not example.prompt:
            fix = "map the column prompt" + ("; a text alone becomes rows of sft" if example.text is not None else "")
            raise refusal("the record has no prompt", "a question or a conversation", "none", fix)
        values: Values = {"prompt": prompt_of(example.prompt), "id": example.id, "data_source": example.data_source}
        values |= {"tools": list(example.tools), "chat_template_kwargs": dict(example.template_options)}
        return {name: value for name, value in values.items() if value}


@attrs.frozen(kw_only=True)
class TaskRow(_TextRow):
    """A task that agents work on: ``data.train`` of a run that explores."""

    schema: ClassVar[str] = "jackfield.task"
    reads: ClassVar[Mapping[str, str]] = {"prompt": "prompt", "answer": "ground_truth"}

    ground_truth: str = ""  #: the right answer, for the reward; empty: none
    reasoning: str | None = None  #: thoughts of the answer in the data, which the model is not shown

    @classmethod
    def of_example(cls, example: Example, context: FormatContext) -> list[Values]:
        """Return the prompt, as the ground truth the final answer, and as reasoning what precedes ``</think>``."""
        truth = truth_of(example)
        found = {"ground_truth": final_answer(truth, context.settings.answers), "reasoning": thoughts(truth) or None}
        return [{**cls._common(example), **found}]

    def record(self) -> Values:
        """Return the row, which has a ground truth in any case, as all rows of a file must."""
        return {**super().record(), "ground_truth": self.ground_truth}


@attrs.frozen(kw_only=True)
class SftRow(_TextRow):
    """A prompt with an answer to imitate: ``data.train`` with ``mode: offline`` and ``algorithm.name: sft``."""

    schema: ClassVar[str] = "jackfield.sft"
    reads: ClassVar[Mapping[str, str]] = {"prompt": "prompt", "answer": "ground_truth", "response": "completion"}

    completion: str | Messages = attrs.field(validator=_answer)  #: a text, or the assistant's messages
    ground_truth: str = ""

    @classmethod
    def of_example(cls, example: Example, context: FormatContext) -> list[Values]:
        """Return one row; of a text, one for each piece; of a conversation with ``turns: all``, one for each turn."""
        settings = context.settings
        if example.text is not None:
            parts = context.pieces(example.text)
            before = ["", *parts]
            told = [settings.text_prompt.replace("{before}", each).strip() for each in before[: len(parts)]]
            named = {"id": example.id, "data_source": example.data_source}
            return [{**named, "prompt": asked, "completion": each} for asked, each in zip(told, parts, strict=True)]
        common, answered = cls._common(example), needed(example.response, "answer to learn from")
        if settings.thinking == "drop":
            answered = without_thoughts(answered)
        truth = final_answer(truth_of(example), settings.answers, strict=False) if example.ground_truth else ""
        rows = [{**common, "completion": answered, "ground_truth": truth}]
        if settings.turns == "all":
            earlier = turns_of(example.prompt)
            rows[:0] = [{**common, "prompt": prompt_of(asked), "completion": list(said)} for asked, said in earlier]
        return rows

    def record(self) -> Values:
        """Return the row, which has a ground truth in any case, as all rows of a file must."""
        return {**super().record(), "ground_truth": self.ground_truth}


@attrs.frozen(kw_only=True)
class DpoRow(_TextRow):
    """A prompt with a better and a worse answer: ``data.train`` with ``algorithm.name: dpo``."""

    schema: ClassVar[str] = "jackfield.dpo"
    reads: ClassVar[Mapping[str, str]] = {"prompt": "prompt", "response": "chosen", "rejected": "rejected"}

    chosen: str | Messages = attrs.field(validator=_answer)
    rejected: str | Messages = attrs.field(validator=_answer)

    def __attrs_post_init__(self) -> None:
        """Refuse two equal answers, between which there is no preference."""
        super().__attrs_post_init__()
        if _only_text(self.chosen) == _only_text(self.rejected):
            what, found = "the two answers are the same", repr(self.chosen)[:200]
            raise refusal(what, "two different answers", found, "leave the record out", where="rejected")

    @classmethod
    def of_example(cls, example: Example, context: FormatContext) -> list[Values]:
        """Return the pair."""
        answers = {
            "chosen": needed(example.response, "better answer"),
            "rejected": needed(example.rejected, "worse answer"),
        }
        if context.settings.thinking == "drop":
            answers = {name: without_thoughts(each) for name, each in answers.items()}
        return [{**cls._common(example), **answers}]


def _only_text(said: Said) -> Any:
    return said[0]["content"] if not isinstance(said, str) and len(said) == 1 else said


def needed(said: Said | None, what: str) -> Said:
    """Return an answer; refuse a record that has none."""
    if said is None:
        raise refusal(f"the record has no {what}", "an answer", "none", "map its column")
    return said


def truth_of(example: Example) -> str:
    """Return the text with an example's right answer: its ground truth, else the answer to learn from."""
    return example.ground_truth or ("" if example.response is None else text_of(example.response))
