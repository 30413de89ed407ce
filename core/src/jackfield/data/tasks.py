"""A set of tasks in a JSONL file, and the seeded order in which tasks are used."""

from __future__ import annotations

import array
import codecs
import math
import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
import xxhash

from jackfield.data.formats import Task, TaskFormat, naming, refusal

#: Lines in this many first bytes of a file are parsed when the file is opened, later ones when they are used.
CHECKED_BYTES = 64 * 2**20
LINE_BYTES = 16 * 2**20  #: maximum length of a line
_DEFAULT = TaskFormat()


class TaskSet(Sequence[Task]):
    """The tasks of a JSONL file, which may have blank lines and be larger than memory.

    A task takes 16 bytes of memory, and an access is one ``pread``; the file stays open. :attr:`digest` shows changes.
    Only the first ``limit`` tasks are used. With ``answers``, records without an answer to train on are refused. Errors
    are ``data.missing``, ``data.empty`` and ``data.malformed``. The first 64 MiB of lines are checked here, also for
    duplicate ids; later lines when they are used. ``opened`` has the lines that were made from ``file``, whatever that
    is, which errors name; ``name`` is the stem of ids and the data source of records without them.
    """

    def __init__(
        self,
        file: str | Path,
        form: TaskFormat = _DEFAULT,
        *,
        limit: int | None = None,
        answers: bool = False,
        opened: BinaryIO | None = None,
        name: str | None = None,
    ) -> None:
        self._path, self._format, self._name = Path(file), form.resolved(), name or Path(file).stem
        self.answers = answers  #: whether each task has an answer to train on
        self.notes: Sequence[str] = ()  #: what a person should know of the set
        self.shuffle = True  #: whether each epoch has its own order
        if opened is None and not self._path.is_file():
            found, fix = "a folder" if self._path.is_dir() else "nothing", f"check the path from {Path.cwd()}"
            raise refusal("the task file does not exist", "a JSONL file", found, fix, "data.missing", str(file))
        self._offsets, self._lines = array.array("Q"), array.array("Q")
        self._file = os.open(file, os.O_RDONLY) if opened is None else os.dup(opened.fileno())
        os.lseek(self._file, 0, os.SEEK_SET)
        weakref.finalize(self, os.close, self._file)
        self.digest = self._scan()  #: of the file's bytes, which a resumed run compares
        self._length = len(self._lines) if limit is None else min(limit, len(self._lines))
        if not self._length:
            found, fix = "no records", "check that the file was written to its end"
            raise refusal("there are no tasks", "one record or more", found, fix, "data.empty", str(file))
        #: the numbers of the tasks that are checked when the file is opened
        self.checked: Sequence[int] = range(min(self._length, sum(offset < CHECKED_BYTES for offset in self._offsets)))
        seen: dict[str, str] = {}
        for task in map(self.__getitem__, self.checked):
            if task.id in seen:
                with naming(task.place):
                    raise refusal("two tasks have one id", "unique ids", f"{task.id!r}, as in {seen[task.id]}")
            seen[task.id] = task.place

    def _scan(self) -> str:
        content, self._end = xxhash.xxh3_128(), 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
                with naming(f"{self._path}:{number}"):
                    if len(line) > LINE_BYTES:
                        most, found = f"at most {LINE_BYTES >> 20} MiB", f"more than {LINE_BYTES} bytes"
                        raise refusal("a line is too long", most, found)
                    if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        found = "a byte-order mark of UTF-16"
                        raise refusal("the file is not UTF-8", "UTF-8", found, "save it as UTF-8")
                content.update(line)
                if line.strip():
                    self._offsets.append(self._end)
                    self._lines.append(number)
                self._end += len(line)
        return xxhash.xxh3_128_hexdigest(content.hexdigest().encode())

    def __len__(self) -> int:
        return self._length

    def order(self, seed: int) -> Any:
        """Return the endless order in which the tasks are used, an object like :class:`SeededOrder`."""
        return SeededOrder(size=len(self), seed=seed, shuffle=self.shuffle)

    def __getitem__(self, number: Any) -> Any:
        """Return a task by number, or a list of tasks by slice."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._length))]
        index = number + self._length if number < 0 else number
        if not 0 <= index < self._length:
            raise IndexError(f"task {number} of {self._length}")
        line, stem = self._lines[index], self._name
        place = f"{self._path}:{line}"
        with naming(place):
            task = attrs.evolve(self._format.task(self._record(index), f"{stem}:{line}", stem), place=place)
            if self.answers and task.response is None:
                expected = "text or messages in data.format.response_key, or a conversation that the assistant ends"
                found = f"a prompt that ends with the role {task.messages[-1]['role']!r}, and no answer to it"
                fix = "correct the line, or name the right fields in data.format"
                raise refusal("a record has no answer to learn from", expected, found, fix)
        return task

    def _record(self, index: int) -> Any:
        """Return a line's values, which every process can receive: finite numbers, 64-bit integers, texts in UTF-8."""
        start, ends = self._offsets[index], (*self._offsets[index + 1 : index + 2], self._end)
        text = os.pread(self._file, ends[0] - start, start)
        try:
            record = msgspec.json.decode(text.removeprefix(codecs.BOM_UTF8))
            msgspec.msgpack.encode(record)  # refuses larger integers
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            found = f"{type(error).__name__}: {error}"[:300]
            expected = "a JSON object in UTF-8 with finite numbers and integers of 64 bits"
            raise refusal("a line is not JSON", expected, found) from None
        return record


@attrs.frozen
class SeededOrder:
    """An endless sequence of the numbers 0 … size-1, with one seeded permutation per epoch.

    Its only state is the position, and every position has the same cost: a Feistel network with modular addition
    permutes the numbers (format-preserving encryption; Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002), so that no permutation is stored. A number at the end of one epoch may recur at the start of the next:
    within a batch, identify samples by position, not by task.
    """

    size: int = attrs.field(validator=attrs.validators.ge(1))
    seed: int = 0
    shuffle: bool = attrs.field(default=True, kw_only=True)  #: False: every epoch is 0, 1, 2, …

    def index(self, position: int) -> int:
        """Return the number at a position, which counts from 0 through all epochs."""
        if position < 0:
            raise IndexError(f"position {position} is before the beginning")
        epoch, place = divmod(position, self.size)
        if not self.shuffle:
            return place
        rows = math.isqrt(self.size - 1) + 1
        columns = -(-self.size // rows)
        key = xxhash.xxh3_64_intdigest(f"{self.seed}:{epoch}".encode())
        while True:  # the network permutes rows x columns >= size numbers: repeat until the result is below size
            left, right = divmod(place, columns)
            for turn in range(0, 8, 2):
                left = (left + xxhash.xxh3_64_intdigest(struct.pack("<QQ", turn, right), seed=key)) % rows
                right = (right + xxhash.xxh3_64_intdigest(struct.pack("<QQ", turn + 1, left), seed=key)) % columns
            place = left * columns + right
            if place < self.size:
                return place


def order_of(tasks: Sequence[Task], seed: int) -> Any:
    """Return the endless order in which tasks are used, an object like :class:`SeededOrder`."""
    return tasks.order(seed) if isinstance(tasks, TaskSet) else SeededOrder(size=len(tasks), seed=seed)
