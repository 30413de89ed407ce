"""The data of rewards, which is kept as Parquet files with one row per score.

Rows first go to a journal of JSON lines, ``.SOURCE-NNNNN.jsonl``, which becomes the file ``SOURCE-NNNNN.parquet``. A
journal whose file is there was left by a kill between the two steps, and is removed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from jackfield.errors import QueueError, RunError
from jackfield.sdk.archive import import_pyarrow
from jackfield.sdk.files import AppendFile, encode_line, read_lines, replacing

_log = logging.getLogger("jackfield")

_ROWS, _BYTES = 5_000, 1 << 25  #: rows, and bytes of the journal, after which a file is made
_TEXTS = "run key group data_source prompt response ground_truth extra_info status explanation raw error reward version"
#: Types of the columns in Arrow. ``extra_info``, ``dimensions`` and ``metrics`` are JSON; ``time`` is in UTC.
COLUMNS: Mapping[str, str] = dict.fromkeys([*_TEXTS.split(), "dimensions", "metrics"], "string") | {
    **{"time": "timestamp", "rollout": "int64", "tokens": "int64"},
    **{"score": "float64", "seconds": "float64", "cached": "bool"},
}


class _Journal(AppendFile):
    """A journal that is locked while its process lives."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path, self.rows = path, 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_own = os.fstat(self._file.fileno()).st_nlink > 0  # another process has not just made a file of it
        except OSError:
            self.is_own = False

    @property
    def is_full(self) -> bool:
        """Whether it is time to make a file of it."""
        return self.rows >= _ROWS or self._end >= _BYTES


@attrs.define(eq=False)
class RewardRecords:
    """The records of one process. Files are made in a thread.

    No row is lost or repeated by a kill: the next opening makes files of the journals that dead processes with the same
    source have left. Without pyarrow the journals stay, and a warning says so.
    """

    folder: Path
    source: str  #: first part of the names of files, such as the name of the worker
    _journal: _Journal | None = attrs.field(default=None, init=False)
    _making: list[threading.Thread] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if left := [_Journal(path) for path in sorted(self.folder.glob(f".{self.source}-*.jsonl"))]:
            self._make(left)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows with values for :data:`COLUMNS`; absent ones are null.

        The operating system has them when this returns. If it refuses them, raise ``run.storage``.
        """
        try:
            data = b"".join([msgspec.json.encode(row) + b"\n" for row in rows])
        except (TypeError, ValueError):  # numbers of other libraries, or half a surrogate pair
            data = b"".join(map(encode_line, rows))
        try:
            self._journal = journal = self._journal or self._open()
            journal.append(data)
        except OSError as error:
            details: dict[str, Any] = {"where": str(self.folder), "found": error, "fix": "make room"}
            raise RunError("the data of rewards cannot be written", code="run.storage", **details) from error
        journal.rows += len(rows)
        if journal.is_full:
            self._make([journal])
            self._journal = None

    def close(self) -> None:
        """Make a file of the last rows, and wait for all files. Idempotent."""
        if self._journal is not None:
            self._make([self._journal])
            self._journal = None
        for thread in self._making:
            thread.join()

    def _open(self) -> _Journal:
        """Create a journal with the next number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [path.stem.lstrip(".").rpartition("-") for path in self.folder.iterdir()]
        number = max((int(end) for start, _, end in names if start == self.source and end.isdecimal()), default=0)
        while not (journal := _Journal(self.folder / f".{self.source}-{(number := number + 1):05d}.jsonl")).is_own:
            journal.close()
        return journal

    def _make(self, journals: Sequence[_Journal]) -> None:
        thread = threading.Thread(target=_make_files, args=[journals], name="jackfield-reward-records", daemon=True)
        self._making.append(thread)
        thread.start()


def _make_files(journals: Sequence[_Journal]) -> None:
    for journal in journals:
        path, target = journal.path, journal.path.with_name(f"{journal.path.stem[1:]}.parquet")
        try:
            if journal.is_own:
                if not target.exists() and (rows := list(read_lines(path))):
                    _write(target, rows)
                path.unlink()
        except (OSError, ValueError, TypeError, QueueError) as error:
            _log.warning("the data of rewards in %s remains a journal of JSON lines: %s", path, error)
        finally:
            journal.close()


def _write(target: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    pa = import_pyarrow()
    from pyarrow import parquet

    kinds: dict[str, Any] = {**COLUMNS, "time": pa.timestamp("us", "UTC")}
    made = {name: pa.array([_value(name, row.get(name)) for row in rows], kind) for name, kind in kinds.items()}
    with replacing(target) as partial:
        parquet.write_table(pa.table(made), partial, compression="zstd")


def _value(name: str, value: Any) -> Any:
    """Return a value of a journal as Arrow takes it."""
    if COLUMNS[name] == "string" and value is not None:
        value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return value.encode(errors="replace").decode()
    return int(value * 1e6) if name == "time" and value is not None else value
