"""Readers of file formats, which yield records one after another in bounded memory."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

from jackfield.data.formats import naming, refusal
from jackfield.data.tasks import LINE_BYTES

Row: TypeAlias = dict[str, Any] | bytes  #: a record, or a line of JSON as it is
_CHUNK = 2**20  #: characters of a JSON file that are read together
_BATCH = 1024  #: rows of a table that are converted together
_DAMAGED = "make the file again; it may have been cut off while it was copied"


def suffix_of(path: str) -> str:
    """Return a path's ending with that before ``.gz``, in lower case."""
    name = Path(path).name.lower()
    inner, zipped = name.removesuffix(".gz"), ".gz" if name.endswith(".gz") else ""
    return Path(inner).suffix + zipped


@contextmanager
def _opened(path: Path, done: list[int]) -> Iterator[IO[bytes]]:
    """Open a file, compressed or not; name the row, the last of ``done`` plus one, of what cannot be read."""
    try:
        opened: Any = gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # noqa: SIM115
        with opened as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        with naming(f"{path}:{done[-1] + 1}"):
            raise refusal("the compressed file is damaged", "a whole gzip file", str(error), _DAMAGED) from error
    except UnicodeDecodeError as error:
        with naming(f"{path}:{done[-1] + 1}"):
            raise refusal("the file is not UTF-8", "UTF-8", str(error), "save it as UTF-8") from error


def _lines(path: Path) -> Iterator[Row]:
    done = [0]
    with _opened(path, done) as file:
        yield from _counted(iter(partial(file.readline, LINE_BYTES + 1), b""), done)


def _counted(rows: Iterator[Any], done: list[int]) -> Iterator[Any]:
    for row in rows:
        yield row
        done[0] += 1


def _json(path: Path) -> Iterator[Row]:
    """Yield the objects of a list, or the lines of a file with an object on each."""
    done = [0]
    with _opened(path, done) as file:
        start = file.read(_CHUNK).decode("utf-8-sig", errors="ignore").lstrip()[:1]
        file.seek(0)
        if start != "[":
            yield from _counted(iter(partial(file.readline, LINE_BYTES + 1), b""), done)
            return
        yield from _counted(_elements(file, path, done), done)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a finite number")


def _elements(file: IO[bytes], path: Path, done: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the elements of a JSON array, of which only one and a chunk of text are in memory."""
    decoder, text, ended, at = json.JSONDecoder(parse_constant=_no_number), "", False, 0

    def more() -> None:
        nonlocal text, at, ended
        raw = file.read(_CHUNK)
        while raw and raw[-1] & 0x80 and (byte := file.read(1)):  # not within a character
            raw += byte
        text, at, ended = text[at:] + raw.decode("utf-8-sig" if not done[0] and not text else "utf-8"), 0, not raw

    def skip(characters: str) -> str:
        nonlocal at
        while True:
            while at < len(text) and text[at] in characters:
                at += 1
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    more()
    skip(" \t\r\n")
    at += 1  # the bracket
    while (sign := skip(" \t\r\n,")) != "]":
        try:
            if not sign:
                raise ValueError("the list has no end")
            row, end = decoder.raw_decode(text, at)
            if end == len(text) and not ended:  # a number may go on
                more()
                continue
        except (ValueError, RecursionError) as error:
            if not ended and len(text) - at <= LINE_BYTES:
                more()
                continue
            with naming(f"{path}:{done[0] + 1}"):
                expected, found = "a list of objects with finite numbers", str(error)[:200]
                raise refusal("an element of the list is not JSON", expected, found, _DAMAGED) from error
        at = end
        yield row


def _csv(path: Path) -> Iterator[Row]:
    """Yield the rows below a header, whose values are texts."""
    done = [0]
    with _opened(path, done) as file:
        texts = (line.decode("utf-8-sig" if not number else "utf-8") for number, line in enumerate(file))
        csv.field_size_limit(LINE_BYTES)
        rows = csv.DictReader(texts, strict=True)
        while True:
            with naming(f"{path}:{done[0] + 1}"):
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    raise refusal("a row is not CSV", "quoted fields with commas between them", str(error)) from error
                if row is None:
                    return
                if None in row or None in row.values():
                    found = f"{sum(value is not None for value in row.values()) - (None in row)} values"
                    found += " and more" if None in row else ""
                    raise refusal("a row has not one value for each column", ", ".join(rows.fieldnames or ()), found)
            yield row
            done[0] += 1


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a table without the fields that only other records have: nulls inside of its values."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return list(map(_plain, value)) if isinstance(value, list) else value


def _table(batches: Callable[[Path], Iterator[Any]], path: Path) -> Iterator[Row]:
    import pyarrow as pa

    done = 0
    try:
        for batch in batches(path):
            for start in range(0, batch.num_rows, _BATCH):
                for row in batch.slice(start, _BATCH).to_pylist():
                    yield plain(row)
                    done += 1
    except (pa.ArrowException, OSError) as error:
        with naming(f"{path}:{done + 1}"):
            raise refusal("the table is damaged", "a whole file", str(error)[:200], _DAMAGED) from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        yield from file.iter_batches(batch_size=_BATCH)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of a file, or of a stream as ``datasets`` writes it, which are not read into memory."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            yield from map(file.get_batch, range(file.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def rows_of_folder(folder: Path, split: str | None) -> Iterator[Row]:
    """Yield the records of a folder that ``save_to_disk`` has written, of one split if it has several."""
    splits = _read(folder / "dataset_dict.json").get("splits")
    if splits is not None:
        return rows_of_folder(folder / chosen(splits, split, str(folder)), None)
    if split is not None:
        raise refusal("the set has no splits", "no split", split, "leave split out", where=str(folder))
    files = [folder / each["filename"] for each in _read(folder / "state.json").get("_data_files", ())]
    if not files:
        expected, found = "a folder of save_to_disk", ", ".join(sorted(each.name for each in folder.iterdir())[:8])
        fix = "name its files as a list"
        raise refusal("the folder is no set of tasks", expected, found or "nothing", fix, "data.missing", str(folder))
    return (row for file in files for row in _table(_arrow_batches, file))


def chosen(splits: Sequence[str], split: str | None, where: str) -> str:
    """Return the split that is wanted: the one given, the only one, or train."""
    found = splits[0] if split is None and len(splits) == 1 else split or "train"
    if found not in splits:
        shown = ", ".join(splits)
        raise refusal("the set has no such split", f"one of {shown}", found, "name it as split", where=where)
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise refusal("the folder is damaged", "JSON", str(error), _DAMAGED, where=str(file)) from error
    return found


#: Readers by the ending of a file.
READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _csv,
    ".jsonl.gz": _lines,
    ".json.gz": _json,
    ".csv.gz": _csv,
    ".parquet": partial(_table, _parquet_batches),
    ".arrow": partial(_table, _arrow_batches),
}
