"""Records that only a Python program has, as the data file of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import DataError, RunError
from jackfield.files import digest_of, replacing


@attrs.frozen
class Records:
    """A ``datasets.Dataset`` or another iterable of dicts, and the file of the run that gets them."""

    which: str  #: train or eval
    records: Any
    file: Path

    def first(self) -> Mapping[str, Any]:
        """Return the first record; ``data.malformed`` if there is none, or it is not a dict."""
        iterable = isinstance(self.records, Iterable) and not isinstance(self.records, Iterator | Mapping)
        first = next(iter(self.records), None) if iterable else None
        if isinstance(first, Mapping):
            return first
        expected = "a path, a datasets.Dataset, or a list of dicts"
        fix = "choose a split (data['train']), or convert it (a DataFrame: frame.to_dict('records'), a generator: "
        fix += "list(it))"
        what, found = "the data has no records", repr(self.records)[:200]
        raise DataError(what, where=self.which, expected=expected, found=found, fix=fix)

    def write(self, *, kept: bool) -> None:
        """Write the file; ``run.changed`` if it must be ``kept``, because a run has begun, and would change."""
        with replacing(self.file, durable=False) as partial:
            with partial.open("wb") as out:
                out.writelines(self._line(number, record) for number, record in enumerate(self.records))
            if kept and self.file.exists() and digest_of(self.file) != digest_of(partial):
                what = "the folder holds a run with other records"
                fix = "give the run another folder, or the records it had; checkpoint={'resume': False} removes "
                fix += "what is there and starts from the beginning"
                raise RunError(what, code="run.changed", where=str(self.file), expected="the same records", fix=fix)

    def _line(self, number: int, record: Mapping[str, Any]) -> bytes:
        try:
            return json.dumps(dict(record), ensure_ascii=False, allow_nan=False, default=_json).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            expected, fix = "texts, finite numbers, lists and dicts", "convert the column, or remove it"
            what, where = "a record cannot be written as JSON", f"{self.which}[{number}]"
            raise DataError(what, where=where, expected=expected, found=error, fix=fix) from error


def _json(value: Any) -> Any:
    """Convert values of NumPy and torch, and dates."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a value of type {type(value).__name__}")
