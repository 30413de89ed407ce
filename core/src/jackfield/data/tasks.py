"""Tasks, which have a prompt and its answers, and the conversion of records to tasks.

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

_ASKING = ("user", "system", "developer")  #: the last message of these roles ends the prompt
_ROLES = {*_ASKING, "assistant", "tool", "function"}
_PACKED = re.compile(r"""\s*\[\s*\{\s*(['"])\w+\1\s*:""")
_MESSAGES = "a list of messages, each with a role (a text) and content (a text, or parts)"
#: Parameters of an agent loop's ``run`` that are not fields of the task.
_RESERVED = frozenset({"self", "sampling_params"})
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
    place: str = attrs.field(default="", eq=False)  #: ``file:line``, for errors

    def agent_fields(self) -> dict[str, Any]:
        """Return keyword arguments of an agent loop's ``run``: the record's fields, overridden by the task's."""
        own = {"task_id": self.id, "data_source": self.data_source, "ground_truth": self.ground_truth}
        return {**self.fields, "messages": list(self.messages), **own}


@attrs.frozen(kw_only=True)
class TaskFormat:
    """The conversion of records to tasks. A key may be a path (``reward_model.ground_truth``)."""

    prompt_key: str | None = option(
        "question",
        "Field with the problem: a text, or a list of messages; null: response_key and rejected_key hold whole "
        "conversations, which share the prompt.",
    )
    answer_key: str | None = option("answer", "Field with the ground truth; null: tasks have none.")
    response_key: str | None = option(
        None,
        "Field with the target of supervised training: a text, or a list of messages; null: the assistant's last "
        "turn in the conversation, or answer_key.",
    )
    rejected_key: str | None = option(
        None, "Field with the rejected answer of a preference (dpo): a text, or a list of messages."
    )
    messages_key: str | None = option(
        None,
        "Field with a list of messages (role and content), instead of prompt_key. If the last message is the "
        "assistant's, its last turn is the answer and the messages before it are the prompt.",
    )
    id_key: str = option("id", "Field with the task's id; records without it get file stem and line number.")
    system: str | None = option(None, "System message that is put before the prompt.")
    prompt_template: str = option("{prompt}", "Text of the user's message; {prompt} stands for the problem.")
    data_source: str | None = option(None, "Name of the data set; null: the record's data_source, or file stem.")

    def __attrs_post_init__(self) -> None:
        if "{prompt}" not in self.prompt_template:
            details = {"where": "prompt_template", "expected": "a text with {prompt} in it"}
            raise ConfigError("the template does not contain the problem", **details, found=repr(self.prompt_template))
        if self.messages_key is not None and self.prompt_template != "{prompt}":
            fix = "remove prompt_template, or messages_key"
            raise ConfigError("a prompt template has no effect on conversations", where="prompt_template", fix=fix)

    def task(self, record: Any, default_id: str, default_source: str) -> Task:
        """Convert a parsed line to a task. The defaults are for records without an id or a data source."""
        if not isinstance(record, dict):
            raise malformed("a line is not a JSON object", "a JSON object", type(record).__name__)
        for name in _RESERVED & record.keys():
            raise malformed(f"a field has the reserved name {name!r}", "another name", name, "rename the field")
        answer = None if self.answer_key is None else _value(record, self.answer_key)
        messages, response, rejected = self._parts(record, answer)
        if rejected is not None:
            texts = [
                one[0]["content"] if isinstance(one, tuple) and len(one) == 1 else one for one in (response, rejected)
            ]
            if texts[0] == texts[1]:
                found = repr(texts[0])[:200]
                raise malformed("the two answers are the same", "two different answers", found, "leave the record out")
        number = record.get(self.id_key)
        if isinstance(number, bool) or not isinstance(number, str | int | None):
            raise malformed(f"field {self.id_key!r} is not an id", "a text or an integer", repr(number))
        head: Conversation = () if self.system is None else ({"role": "system", "content": self.system},)
        return Task(
            id=default_id if number is None or number == "" else str(number),
            messages=(*head, *messages),
            ground_truth="" if self.answer_key is None else plain_text(answer),
            data_source=str(self.data_source or record.get("data_source") or default_source),
            fields=record,
            response=response,
            rejected=rejected,
        )

    def _parts(self, record: dict[str, Any], answer: Any) -> tuple[Conversation, Answer | None, Answer | None]:
        """Return the prompt, the response and the rejected answer."""
        taught, rejected = (
            None if key is None else read_answer(_value(record, key), key)
            for key in (self.response_key, self.rejected_key)
        )
        key = self.messages_key or self.prompt_key
        if key is None:
            return implied_prompt(taught, rejected)
        value = _value(record, key)
        own: Conversation | None = None
        if self.messages_key is None and isinstance(value, str):
            prompt: Conversation = ({"role": "user", "content": self.prompt_template.replace("{prompt}", value)},)
        elif self.messages_key is None and not isinstance(value, list):
            raise malformed(f"field {key!r} is not a text", "a text, or a list of messages", type(value).__name__)
        else:
            messages = read_conversation(value, key)
            if self.prompt_template != "{prompt}":
                expected, fix = "a text, as there is a prompt_template", "remove data.format.prompt_template"
                raise malformed(f"field {key!r} is not a text", expected, "a list of messages", fix)
            prompt, own = split(messages, key)
        if own is not None and taught is not None:
            found = f"messages that end with the assistant's, and {self.response_key!r}"
            raise malformed("a record has two answers to learn from", "one answer", found)
        taught = own if taught is None else taught
        if taught is None and (isinstance(answer, str | int | float) or is_conversation(answer)):
            taught = tuple(answer) if isinstance(answer, list) else plain_text(answer)
        for each in (taught, rejected):
            check_turn(each)
        return prompt, taught, rejected


def _value(record: dict[str, Any], path: str) -> Any:
    """Return a field; a text that holds messages (JSON, or Python's notation as in CSV files of pandas) is parsed.

    A text counts as messages only if all of it is a list of objects, each with a known role and content.
    """
    value: Any = record
    for key in (path,) if path in record else path.split("."):
        if not isinstance(value, dict) or key not in value:
            fields = ", ".join(repr(name) for name in record) or "no fields"
            raise malformed(f"field {path!r} is missing", f"a field {path!r}", fields, _MISSING)
        value = value[key]
    if not isinstance(value, str) or not _PACKED.match(value):
        return value
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = parse(value.strip())
            roles = [message.get("role") for message in found] if is_conversation(found) else [None]
            return found if set(roles) <= _ROLES else value
    return value


def read_conversation(value: Any, key: str, expected: str = _MESSAGES) -> Conversation:
    """Check and return a list of messages."""
    if not is_conversation(value):
        raise malformed(f"field {key!r} is not a conversation", expected, repr(value)[:200])
    return tuple(value)


def read_answer(value: Any, key: str) -> Answer:
    """Check and return a target answer: a text, a number (as its JSON text) or a list of messages."""
    if isinstance(value, str | int | float):
        return plain_text(value)
    return read_conversation(value, key, f"a text, or {_MESSAGES}")


def check_turn(answer: Answer | None) -> None:
    """Refuse messages that do not begin and end with the assistant."""
    roles = [message["role"] for message in answer] if isinstance(answer, tuple) else ["assistant"]
    if roles[:1] != ["assistant"] or roles[-1:] != ["assistant"]:
        raise malformed(
            "the messages of an answer do not begin and end with the assistant's",
            "messages from the assistant's first to its last; the prompt is apart",
            f"the roles {', '.join(roles) or '(none)'}",
            "where the answer repeats the whole conversation, set data.format.prompt_key to null",
        )


def split(messages: Conversation, key: str) -> tuple[Conversation, Conversation | None]:
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
        raise malformed(f"the conversation {key!r} has no prompt", "a message before the assistant's", found)
    return messages[:first], messages[first:]


def implied_prompt(
    answer: Answer | None, rejected: Answer | None
) -> tuple[Conversation, Conversation, Conversation | None]:
    """Return prompt and answers of whole conversations. Two conversations share the prompt as their beginning."""
    if not isinstance(answer, tuple) or isinstance(rejected, str):
        expected = "whole conversations, as lists of messages, as data.format.prompt_key is null"
        fix = "name the prompt's field as data.format.prompt_key"
        raise malformed("the answers do not hold the prompt", expected, "a text", fix)
    if rejected is None:
        prompt, own = split(answer, "response_key")
        check_turn(own or ())
        return prompt, own or (), None
    shared = next((n for n, pair in enumerate(zip(answer, rejected, strict=False)) if pair[0] != pair[1]), 0)
    if not shared:
        found = "the same conversation twice" if answer == rejected else "nothing in common at the beginning"
        expected = "messages that both share, then two answers"
        raise malformed("the two conversations imply no prompt", expected, found)
    for each in (answer[shared:], rejected[shared:]):
        check_turn(each)
    return answer[:shared], answer[shared:], rejected[shared:]


def plain_text(value: Any) -> str:
    """Return a text unchanged, a conversation as its last message's content, and anything else as JSON."""
    if is_conversation(value):
        value = value[-1].get("content")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of at least one message."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and (isinstance(message.get("content"), str | list) or message.get("tool_calls"))
            for message in value
        )
    )


def malformed(message: str, expected: str, found: str, fix: str = "correct the line, or leave it out") -> DataError:
    """Return the error of an invalid record; :func:`naming` adds its place."""
    return DataError(message, code="data.malformed", expected=expected, found=found, fix=fix)


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Add the place of a record, ``file:line``, to an error that the block raises."""
    try:
        yield
    except DataError as error:
        error.where = place if error.where is None else f"{place} ({error.where})"
        raise
