"""The model of experiences: samples of tokens, as the queue imports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from jackfield.data.formats import Task, refusal
from jackfield_formatter.answers import final_answer
from jackfield_formatter.context import FormatContext
from jackfield_formatter.examples import Example, Messages, Said
from jackfield_formatter.models import SCHEMA, DataModel, Values, needed, structured

#: the fields that are columns of a sample
_COLUMNS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "reward")
#: what a mapping or a function may give in the place of tokens, and whether it is needed
_TEXTS = {"prompt": True, "response": True, "tools": False, "chat_template_kwargs": False}


def _each_token(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    """Refuse a list that has not one number for each token of the response."""
    if isinstance(value, tuple) and len(value) != len(instance.response_ids):
        expected = f"{len(instance.response_ids)} numbers, one for each token of the response"
        raise refusal(f"column {field.name!r} has another length", expected, str(len(value)), where=field.name)


def _single(value: Any) -> Any:
    """Return the only number of a list as a number."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _reward(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    """Refuse a list of rewards that is neither for the response nor for each of its tokens."""
    if not isinstance(value, tuple) or len(value) != 1:
        _each_token(instance, field, value)


def _tokens(instance: Any, field: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
    if not value or min(value) < 0:
        what, found = f"column {field.name!r} has no tokens", repr(value)[:200]
        raise refusal(what, "token ids, one or more", found, where=field.name)


@attrs.frozen(kw_only=True)
class ExperienceRow(DataModel):
    """A sample with its reward, for `jackfield queue import` and ``mixing.human`` or ``mixing.expert``.

    A record has a sample's ``columns``, ``group``, ``task`` and ``tags``; the schema is a tag.
    """

    schema: ClassVar[str] = "jackfield.experience"

    prompt_ids: tuple[int, ...] = attrs.field(validator=_tokens)
    response_ids: tuple[int, ...] = attrs.field(validator=_tokens)
    #: whether a token of the response is the model's own; None: all are
    response_mask: tuple[bool, ...] | None = attrs.field(default=None, validator=_each_token)
    #: in nats, of the model that generated the response; None: not known
    rollout_log_probs: tuple[float, ...] | None = attrs.field(default=None, validator=_each_token)
    #: of the whole response, or one number for each of its tokens
    reward: float | tuple[float, ...] | None = attrs.field(default=None, converter=_single, validator=_reward)
    task: str | None = None  #: the task's id
    group: str | None = None  #: samples of one group are compared
    data_source: str = ""
    ground_truth: str = ""
    extra_info: Mapping[str, Any] = attrs.field(factory=dict)  #: further values of the task, for rewards
    tags: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def columns(cls) -> dict[str, bool]:
        """Return the columns; texts are encoded in the place of tokens."""
        return {**dict.fromkeys(super().columns(), False), **_TEXTS}

    @classmethod
    def of_example(cls, example: Example, context: FormatContext) -> list[Values]:
        """Return the texts, or the tokens that the sample has."""
        values: Values = {"task": example.id, "group": example.group, "data_source": example.data_source}
        values |= {"ground_truth": final_answer(example.ground_truth, strict=False)}
        if example.columns:
            return [{**values, **example.columns}]
        values["reward"] = example.reward
        texts: Values = {"prompt": list(example.prompt), "response": needed(example.response, "response")}
        texts |= {"tools": list(example.tools), "chat_template_kwargs": dict(example.template_options)}
        return [{**values, **texts}]

    @classmethod
    def make(cls, values: Mapping[str, Any], context: FormatContext) -> Any:
        """Return the row; texts are encoded as the chat template of the model renders them."""
        own = {name: value for name, value in values.items() if name not in _TEXTS}
        if own.get("prompt_ids") is None:
            texts = structured(_Texts, {name: values[name] for name in _TEXTS if name in values})
            ids = context.encoder.encode(texts.task())
            own |= dict(zip(("prompt_ids", "response_ids", "response_mask"), ids, strict=True))
        made = structured(cls, own)
        if made.rollout_log_probs is None and context.settings.log_probs:
            found = context.encoder.log_probs(made.prompt_ids, made.response_ids)
            made = attrs.evolve(made, rollout_log_probs=tuple(found))
        return made

    def record(self) -> Values:
        """Return a line of a queue's file."""
        columns: Values = {name: value for name in _COLUMNS if (value := getattr(self, name)) is not None}
        told = {"data_source": self.data_source, "ground_truth": self.ground_truth, "extra_info": dict(self.extra_info)}
        rewards = self.reward if isinstance(self.reward, tuple) else () if self.reward is None else (self.reward,)
        columns |= {"reward": rewards} if rewards else {}  # a list, as in samples of a run
        columns["task"] = {**told, "reward": sum(rewards) if rewards else None}
        placed = {name: value for name in ("task", "group") if (value := getattr(self, name)) is not None}
        return {"columns": columns, **placed, "tags": {**self.tags, SCHEMA: self.schema_name()}}

    @classmethod
    def schema_of(cls, record: Mapping[str, Any]) -> Any:
        """Return the tag."""
        tags = record.get("tags")
        return tags.get(SCHEMA) if isinstance(tags, Mapping) else None

    @classmethod
    def fields_of(cls, record: Values) -> Values:
        """Return the fields of a line of a queue's file."""
        columns = dict(record.get("columns") or {})
        told = {name: value for name, value in (columns.pop("task", None) or {}).items() if name != "reward"}
        tags = {name: value for name, value in record["tags"].items() if name != SCHEMA}
        placed = {name: record[name] for name in ("task", "group") if name in record}
        return {**columns, **told, **placed, "tags": tags}


@attrs.frozen(kw_only=True)
class _Texts:
    """A prompt and a response that are to be encoded."""

    prompt: str | Messages
    response: str | Messages
    tools: Messages = ()
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    def task(self) -> Task:
        asked: Said = self.prompt
        messages = ({"role": "user", "content": asked},) if isinstance(asked, str) else asked
        options = self.chat_template_kwargs
        return Task(id="", messages=messages, response=self.response, tools=self.tools, template_options=options)
