"""Tasks: what a model is asked, what is right, and in which order tasks come.

A :class:`TaskSet` reads a JSONL file, in GSM8K's own format by default. It keeps byte offsets, not text, so that a file
may be larger than memory. A :class:`SeededOrder` is an endless shuffled walk over task numbers whose only state is a
position.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.data.conversations import (
    Answer,
    Conversation,
    check_preference,
    check_turn,
    implied_prompt,
    is_conversation,
    plain_text,
    read_answer,
    read_conversation,
    split,
    unpacked,
)
from jackfield.data.sources import JsonLines, malformed, naming
from jackfield.errors import ConfigError, DataError
from jackfield.settings import option

#: Parameters of an agent loop's ``run`` beside the fields.
_RESERVED = frozenset({"self", "sampling_params"})
_MISSING = "name the right keys of the records in data.format; null where they have none"


@attrs.frozen(kw_only=True)
class Task:
    """One problem: what the model is asked, and what is right."""

    id: str  #: unique in its set and stable: the record's own, or the file's stem and the line number
    messages: tuple[Mapping[str, Any], ...]  #: role and content each; what the model is asked
    ground_truth: str = ""
    data_source: str = ""  #: the name by which rewards and metrics tell data sets apart
    fields: Mapping[str, Any] = attrs.field(factory=dict)  #: the whole record: JSON values only
    response: Answer | None = None  #: what supervised training teaches: a text, or messages after the prompt's
    rejected: Answer | None = None  #: what a preference ranks below the response
    place: str = attrs.field(default="", eq=False)  #: for errors: ``file:line``

    @property
    def digest(self) -> str:
        """xxh3_128 of the content, the id left out: the same text has the same digest in any file."""
        content = [list(self.messages), self.ground_truth, self.data_source, self.response]
        content += [] if self.rejected is None else [self.rejected]
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, ensure_ascii=False).encode())

    def agent_fields(self) -> dict[str, Any]:
        """Keywords for an agent loop's ``run``: the record, and the task's own ``messages``, ``task_id``,
        ``data_source`` and ``ground_truth``, which win over fields of these names.
        """
        return {
            **self.fields,
            "messages": list(self.messages),
            "task_id": self.id,
            "data_source": self.data_source,
            "ground_truth": self.ground_truth,
        }


@attrs.frozen(kw_only=True)
class TaskFormat:
    """How a record becomes a task. A key may be a path (``reward_model.ground_truth``)."""

    prompt_key: str | None = option(
        "question",
        help="Field with the problem: a text, or a list of messages; null: response_key and rejected_key hold whole "
        "conversations, which share the prompt.",
    )
    answer_key: str | None = option("answer", help="Field with the ground truth; null: tasks have none.")
    response_key: str | None = option(
        None,
        help="Field with what supervised training teaches: a text, or a list of messages; null: the assistant's last "
        "turn in the conversation, or answer_key.",
    )
    rejected_key: str | None = option(
        None, help="Field with what a preference ranks below it (dpo): a text, or a list of messages."
    )
    messages_key: str | None = option(
        None,
        help="Field with a list of messages (role and content), in the place of prompt_key. Where the assistant has "
        "the last word, its last turn is the answer and what is before it the prompt.",
    )
    id_key: str = option("id", help="Field with the task's id; records without it get file stem and line number.")
    system: str | None = option(None, help="A system message to put in front.")
    prompt_template: str = option("{prompt}", help="Text of the user's message; {prompt} stands for the problem.")
    data_source: str | None = option(None, help="Name of the data set; null: the record's data_source, or file stem.")

    def __attrs_post_init__(self) -> None:
        if "{prompt}" not in self.prompt_template:
            raise ConfigError(
                "the prompt template does not contain the problem",
                where="prompt_template",
                expected="a text with {prompt} in it",
                found=repr(self.prompt_template),
            )
        if self.messages_key is not None and self.prompt_template != "{prompt}":
            raise ConfigError(
                "a prompt template has no effect on whole conversations",
                where="prompt_template",
                fix="remove prompt_template, or messages_key",
            )

    def task(self, record: Any, default_id: str, default_source: str) -> Task:
        """Make a task of a parsed line.

        Args:
            record: with the fields that this format names.
            default_id: the id of a record without one.
            default_source: the data source of a record without one.

        Raises:
            DataError: ``data.malformed``, with what is missing.
        """
        if not isinstance(record, dict):
            raise malformed("a line is not a JSON object", "a JSON object", type(record).__name__)
        for name in _RESERVED & record.keys():
            raise malformed(f"a field has the reserved name {name!r}", "another name", name, "rename the field")
        answer = None if self.answer_key is None else unpacked(_lookup(record, self.answer_key))
        messages, response, rejected = self._parts(record, answer)
        if rejected is not None:
            check_preference(response, rejected)
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
        """The prompt, what is taught, and what is ranked below it."""
        taught, rejected = (
            None if key is None else read_answer(unpacked(_lookup(record, key)), key)
            for key in (self.response_key, self.rejected_key)
        )
        if self.prompt_key is None and self.messages_key is None:
            return implied_prompt(taught, rejected)
        prompt, own = self._prompt(record)
        if own is not None and taught is not None:
            found = f"messages that end with the assistant's, and {self.response_key!r}"
            raise malformed("a record has two answers to learn from", "one answer", found)
        taught = own if taught is None else taught
        if taught is None and (isinstance(answer, str | int | float) or is_conversation(answer)):
            taught = tuple(answer) if isinstance(answer, list) else plain_text(answer)
        for each in (taught, rejected):
            check_turn(each)
        return prompt, taught, rejected

    def _prompt(self, record: dict[str, Any]) -> tuple[Conversation, Conversation | None]:
        """The prompt's messages, and those of the answer where the assistant has the last word."""
        key = self.messages_key or self.prompt_key
        assert key is not None
        value = unpacked(_lookup(record, key))
        if self.messages_key is None and isinstance(value, str):
            return ({"role": "user", "content": self.prompt_template.replace("{prompt}", value)},), None
        if self.messages_key is None and not isinstance(value, list):
            raise malformed(f"field {key!r} is not a text", "a text, or a list of messages", type(value).__name__)
        messages = read_conversation(value, key)
        if self.prompt_template != "{prompt}":
            expected, fix = "a text, as there is a prompt_template", "remove data.format.prompt_template"
            raise malformed(f"field {key!r} is not a text", expected, "a list of messages", fix)
        return split(messages, key)


class TaskSet(Sequence[Task]):
    """The tasks of a file, by number.

    The file stays open and is read where needed. A number is stable as long as the file is: :attr:`digest` tells.

    Args:
        file: a JSONL file.
        task_format: how records become tasks; GSM8K's format by default.
        limit: use the first so many tasks only.
        answers: refuse a record without an answer to learn from.

    Raises:
        DataError: ``data.missing``, ``data.empty``, ``data.malformed`` (lines in the first 64 MiB of the file are
            checked here, ids among them for doubles; later lines when they are used).
    """

    def __init__(
        self,
        file: str | Path,
        task_format: TaskFormat | None = None,
        *,
        limit: int | None = None,
        answers: bool = False,
    ) -> None:
        self.answers = answers  #: whether each task has an answer to learn from
        self._source, self._format = JsonLines(Path(file)), task_format or TaskFormat()
        self._length = len(self._source) if limit is None else min(limit, len(self._source))
        #: the numbers of the tasks that were checked when the file was opened
        self.checked = range(min(self._source.checked, self._length))
        if not self._length:
            raise DataError(
                "there are no tasks", code="data.empty", where=str(file), expected="one JSON object per line"
            )
        seen: dict[str, str] = {}
        for task in map(self.__getitem__, self.checked):
            if task.id in seen:
                with naming(task.place):
                    raise malformed("two tasks have one id", "unique ids", f"{task.id!r}, as in {seen[task.id]}")
            seen[task.id] = task.place

    @property
    def digest(self) -> str:
        """xxh3_128 over the file's digest: what a resumed run compares."""
        return xxhash.xxh3_128_hexdigest(self._source.digest.encode())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: Any) -> Any:
        """One task by number, or a list of them by a slice."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._length))]
        index = number + self._length if number < 0 else number
        if not 0 <= index < self._length:
            raise IndexError(f"task {number} of {self._length}")
        line, stem = self._source.line(index), self._source.path.stem
        place = f"{self._source.path}:{line}"
        with naming(place):
            task = attrs.evolve(self._format.task(self._source.record(index), f"{stem}:{line}", stem), place=place)
            if self.answers and task.response is None:
                raise malformed(
                    "a record has no answer to learn from",
                    "a text or messages in data.format.response_key, or a conversation that ends with the assistant",
                    f"a prompt that ends with the role {task.messages[-1]['role']!r}, and no answer to it",
                    "correct the line, or name the right fields in data.format",
                )
        return task


@attrs.frozen
class SeededOrder:
    """An endless walk over the numbers 0 … size-1: each epoch is another permutation, fixed by seed and epoch.

    The state of a walk is its position, and any position costs the same: a Feistel network with modular addition
    permutes the numbers (format-preserving encryption; Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002), so that no permutation is ever stored. The end of one epoch may name a number that the next begins with:
    within a batch, tell samples apart by position, not by task.
    """

    size: int = attrs.field(validator=attrs.validators.ge(1))
    seed: int = 0
    shuffle: bool = attrs.field(default=True, kw_only=True)  #: False: every epoch is 0, 1, 2, …

    def index(self, position: int) -> int:
        """The number at a position of the walk; positions count from 0 through all epochs."""
        if position < 0:
            raise IndexError(f"position {position} is before the beginning")
        epoch, place = divmod(position, self.size)
        return self._permute(place, epoch) if self.shuffle else place

    def _permute(self, place: int, epoch: int) -> int:
        rows = math.isqrt(self.size - 1) + 1
        columns = -(-self.size // rows)
        key = xxhash.xxh3_64_intdigest(f"{self.seed}:{epoch}".encode())
        while True:  # the network permutes rows x columns >= size numbers: walk until inside again
            left, right = divmod(place, columns)
            for turn in range(0, 8, 2):
                left = (left + _mix(key, turn, right)) % rows
                right = (right + _mix(key, turn + 1, left)) % columns
            place = left * columns + right
            if place < self.size:
                return place


def _mix(key: int, turn: int, value: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", turn, value), seed=key)


def _lookup(record: dict[str, Any], path: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            fields = ", ".join(repr(name) for name in record) or "no fields"
            raise malformed(f"field {path!r} is missing", f"a field {path!r}", fields, _MISSING)
        value = value[key]
    return value
