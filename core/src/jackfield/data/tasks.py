"""Tasks: what a model is asked, what is right, and in which order tasks come.

A :class:`TaskSet` reads JSONL files, in GSM8K's own format by default. It keeps byte offsets, not text, so that a file
may be larger than memory. A :class:`SeededOrder` is an endless shuffled walk over task numbers whose only state is a
position.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from jackfield.data.sources import JsonLines, Records, Source, malformed, names
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

    def task(self, record: Any, *, where: str, default_id: str, default_source: str) -> Task:
        """Make a task of one record.

        Args:
            record: a parsed line.
            where: its place, for errors.
            default_id: the id of a record without one.
            default_source: the data source of a record without one.

        Raises:
            DataError: ``data.malformed``, with what is missing.
        """
        if not isinstance(record, dict):
            raise malformed("a line is not a JSON object", where, "a JSON object", type(record).__name__)
        for name in _RESERVED & record.keys():
            raise malformed(f"a field has the reserved name {name!r}", where, "another name", name, "rename the field")
        answer = None if self.answer_key is None else unpacked(_lookup(record, self.answer_key, where))
        messages, response, rejected = self._parts(record, answer, where)
        if rejected is not None:
            check_preference(response, rejected, where)
        source = self.data_source or record.get("data_source") or default_source
        return Task(
            id=_record_id(record, self.id_key, where) or default_id,
            messages=messages,
            ground_truth="" if self.answer_key is None else plain_text(answer),
            data_source=str(source),
            fields=record,
            response=response,
            rejected=rejected,
            place=where,
        )

    def _parts(
        self, record: dict[str, Any], answer: Any, where: str
    ) -> tuple[Conversation, Answer | None, Answer | None]:
        """The prompt, what is taught, and what is ranked below it."""
        taught, rejected = (
            None if key is None else read_answer(unpacked(_lookup(record, key, where)), key, where)
            for key in (self.response_key, self.rejected_key)
        )
        head: Conversation = () if self.system is None else ({"role": "system", "content": self.system},)
        if self.prompt_key is None and self.messages_key is None:
            prompt, taught, rejected = implied_prompt(taught, rejected, where)
            return (*head, *prompt), taught, rejected
        prompt, own = self._prompt(record, where)
        if own is not None and taught is not None:
            found = f"messages that end with the assistant's, and {self.response_key!r}"
            raise malformed("a record has two answers to learn from", where, "one answer", found)
        taught = own if taught is None else taught
        if taught is None and (isinstance(answer, str | int | float) or is_conversation(answer)):
            taught = tuple(answer) if isinstance(answer, list) else plain_text(answer)
        for each in (taught, rejected):
            check_turn(each, where)
        return (*head, *prompt), taught, rejected

    def _prompt(self, record: dict[str, Any], where: str) -> tuple[Conversation, Conversation | None]:
        """The prompt's messages, and those of the answer where the assistant has the last word."""
        key = self.messages_key or self.prompt_key
        assert key is not None
        value = unpacked(_lookup(record, key, where))
        if self.messages_key is None and isinstance(value, str):
            return ({"role": "user", "content": self.prompt_template.replace("{prompt}", value)},), None
        if self.messages_key is None and not isinstance(value, list):
            expected = "a text, or a list of messages"
            raise malformed(f"field {key!r} is not a text", where, expected, type(value).__name__)
        messages = read_conversation(value, key, where)
        if self.prompt_template != "{prompt}":
            expected, fix = "a text, as there is a prompt_template", "remove data.format.prompt_template"
            raise malformed(f"field {key!r} is not a text", where, expected, "a list of messages", fix)
        return split(messages, key, where)


class TaskSet(Sequence[Task]):
    """Tasks of one or several files, by number.

    Files stay open and are read where needed; lines may be blank. A number is stable as long as the files are:
    :attr:`digest` tells.
    """

    def __init__(
        self, sources: Sequence[Source], task_format: TaskFormat, limit: int | None = None, answers: bool = False
    ) -> None:
        self._sources = sources
        self.answers = answers  #: whether each task has an answer to learn from
        self._format = task_format
        self._starts = [0]
        for source in sources:
            self._starts.append(self._starts[-1] + len(source))
        self._length = self._starts[-1] if limit is None else min(limit, self._starts[-1])

    @classmethod
    def load(
        cls,
        files: str | Path | Sequence[str | Path],
        task_format: TaskFormat | None = None,
        *,
        limit: int | None = None,
        answers: bool = False,
    ) -> TaskSet:
        """Open JSONL files.

        Args:
            files: one or several paths; their tasks follow one another.
            task_format: how records become tasks; GSM8K's format by default.
            limit: use the first so many tasks only.
            answers: refuse a record without an answer to learn from.

        Raises:
            DataError: ``data.missing``, ``data.empty``, ``data.malformed`` (lines in the first 64 MiB of each
                file are checked here, ids among them for doubles; later lines when they are used).
        """
        paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
        sources = [JsonLines(path, name) for path, name in zip(paths, names(paths), strict=True)]
        tasks = cls(sources, task_format or TaskFormat(), limit, answers)
        tasks._check(", ".join(map(str, paths)))
        return tasks

    @classmethod
    def from_records(
        cls, records: Iterable[Any], task_format: TaskFormat | None = None, *, name: str = "records"
    ) -> TaskSet:
        """Make a set of records in memory; ids are ``name:1`` and so on."""
        tasks = cls([Records(list(records), name)], task_format or TaskFormat())
        tasks._check(name)
        return tasks

    @property
    def digest(self) -> str:
        """xxh3_128 over all records' bytes: what a resumed run compares."""
        return xxhash.xxh3_128_hexdigest("".join(source.digest for source in self._sources).encode())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: Any) -> Any:
        """One task by number, or a list of them by a slice."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._length))]
        position = number + self._length if number < 0 else number
        if not 0 <= position < self._length:
            raise IndexError(f"task {number} of {self._length}")
        source, index = self._find(position)
        line = source.line(index)
        where = f"{source.place}:{line}"
        record = source.record(index)
        task = self._format.task(record, where=where, default_id=f"{source.name}:{line}", default_source=source.name)
        if self.answers and task.response is None:
            raise malformed(
                "a record has no answer to learn from",
                where,
                "a text or messages in data.format.response_key, or a conversation that ends with the assistant",
                f"a prompt that ends with the role {task.messages[-1]['role']!r}, and no answer to it",
                "correct the line, or name the right fields in data.format",
            )
        return task

    def checked(self) -> Iterator[int]:
        """The numbers of the tasks that were checked when the files were opened."""
        for source, start in zip(self._sources, self._starts, strict=False):
            yield from range(start, min(start + source.checked, self._length))

    def place(self, number: int) -> str:
        """Where a task stands: ``file:line``."""
        source, index = self._find(number)
        return f"{source.place}:{source.line(index)}"

    def _find(self, number: int) -> tuple[Source, int]:
        index = next(index for index, end in enumerate(self._starts[1:]) if number < end)
        return self._sources[index], number - self._starts[index]

    def _check(self, where: str) -> None:
        if not self._length:
            raise DataError("there are no tasks", code="data.empty", where=where, expected="one JSON object per line")
        seen: dict[str, int] = {}
        for number in self.checked():
            name = self[number].id
            if name in seen:
                found = f"{name!r}, as in {self.place(seen[name])}"
                raise malformed("two tasks have one id", self.place(number), "unique ids", found)
            seen[name] = number


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

    def epoch(self, position: int) -> int:
        """The epoch that a position belongs to, from 0."""
        return position // self.size

    def walk(self, position: int = 0) -> Iterator[int]:
        """Numbers from a position on, without end."""
        while True:
            yield self.index(position)
            position += 1

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


def _lookup(record: dict[str, Any], path: str, where: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            fields = ", ".join(repr(name) for name in record) or "no fields"
            raise malformed(f"field {path!r} is missing", where, f"a field {path!r}", fields, _MISSING)
        value = value[key]
    return value


def _record_id(record: dict[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise malformed(f"field {key!r} is not an id", where, "a text or an integer", repr(value))
    return str(value)
