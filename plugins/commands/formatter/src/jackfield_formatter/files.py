"""Files of rows: formatting a set into one, and reading it back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import attrs
import msgspec

from jackfield.compose.libraries import readers
from jackfield.config.data import DataSet
from jackfield.data.formats import naming, refusal
from jackfield.errors import ConfigError, DataError
from jackfield.files import digest_of, replace_file, replacing, seal
from jackfield_formatter.context import FormatSettings
from jackfield_formatter.formatter import Formatter, plain
from jackfield_formatter.functions import digest_of as digest_of_function
from jackfield_formatter.models import DataModel

Row = TypeVar("Row", bound=DataModel)
_BATCH = 256  #: records that are formatted together
_FIRST = 8  #: so many first records say what all are
_FREE = 20  #: records that may be set aside in any case
_HOPELESS = 1000  #: so many records without a single row end it early
_BLOCK = 2**20  #: characters of a text file that are read together


@attrs.frozen(kw_only=True)
class FormatReport:
    """What became of a set's records."""

    schema: str  #: of the rows
    shape: str  #: of the records; ``mapping`` or ``function`` where these say all
    read: int  #: records
    rows: int
    left_out: int  #: records of which the function makes no rows
    set_aside: int  #: records that cannot be formatted
    out: Path
    set_aside_file: Path | None  #: they and the reasons; None: there are none


def format_file(
    source: DataSet | str | Path,
    out: Path,
    settings: FormatSettings,
    *,
    limit: int | None = None,
    maximum_set_aside: float = 0.1,
    replaces: bool = False,
) -> FormatReport:
    """Format the first ``limit`` records of a set, which may be larger than memory, into a file of JSON lines.

    The file appears when it is complete, with ``OUT.manifest.json``, which says what it was made from. Records that
    cannot be formatted are in ``OUT.set_aside.jsonl`` with their number and the reason; if they are more than 20 and
    more than that share, or all, ``data.set-aside`` is raised and there is no file.
    """
    given = source if isinstance(source, DataSet) else DataSet(path=str(source))
    if out.suffix != ".jsonl":
        expected = "a name that ends with .jsonl"
        raise ConfigError("rows are written as JSON lines", where=str(out), expected=expected, found=out.name)
    for written in (out, *_beside(out)):
        if written.exists() and Path(given.path).exists() and written.samefile(given.path):
            what, fix = "the rows would replace the records that they are made from", "give another name"
            raise ConfigError(what, where=str(out), expected="another file", found=given.path, fix=fix)
    if out.exists() and not replaces:
        what, fix = "there is a file of this name", "give another name, or replace it (--replace)"
        raise ConfigError(what, where=str(out), expected="a new file", found="a file", fix=fix)
    job = _Job(given=given, out=out, formatter=Formatter(settings=settings), share=maximum_set_aside)
    return asyncio.run(job.run(limit))


def _beside(out: Path) -> tuple[Path, Path]:
    """Return the files of records that were set aside, and of what the rows were made from."""
    return out.with_name(f"{out.stem}.set_aside.jsonl"), out.with_name(f"{out.stem}.manifest.json")


@attrs.frozen
class _Unreadable:
    """A record that is no JSON object."""

    raw: Any
    error: DataError


_Numbered: TypeAlias = tuple[int, Mapping[str, Any] | _Unreadable]


@attrs.define(kw_only=True, eq=False)
class _Job:
    """Formats one set."""

    given: DataSet
    out: Path
    formatter: Formatter
    share: float
    counts: dict[str, int] = attrs.field(factory=lambda: {"read": 0, "rows": 0, "left_out": 0, "set_aside": 0})
    why: str = ""  #: why the first record was set aside

    async def run(self, limit: int | None) -> FormatReport:
        """Write the rows of the first ``limit`` records, and the files beside them."""
        aside, described = _beside(self.out)
        refused: DataError | None = None
        await self.formatter.start()
        try:
            with replacing(aside) as beside, beside.open("wb") as other:
                try:
                    with replacing(self.out) as partial_file, partial_file.open("wb") as file:
                        await self._write(file, other, limit)
                        file.flush()
                        manifest = self._manifest(digest_of(partial_file))
                    replace_file(described, manifest)
                except DataError as error:
                    if error.code != "data.set-aside":
                        raise
                    refused = error  # after the records that were set aside are in their file
        finally:
            await self.formatter.close()
        if not self.counts["set_aside"]:
            aside.unlink()
        if refused is not None:
            refused.fix = f"{refused.fix}; {aside} has all of them"
            raise refused
        return self._report(aside if self.counts["set_aside"] else None)

    async def _write(self, file: BinaryIO, other: BinaryIO, limit: int | None) -> None:
        numbered = self._records(limit)
        first = list(itertools.islice(numbered, _FIRST))
        with naming(self.given.path):
            self.formatter.learn([record for _, record in first if isinstance(record, Mapping)])
        stem = Path(self.given.path).name.partition(".")[0]
        for batch in _batches(itertools.chain(first, numbered)):
            self.counts["read"] += len(batch)
            formatted = iter(await self.formatter.format([each for _, each in batch if isinstance(each, Mapping)]))
            for number, record in batch:
                rows = next(formatted) if isinstance(record, Mapping) else record.error
                if isinstance(rows, DataError):
                    self._set_aside(other, number, record, rows)
                    continue
                self.counts["left_out"] += not rows
                self.counts["rows"] += len(rows)
                file.writelines(msgspec.json.encode(each) + b"\n" for each in _named(rows, f"{stem}:{number}"))
        if self.counts["set_aside"] > max(_FREE, self.share * self.counts["read"]):
            raise self._too_many()
        if not self.counts["rows"]:
            if self.counts["set_aside"]:
                raise self._too_many()
            what = "the function leaves every record out" if self.counts["left_out"] else "there are no records"
            raise refusal(what, "one row or more", "none", "check the source", "data.empty", self.given.path)

    def _records(self, limit: int | None) -> Iterator[_Numbered]:
        """Yield the records with their numbers in the set, from 1 on."""
        for number, raw in enumerate(itertools.islice(rows_of(self.given), limit), 1):
            if isinstance(raw, bytes) and not raw.strip():
                continue
            try:
                yield number, plain(raw)
            except DataError as error:
                yield number, _Unreadable(raw, error)

    def _set_aside(self, other: BinaryIO, number: int, record: Any, error: DataError) -> None:
        with naming(f"{self.given.path}:{number}"):
            try:
                raise error
            except DataError as named:
                where = f"{self.given.path}:{number}"
                named.where = where if named.where is None else f"{where} ({named.where})"
        self.counts["set_aside"] += 1
        self.why = self.why or str(error)
        shown = record.raw if isinstance(record, _Unreadable) else record
        shown = shown.decode("utf-8", "replace") if isinstance(shown, bytes) else shown
        line = {"number": number, **{name: value for name, value in error.as_dict().items() if value}}
        try:
            text = msgspec.json.encode({**line, "record": shown})
        except (TypeError, ValueError, OverflowError, RecursionError):
            text = msgspec.json.encode({**line, "record": repr(record)})
        other.write(text + b"\n")
        if not self.counts["rows"] and self.counts["set_aside"] > max(_HOPELESS, self.share * self.counts["read"]):
            raise self._too_many()

    def _too_many(self) -> DataError:
        count, read = self.counts["set_aside"], self.counts["read"]
        expected = f"at most {self.share:.0%} of the records, or {_FREE}"
        fix = "correct the records, or the mapping, the shape or the function"
        what = f"{count} of {read} records cannot be formatted"
        return refusal(what, expected, self.why, fix, "data.set-aside", self.given.path)

    def _report(self, aside: Path | None) -> FormatReport:
        formatter = self.formatter
        shape = formatter.settings.shape or (formatter.shape.described if formatter.shape else "")
        shape = shape or ("function" if formatter.settings.function else "mapping")
        named = {"schema": formatter.model.schema_name(), "shape": shape, "out": self.out, "set_aside_file": aside}
        return FormatReport(**named, **self.counts)  # type: ignore[arg-type]

    def _manifest(self, digest: str) -> str:
        settings = attrs.asdict(self.formatter.settings)
        function = self.formatter.settings.function
        about = {
            name: value
            for name, value in attrs.asdict(self._report(None)).items()
            if name not in ("out", "set_aside_file")
        }
        source = {name: value for name, value in attrs.asdict(self.given).items() if value is not None}
        about |= {"source": source, "settings": settings, "rows_digest": digest}
        about |= {"function_digest": digest_of_function(function)} if function else {}
        return seal(json.dumps(about))


def _batches(records: Iterator[_Numbered]) -> Iterator[Sequence[_Numbered]]:
    return iter(lambda: list(itertools.islice(records, _BATCH)), [])


def _named(rows: Sequence[DataModel], place: str) -> Iterator[dict[str, Any]]:
    """Yield the records of rows with ids: the record's own, or its place; several rows of it are numbered."""
    for number, row in enumerate(rows, 1):
        yield named(row, place, number if len(rows) > 1 else None).record()


def named(row: DataModel, place: str | None, number: int | None) -> DataModel:
    """Return a row with an id, where its model has one that is not given."""
    field = next((name for name in ("id", "task") if name in {each.name for each in attrs.fields(type(row))}), None)
    own = place if field is None else getattr(row, field) or place
    if field is None or own is None:
        return row
    return attrs.evolve(row, **{field: own if number is None else f"{own}.{number}"})


def rows_of(given: DataSet) -> Iterator[dict[str, Any] | bytes]:
    """Yield the records of a set; those of text files are blocks of text that end with a paragraph."""
    path = Path(given.path)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.suffix == ".txt" and path.is_file() else []
    return itertools.chain.from_iterable(map(_texts, files)) if files else readers().lines.rows_of(given)


def _texts(file: Path) -> Iterator[dict[str, Any]]:
    """Yield a text file in blocks of about a million characters, which end with a paragraph or a line."""
    rest = ""
    try:
        with file.open(encoding="utf-8-sig") as opened:
            for block in iter(partial(opened.read, _BLOCK), ""):
                rest += block
                end = rest.rfind("\n\n") + 2 if "\n\n" in rest else rest.rfind("\n") + 1
                if len(rest) >= _BLOCK and end > 0:
                    yield {"text": rest[:end], "data_source": file.stem}
                    rest = rest[end:]
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8"
        raise refusal("the file is not UTF-8", "UTF-8", str(error), fix, where=str(file)) from error
    if rest.strip():
        yield {"text": rest, "data_source": file.stem}


def read_rows(path: str | Path, model: type[Row]) -> Iterator[Row]:
    """Yield the rows of a file that the formatter wrote, also of an older version of the model.

    A row of another schema or of a newer version raises ``data.schema``, a wrong one ``data.malformed``, each with its
    file and line.
    """
    read: Callable[[Mapping[str, Any]], Row] = model.of_record
    for number, raw in enumerate(rows_of(DataSet(path=str(path))), 1):
        if isinstance(raw, bytes) and not raw.strip():
            continue
        with naming(f"{path}:{number}"):
            yield read(plain(raw))
