"""A user's function over records, in a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from jackfield.clock import Clock
from jackfield.data.formats import refusal
from jackfield.errors import DataError
from jackfield_user_code import UserCodePool

_ADAPTER = Path(__file__).with_name("_adapter.py")

Records: TypeAlias = list[dict[str, Any]]


class RecordFunction:
    """Calls a function for records, several at a time. A record that it cannot process costs no other one.

    A record at which the function raises, hangs or ends its process is refused with the reason; code that cannot be
    imported raises ``worker.start``.
    """

    def __init__(self, target: str, seconds: float, clock: Clock | None = None) -> None:
        self.target, self._seconds = target, seconds
        self._pool = UserCodePool(target, clock=clock or Clock(), adapter=_ADAPTER)

    async def start(self) -> None:
        """Import the code."""
        await self._pool.start()

    async def close(self) -> None:
        """End the process."""
        await self._pool.close()

    async def call(self, records: Sequence[Mapping[str, Any]]) -> list[Records | DataError]:
        """Return what the function makes of each record, or why it does not."""
        seconds = self._seconds * len(records)
        done = await self._pool.call({"records": [dict(each) for each in records]}, seconds, f"{len(records)} records")
        if done.status == "ok":
            return [found if why is None else self._refused(why) for found, why in done.value]
        if len(records) == 1:
            return [self._refused(done.error or done.status)]
        middle = len(records) // 2
        return [*await self.call(records[:middle]), *await self.call(records[middle:])]

    def _refused(self, why: str) -> DataError:
        expected, fix = "a record, a list of records, or None", "correct the function, or the record"
        return refusal("the function failed with this record", expected, why, fix, where=self.target)


def digest_of(target: str) -> str:
    """Return a digest of the file that has a function; empty if there is none."""
    place = target.rpartition(":")[0]
    if not place.endswith(".py"):
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            spec = None
        place = "" if spec is None else str(spec.origin)
    file = Path(place).expanduser()
    return xxhash.xxh3_64_hexdigest(file.read_bytes()) if place and file.is_file() else ""
