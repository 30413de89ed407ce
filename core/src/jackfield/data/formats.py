"""Tasks, and their conversion from records.

A record has texts or conversations (lists of messages) as prompt and answers. Invalid records raise
``data.malformed``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import attrs

from jackfield.errors import ConfigError, DataError
from jackfield.settings import option

Conversation: TypeAlias = tuple[Mapping[str, Any], ...]  #: messages, each with a role and content
Answer: TypeAlias = str | Conversation  #: a text, or the messages that follow the prompt

AUTO = "auto"  #: a key that is recognised from the records, or else has the value of GSM8K's records
KEYS = {"prompt_key": "question", "answer_key": "answer", "response_key": None, "rejected_key": None}
KEYS |= {"messages_key": None}  #: the keys that say what records are, with their values for GSM8K
ROW = "_row"  #: the field with the key of a row that has passed a pipeline
OPTIONS = "chat_template_kwargs"  #: a record's variables of the chat template, by TRL's name
_ASKING = ("user", "system", "developer")  #: the last message of these roles ends the prompt
_ROLES = {*_ASKING, "assistant", "tool", "function"}
_PACKED = re.compile(r"""\s*\[\s*\{\s*(['"])\w+\1\s*:""")
_MESSAGES = "a list of messages, each with a role (a text) and content (a text, or parts)"
#: Parameters of an agent loop's ``run`` that are not fields of the task.
_RESERVED = frozenset({"self", "sampling_params"})
_CORRECT = "correct the line, or leave it out"
_MISSING = "name the right keys of the records in data.format; null where they have none"


@attrs.frozen(kw_only=True)
class Task:
    """One problem with its prompt and, if known, its answers."""

    id: str  #: unique in its set and stable: the record's id, or the file's stem and the line number
    messages: tuple[Mapping[str, Any], ...]  #: the prompt, messages with role and content
    ground_truth: str = ""
    data_source: str = ""  #: name of the data set for rewards and metrics
    fields: Mapping[str, Any] = attrs.field(factory=dict)  #: the whole record, with JSON values only
    response: Answer | None = None  #: target of supervised training: a text, or messages after the prompt
    rejected: Answer | None = None  #: the answer that a preference ranks below the response
    tools: tuple[Mapping[str, Any], ...] = ()  #: schemas in OpenAI's form, which the chat template shows
    template_options: Mapping[str, Any] = attrs.field(factory=dict)  #: variables of the chat template
    #: prompt, and tokens and mask of each answer, of tasks that were made from an archive instead of texts
    tokens: tuple[list[int], list[tuple[list[int], list[int]]]] | None = None
    place: str = attrs.field(default="", eq=False)  #: ``file:line``, for errors

    def agent_fields(self) -> dict[str, Any]:
        """Return keyword arguments of an agent loop's ``run``: the record's fields, overridden by the task's."""
        own = {"task_id": self.id, "data_source": self.data_source, "ground_truth": self.ground_truth}
        return {**self.fields, "messages": list(self.messages), **own}


@attrs.frozen(kw_only=True)
class TaskFormat:
    """The conversion of records to tasks. A key may be a path (``reward_model.ground_truth``)."""

    prompt_key: str | None = option(
        AUTO,
        "Field with the problem: a text, or a list of messages; null: response_key and rejected_key hold whole "
        "conversations, which share the prompt. auto: recognised if no key is given; else question.",
    )
    answer_key: str | None = option(AUTO, "Field with the ground truth; null: none; auto: recognised, or answer.")
    response_key: str | None = option(
        AUTO,
        "Field with the target of supervised training: a text, or a list of messages; null: the assistant's last "
        "turn in the conversation, or answer_key; auto: recognised, or null.",
    )
    rejected_key: str | None = option(
        AUTO, "Field with the rejected answer of a preference (dpo), as response_key; auto: recognised, or null."
    )
    messages_key: str | None = option(
        AUTO,
        "Field with a list of messages (role and content), instead of prompt_key. If the last message is the "
        "assistant's, its last turn is the answer, the messages before it the prompt. auto: recognised, or null.",
    )
    tools_key: str | None = option(
        None, "Field with schemas of tools for the chat template, a list or its JSON text; null: recognised, or none."
    )
    id_key: str = option("id", "Field with the task's id; records without it get file stem and line number.")
    system: str | None = option(None, "System message that is put before the prompt.")
    prompt_template: str = option("{prompt}", "Text of the user's message; {prompt} stands for the problem.")
    data_source: str | None = option(None, "Name of the data set; null: the record's data_source, or file stem.")

    def __attrs_post_init__(self) -> None:
        if "{prompt}" not in self.prompt_template:
            details = {"where": "prompt_template", "expected": "a text with {prompt} in it"}
            raise ConfigError("the template does not contain the problem", **details, found=repr(self.prompt_template))
        if self.messages_key not in (None, AUTO) and self.prompt_template != "{prompt}":
            fix = "remove prompt_template, or messages_key"
            raise ConfigError("a prompt template has no effect on conversations", where="prompt_template", fix=fix)

    @property
    def is_given(self) -> bool:
        """Return whether a key says what the records are, so that they are not looked at."""
        return any(getattr(self, name) != AUTO for name in KEYS)

    def resolved(self) -> TaskFormat:
        """Return the format with the keys of GSM8K's records in the place of those that are not given."""
        missing: dict[str, Any] = {name: key for name, key in KEYS.items() if getattr(self, name) == AUTO}
        return attrs.evolve(self, **missing) if missing else self

    def task(self, record: Any, default_id: str, default_source: str) -> Task:
        """Convert a parsed line to a task. The defaults are for records without an id or a data source."""
        if (form := self.resolved()) is not self:
            return form.task(record, default_id, default_source)
        if not isinstance(record, dict):
            raise refusal("a line is not a JSON object", "a JSON object", type(record).__name__)
        for name in _RESERVED & record.keys():
            raise refusal(f"a field has the reserved name {name!r}", "another name", name, "rename the field")
        if "answers" in record and "prompt_ids" in record:  # jackfield_archive.write_tasks
            answers = [(ids, mask) for ids, mask in record["answers"]]
            return Task(id=record["id"], messages=(), response="", tokens=(record["prompt_ids"], answers))
        answer = None if self.answer_key is None else _value(record, self.answer_key)
        messages, response, rejected = self._parts(record, answer)
        number = record.get(self.id_key)
        if isinstance(number, bool) or not isinstance(number, str | int | None):
            raise refusal(f"field {self.id_key!r} is not an id", "a text or an integer", repr(number))
        head: Conversation = () if self.system is None else ({"role": "system", "content": self.system},)
        return Task(
            id=str(record.get(ROW) or default_id) if number is None or number == "" else str(number),
            messages=(*head, *messages),
            ground_truth="" if self.answer_key is None else plain_text(answer),
            data_source=str(self.data_source or record.get("data_source") or default_source),
            fields=record,
            response=response,
            rejected=rejected,
            tools=tuple(_json_of(record, self.tools_key, list)),
            template_options=_json_of(record, OPTIONS, dict),
        )

    def _parts(self, record: dict[str, Any], answer: Any) -> tuple[Conversation, Answer | None, Answer | None]:
        """Return the prompt, the response and the rejected answer."""
        taught, rejected = (_answer(record, key) for key in (self.response_key, self.rejected_key))
        key, own = self.messages_key or self.prompt_key, None
        value = None if key is None else _value(record, key)
        if key is None:
            prompt, taught, rejected = _implied_prompt(taught, rejected)
        elif self.messages_key is None and isinstance(value, str):
            prompt = ({"role": "user", "content": self.prompt_template.replace("{prompt}", value)},)
        elif self.messages_key is None and not isinstance(value, list):
            raise refusal(f"field {key!r} is not a text", "a text, or a list of messages", type(value).__name__)
        else:
            messages = _conversation(value, key)
            if self.prompt_template != "{prompt}":
                expected, fix = "a text, as there is a prompt_template", "remove data.format.prompt_template"
                raise refusal(f"field {key!r} is not a text", expected, "a list of messages", fix)
            prompt, own = _split(messages, key)
        if own is not None and taught is not None:
            found = f"messages that end with the assistant's, and {self.response_key!r}"
            raise refusal("a record has two answers to learn from", "one answer", found)
        taught = own if taught is None else taught
        if taught is None and (isinstance(answer, str | int | float) or is_conversation(answer)):
            taught = tuple(answer) if isinstance(answer, list) else plain_text(answer)
        for roles in ([message["role"] for message in one] for one in (taught, rejected) if isinstance(one, tuple)):
            if roles[:1] != ["assistant"] or roles[-1:] != ["assistant"]:
                message = "the messages of an answer do not begin and end with the assistant's"
                expected = "messages from the assistant's first to its last; the prompt is apart"
                fix = "where the answer repeats the whole conversation, set data.format.prompt_key to null"
                raise refusal(message, expected, f"the roles {', '.join(roles) or '(none)'}", fix)
        pair = [one[0]["content"] if isinstance(one, tuple) and len(one) == 1 else one for one in (taught, rejected)]
        if rejected is not None and pair[0] == pair[1]:
            found, fix = repr(pair[0])[:200], "leave the record out"
            raise refusal("the two answers are the same", "two different answers", found, fix)
        return prompt, taught, rejected


def _value(record: dict[str, Any], path: str) -> Any:
    """Return a field; a text that holds messages (JSON, or Python's notation as in CSV files of pandas) is parsed.

    A text counts as messages only if all of it is a list of objects, each with a known role and content.
    """
    value: Any = record
    for key in (path,) if path in record else path.split("."):
        if not isinstance(value, dict) or key not in value:
            fields = ", ".join(repr(name) for name in record) or "no fields"
            raise refusal(f"field {path!r} is missing", f"a field {path!r}", fields, _MISSING)
        value = value[key]
    if not isinstance(value, str) or not _PACKED.match(value):
        return value
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = parse(value.strip())
            roles = [message.get("role") for message in found] if is_conversation(found) else [None]
            return found if set(roles) <= _ROLES else value
    return value


def _json_of(record: dict[str, Any], key: str | None, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """Return a list of objects, or an object, of a field that may be missing, empty, or JSON text."""
    value: Any = record.get(key or "") or kind()
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, kind) or (kind is list and not all(isinstance(each, dict) for each in value)):
        expected = "an object" if kind is dict else "a list of schemas of tools, or its JSON text"
        raise refusal(f"field {key!r} cannot be used", expected, repr(value)[:200])
    return value


def _conversation(value: Any, key: str, expected: str = _MESSAGES) -> Conversation:
    if not is_conversation(value):
        raise refusal(f"field {key!r} is not a conversation", expected, repr(value)[:200])
    return tuple(value)


def _answer(record: dict[str, Any], key: str | None) -> Answer | None:
    """Return a target answer: a text, a number (as its JSON text) or a list of messages; None without a key."""
    value = None if key is None else _value(record, key)
    if isinstance(value, str | int | float):
        return plain_text(value)
    return None if key is None else _conversation(value, key, f"a text, or {_MESSAGES}")


def _split(messages: Conversation, key: str) -> tuple[Conversation, Conversation | None]:
    """Split a conversation into prompt and answer; None if the last message is not the assistant's.

    The answer is the last turn: the messages after the last one of a user (or system), from the assistant's first
    message on, including tool calls and their results. A conversation without a prompt is refused.
    """
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        return messages, None
    asked = max((index for index, role in enumerate(roles) if role in _ASKING), default=-1)
    first = roles.index("assistant", asked + 1)
    if not first:
        found = f"the roles {', '.join(roles)}"
        raise refusal(f"the conversation {key!r} has no prompt", "a message before the assistant's", found)
    return messages[:first], messages[first:]


def _implied_prompt(
    answer: Answer | None, rejected: Answer | None
) -> tuple[Conversation, Conversation, Conversation | None]:
    """Return prompt and answers of whole conversations. Two conversations share the prompt as their beginning."""
    if not isinstance(answer, tuple) or isinstance(rejected, str):
        expected = "whole conversations, as lists of messages, as data.format.prompt_key is null"
        fix = "name the prompt's field as data.format.prompt_key"
        raise refusal("the answers do not hold the prompt", expected, "a text", fix)
    if rejected is None:
        prompt, own = _split(answer, "response_key")
        return prompt, own or (), None
    shared = next((n for n, pair in enumerate(zip(answer, rejected, strict=False)) if pair[0] != pair[1]), 0)
    if not shared:
        found = "the same conversation twice" if answer == rejected else "nothing in common at the beginning"
        expected = "messages that both share, then two answers"
        raise refusal("the two conversations imply no prompt", expected, found)
    return answer[:shared], answer[shared:], rejected[shared:]


def plain_text(value: Any) -> str:
    """Return a text unchanged, a conversation as its last message's content, and anything else as JSON."""
    if is_conversation(value):
        value = value[-1].get("content")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of at least one message."""
    if not (isinstance(value, list) and value and all(isinstance(message, dict) for message in value)):
        return False
    spoken = (isinstance(message.get("content"), str | list) or message.get("tool_calls") for message in value)
    return all(spoken) and all(isinstance(message.get("role"), str) for message in value)


def refusal(
    message: str, expected: str | None, found: str, fix: str = _CORRECT, code: str | None = None, where: object = None
) -> DataError:
    """Return an error of the data, by default of an invalid record, whose place :func:`naming` adds."""
    return DataError(message, code=code, where=where, expected=expected, found=found, fix=fix)


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Add the place of a record, ``file:line``, to an error that the block raises."""
    try:
        yield
    except DataError as error:
        error.where = place if error.where is None else f"{place} ({error.where})"
        raise
