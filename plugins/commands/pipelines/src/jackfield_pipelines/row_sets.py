"""Versioned sets of rows: folders that are written once, named by what they were made from."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
import xxhash

from jackfield.data.formats import ROW
from jackfield.errors import DataError
from jackfield.files import replace_file, seal, sync_tree, unseal

ROWS, LINEAGE, REMOVED, SET_ASIDE = "rows.jsonl", "lineage.jsonl", "removed.jsonl", "set_aside.jsonl"
FILES = (ROWS, LINEAGE, REMOVED, SET_ASIDE)
KEY = ROW  #: the column of a record with the row's key
MANIFEST, _PROGRESS = "manifest.json", "progress.json"
_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode


@attrs.frozen(kw_only=True)
class RowSet:
    """A complete set of rows, whose files do not change any more.

    ``rows.jsonl`` has a record on each line, with its key under ``_row``; ``lineage.jsonl`` the parents of rows that
    were made here; ``removed.jsonl`` and ``set_aside.jsonl`` rows that are not in it, each with a reason.
    """

    folder: Path
    manifest: Mapping[str, Any]  #: what made it: operator, version, settings, its source, counts

    @property
    def digest(self) -> str:
        """Return what it was made from, as 32 hexadecimal digits."""
        return str(self.manifest["digest"])

    def __len__(self) -> int:
        return int(self.manifest["counts"]["rows"])

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of its rows, each with its end. Other bytes raise ``data.row-set`` after the last line."""
        read = xxhash.xxh3_64()
        with (self.folder / ROWS).open("rb") as file:
            for line in file:
                read.update(line)
                yield line
        if read.hexdigest() != self.manifest.get("rows_digest", read.hexdigest()):
            raise _damaged(self.folder, f"other bytes in {ROWS}")

    def records(self, name: str = ROWS) -> Iterator[dict[str, Any]]:
        """Yield the records of one of its files."""
        with (self.folder / name).open("rb") as file:
            for line in file:
                yield _decode(line)

    @classmethod
    def open(cls, folder: Path) -> RowSet | None:
        """Open a complete set; None: there is none. A damaged manifest raises ``data.row-set``."""
        try:
            manifest = unseal((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _damaged(folder, str(error)) from error
        try:
            sizes = {name: (folder / name).stat().st_size for name in FILES}
        except OSError as error:
            raise _damaged(folder, str(error)) from error
        if sizes != manifest["sizes"]:
            raise _damaged(folder, f"sizes {sizes}, not {manifest['sizes']}")
        return cls(folder=folder, manifest=manifest)


def _damaged(folder: Path, found: str) -> DataError:
    fix = "remove the folder; it is then made again"
    details: dict[str, Any] = {"where": str(folder), "expected": "what was written", "found": found, "fix": fix}
    return DataError("a set of rows is damaged", code="data.row-set", **details)


class RowSetWriter:
    """Writes a set of rows, and continues where a process that was killed has saved its :meth:`progress`.

    What was appended after the last progress is cut off; if a file lacks what was before it, all begins again.
    ``state`` is what the writer's user saved with it.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            raise _damaged(folder, f"no {MANIFEST}")
        self.folder, self._partial = folder, folder.with_name(f".{folder.name}.partial")
        self._partial.mkdir(parents=True, exist_ok=True)
        self.counts: dict[str, float] = {"rows": 0, "removed": 0, "set_aside": 0, "made": 0}
        self.state: Any = None
        sizes = dict.fromkeys(FILES, 0)
        with contextlib.suppress(OSError, ValueError, LookupError):
            saved = unseal((self._partial / _PROGRESS).read_bytes())
            if all((self._partial / name).stat().st_size >= saved["sizes"][name] for name in FILES):
                sizes, self.counts, self.state = saved["sizes"], saved["counts"], saved["state"]
        self._rows = xxhash.xxh3_64()
        self._files = {name: _at(self._partial / name, size) for name, size in sizes.items()}
        with (self._partial / ROWS).open("rb") as file:
            while part := file.read(1 << 20):
                self._rows.update(part)

    def append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records to a file."""
        self.append_lines(name, [_encode(each) + b"\n" for each in records])

    def append_lines(self, name: str, lines: Sequence[bytes]) -> None:
        """Append records that are lines of JSON to a file."""
        if lines:
            part = b"".join(lines)
            self._files[name].write(part)
            if name == ROWS:
                self._rows.update(part)
            self.counts[_COUNTED[name]] += len(lines)

    def progress(self, state: Any) -> None:
        """Save how far the set is, after a sync of its files."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        saved = {"sizes": self._sizes(), "counts": self.counts, "state": state}
        replace_file(self._partial / _PROGRESS, seal(json.dumps(saved)))

    def commit(self, manifest: Mapping[str, Any]) -> RowSet:
        """Complete the set, which takes its place atomically."""
        for file in self._files.values():
            file.close()
        (self._partial / _PROGRESS).unlink(missing_ok=True)
        sizes = {name: (self._partial / name).stat().st_size for name in FILES}
        whole = {**manifest, "counts": self.counts, "sizes": sizes, "rows_digest": self._rows.hexdigest()}
        replace_file(self._partial / MANIFEST, seal(json.dumps(whole)))
        sync_tree(self._partial)
        self._partial.rename(self.folder)
        return RowSet(folder=self.folder, manifest=whole)

    def close(self) -> None:
        """Close the files of a set that is not complete; its progress stays."""
        for file in self._files.values():
            file.close()

    def _sizes(self) -> dict[str, int]:
        return {name: file.tell() for name, file in self._files.items()}


_COUNTED = {ROWS: "rows", LINEAGE: "made", REMOVED: "removed", SET_ASIDE: "set_aside"}


def _at(path: Path, size: int) -> BinaryIO:
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file
