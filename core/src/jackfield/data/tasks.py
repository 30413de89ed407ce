"""Tasks: what a model is asked, what is right, and in which order tasks come.

A :class:`TaskSet` reads JSONL files, in GSM8K's own format by default. It keeps byte offsets, not text, so that a file
may be larger than memory. A :class:`SeededOrder` is an endless shuffled walk over task numbers whose only state is a
position.
"""

from __future__ import annotations

import array
import json
import math
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.errors import ConfigError, DataError
from jackfield.structuring import option

__all__ = ["SeededOrder", "Task", "TaskFormat", "TaskSet"]

#: Lines in the first so many bytes of a file are parsed when the file is opened, later ones when they are used.
CHECKED_BYTES = 64 * 2**20
#: Parameters of an agent loop's ``run`` beside the fields.
_RESERVED = frozenset({"self", "sampling_params"})


@attrs.frozen(kw_only=True)
class Task:
    """One problem."""

    id: str  #: unique in its set and stable: the record's own, or the file's stem and the line number
    messages: tuple[Mapping[str, Any], ...]  #: role and content each; what the model is asked
    ground_truth: str = ""
    data_source: str = ""  #: the name by which rewards and metrics tell data sets apart
    fields: Mapping[str, Any] = attrs.field(factory=dict)  #: the whole record: JSON values only
    response: str | None = None  #: the text that supervised training teaches
    rejected: str | None = None  #: the text that a preference ranks below the response

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

    prompt_key: str = option("question", help="Field with the problem's text.")
    answer_key: str | None = option("answer", help="Field with the ground truth; null: tasks have none.")
    response_key: str | None = option(None, help="Field with the text that supervised training teaches; null: answer.")
    rejected_key: str | None = option(None, help="Field with the text that a preference ranks below it (dpo).")
    messages_key: str | None = option(None, help="Field with a list of role and content, in the place of prompt_key.")
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
            raise _malformed("a line is not a JSON object", where, "a JSON object", type(record).__name__)
        for name in _RESERVED & record.keys():
            raise _malformed(f"a field has the reserved name {name!r}", where, "another name", name, "rename the field")
        ground_truth = "" if self.answer_key is None else _plain_text(_lookup(record, self.answer_key, where))
        source = self.data_source or record.get("data_source") or default_source
        return Task(
            id=_record_id(record, self.id_key, where) or default_id,
            messages=self._messages(record, where),
            ground_truth=ground_truth,
            data_source=str(source),
            fields=record,
            response=self._response(record, ground_truth, where),
            rejected=None if self.rejected_key is None else _plain_text(_lookup(record, self.rejected_key, where)),
        )

    def _messages(self, record: dict[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
        head = () if self.system is None else ({"role": "system", "content": self.system},)
        if self.messages_key is not None:
            return (*head, *_conversation(_lookup(record, self.messages_key, where), self.messages_key, where))
        prompt = _lookup(record, self.prompt_key, where)
        if not isinstance(prompt, str):
            raise _malformed(
                f"field {self.prompt_key!r} is not a text",
                where,
                "a text",
                f"{type(prompt).__name__}",
                fix="name a field with a list of messages as messages_key" if isinstance(prompt, list) else None,
            )
        return (*head, {"role": "user", "content": self.prompt_template.replace("{prompt}", prompt)})

    def _response(self, record: dict[str, Any], ground_truth: str, where: str) -> str | None:
        if self.response_key is not None:
            return _plain_text(_lookup(record, self.response_key, where))
        return None if self.answer_key is None else ground_truth


class TaskSet(Sequence[Task]):
    """Tasks of one or several files, by number.

    Files stay open and are read where needed; lines may be blank. A number is stable as long as the files are:
    :attr:`digest` tells.
    """

    def __init__(self, sources: Sequence[_Source], task_format: TaskFormat, limit: int | None = None) -> None:
        self._sources = sources
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
    ) -> TaskSet:
        """Open JSONL files.

        Args:
            files: one or several paths; their tasks follow one another.
            task_format: how records become tasks; GSM8K's format by default.
            limit: use the first so many tasks only.

        Raises:
            DataError: ``data.missing``, ``data.empty``, ``data.malformed`` (lines in the first 64 MiB of each
                file are checked here, ids among them for doubles; later lines when they are used).
        """
        paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
        names = _names(paths)
        sources = [_JsonLines(path, name) for path, name in zip(paths, names, strict=True)]
        tasks = cls(sources, task_format or TaskFormat(), limit)
        tasks._check(", ".join(map(str, paths)))
        return tasks

    @classmethod
    def from_records(
        cls, records: Iterable[Any], task_format: TaskFormat | None = None, *, name: str = "records"
    ) -> TaskSet:
        """Make a set of records in memory; ids are ``name:1`` and so on."""
        tasks = cls([_Records(list(records), name)], task_format or TaskFormat())
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
        return self._format.task(record, where=where, default_id=f"{source.name}:{line}", default_source=source.name)

    def checked(self) -> Iterator[int]:
        """The numbers of the tasks that were checked when the files were opened."""
        for source, start in zip(self._sources, self._starts, strict=False):
            yield from range(start, min(start + source.checked, self._length))

    def place(self, number: int) -> str:
        """Where a task stands: ``file:line``."""
        source, index = self._find(number)
        return f"{source.place}:{source.line(index)}"

    def _find(self, number: int) -> tuple[_Source, int]:
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
                raise _malformed("two tasks have one id", self.place(number), "unique ids", found)
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


class _Source:
    """Records of one origin."""

    name: str  #: in default ids and as default data source
    place: str  #: in errors
    digest: str
    checked: int  #: how many records are checked at the beginning

    def __len__(self) -> int:
        raise NotImplementedError

    def line(self, index: int) -> int:
        """The line of a record, from 1."""
        raise NotImplementedError

    def record(self, index: int) -> Any:
        """A parsed record."""
        raise NotImplementedError


class _Records(_Source):
    def __init__(self, records: list[Any], name: str) -> None:
        self._records = records
        self.name = self.place = name
        self.checked = len(records)
        text = json.dumps(records, sort_keys=True, ensure_ascii=False)
        self.digest = xxhash.xxh3_128_hexdigest(text.encode())

    def __len__(self) -> int:
        return len(self._records)

    def line(self, index: int) -> int:
        return index + 1

    def record(self, index: int) -> Any:
        return self._records[index]


class _JsonLines(_Source):
    """A JSONL file: 16 bytes of memory per record, one ``pread`` per access."""

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_file():
            raise DataError(
                "the task file does not exist",
                code="data.missing",
                where=str(path),
                expected="a JSONL file",
                found="a folder" if path.is_dir() else "nothing",
                fix=f"check the path; the working folder is {Path.cwd()}",
            )
        self.name = name
        self.place = str(path)
        self._offsets = array.array("Q")
        self._lines = array.array("Q")
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._scan()

    def _scan(self) -> None:
        content = xxhash.xxh3_128()
        offset = 0
        self.checked = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                content.update(line)
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                    self.checked += offset < CHECKED_BYTES
                offset += len(line)
        self._end = offset
        self.digest = content.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def line(self, index: int) -> int:
        return self._lines[index]

    def record(self, index: int) -> Any:
        start = self._offsets[index]
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._end
        text = os.pread(self._file, end - start, start)
        try:
            return json.loads(text)
        except ValueError as error:  # UnicodeDecodeError is one
            where = f"{self.place}:{self.line(index)}"
            raise _malformed("a line is not JSON", where, "a JSON object", f"{error}") from error


def _names(paths: Sequence[Path]) -> list[str]:
    """Stems, told apart by a number where two files have one."""
    names: list[str] = []
    for path in paths:
        stem, count = path.stem, 1
        while stem in names:
            count += 1
            stem = f"{path.stem}~{count}"
        names.append(stem)
    return names


def _lookup(record: dict[str, Any], path: str, where: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            fields = ", ".join(repr(name) for name in record) or "no fields"
            raise _malformed(
                f"field {path!r} is missing", where, f"a field {path!r}", fields, "name the right keys of the records"
            )
        value = value[key]
    return value


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _record_id(record: dict[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _malformed(f"field {key!r} is not an id", where, "a text or an integer", repr(value))
    return str(value)


def _conversation(value: Any, key: str, where: str) -> Sequence[Mapping[str, Any]]:
    fine = isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value)
    if not fine:
        found = repr(value)
        raise _malformed(
            f"field {key!r} is not a conversation", where, "a list of messages with role and content", found[:200]
        )
    messages: list[Mapping[str, Any]] = value
    return messages


def _malformed(message: str, where: str, expected: str, found: str, fix: str | None = None) -> DataError:
    fix = fix or "correct the line, or leave it out"
    return DataError(message, code="data.malformed", where=where, expected=expected, found=found, fix=fix)
