"""The scored samples of Parquet files, an archive's or a run's data of rewards, and further columns for them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.reward import ResponsePart, ScoreRequest, ScoreResult
from jackfield.errors import QueueError, RunError
from jackfield.sdk.archive import import_pyarrow
from jackfield_archive.files import COLUMNS, read_samples, trained, write_samples
from jackfield_archive.scoring import request_of

_NEEDED = {"key", "group", "data_source", "prompt", "response", "ground_truth", "status", "score"}
_KEPT = ("score", "status", "explanation", "dimensions", "metrics", "raw", "error", "tokens", "seconds")
_LINEAGE = b"jackfield.rewards"


@attrs.frozen(kw_only=True)
class ScoredRow:
    """A sample of a file with its score."""

    request: ScoreRequest
    score: float | None  #: None: it had none


@attrs.frozen(kw_only=True)
class RecordFile:
    """A file of the data of rewards, which a run keeps in its folder ``scores``."""

    path: Path

    def rows(self, deadline_seconds: float) -> list[ScoredRow]:
        """Return all rows; ``queue.invalid`` if the file is damaged."""
        names = sorted(_NEEDED | {"extra_info"} & set(_names(self.path)))
        return [_row(values, deadline_seconds) for values in _table(self.path, names).to_pylist()]

    def number(self) -> int:
        """Return the number of the next columns: 2 if there are only the run's own."""
        return _next(_names(self.path), "score")

    def write(self, out: Path, number: int, results: Sequence[ScoreResult], lineage: Mapping[str, Any]) -> None:
        """Write the rows with further columns ``score_NUMBER`` and so on to the file ``out``."""
        pa = import_pyarrow()
        from pyarrow import parquet

        table = _table(self.path, None)
        kinds = {"score": pa.float64(), "tokens": pa.int64(), "seconds": pa.float64()}
        for name in _KEPT:
            values = [_plain(getattr(result, name)) for result in results]
            table = table.append_column(f"{name}_{number}", pa.array(values, kinds.get(name, pa.string())))
        for name in ("reward", "version"):
            values = [lineage[name]] * len(results)
            table = table.append_column(f"{name}_{number}", pa.array(values, pa.string()))
        known = dict(table.schema.metadata or {})
        told = [*json.loads(known.get(_LINEAGE, b"[]")), {"columns": f"*_{number}", **lineage}]
        table = table.replace_schema_metadata({**known, _LINEAGE: json.dumps(told)})
        partial = out.with_name(f".{out.name}.tmp")
        try:
            parquet.write_table(table, partial, compression="zstd")
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)


@attrs.frozen(kw_only=True)
class ArchiveFile:
    """A file of an archive. ``decode`` returns the text of tokens."""

    path: Path
    decode: Callable[[Sequence[int]], str]

    def rows(self, deadline_seconds: float) -> list[ScoredRow]:
        """Return the samples that a run has trained on; ``queue.invalid`` if the file is damaged."""
        found = []
        for sample in trained(read_samples(self.path)):
            old = sample.cells.get("reward")
            score = None if old is None else float(sum(array("f", bytes(old[1]))))
            found.append(ScoredRow(request=request_of(sample, self.decode, deadline_seconds), score=score))
        return found

    def number(self) -> int:
        """Return the number of the next column: 2 if there is only the run's own."""
        return _next([name.removeprefix("columns.") for name in _names(self.path)], "reward")

    def write(self, out: Path, number: int, results: Sequence[ScoreResult], lineage: Mapping[str, Any]) -> None:
        """Write the samples with a further column ``reward_NUMBER`` to the file ``out``; failures have none.

        The tags ``reward_NUMBER/…`` are the metrics and dimensions, and the reason of a failure.
        """
        made = []
        for sample, result in zip(trained(read_samples(self.path)), results, strict=True):
            cells, tags, name = dict(sample.cells), dict(sample.tags), f"reward_{number}"
            if result.status == "ok":
                scores = result.token_scores or (float(result.score or 0.0),)
                cells[name] = COLUMNS["reward"], array("f", scores).tobytes()
                tags |= {f"{name}/{key}": float(each) for key, each in {**result.metrics, **result.dimensions}.items()}
            else:
                tags[f"{name}/reason"] = result.error
            made.append(attrs.evolve(sample, cells=cells, tags=tags))
        write_samples(out, made)


def open_files(
    files: Sequence[Path], decoder: Callable[[], Callable[[Sequence[int]], str]]
) -> list[RecordFile | ArchiveFile]:
    """Recognise files by their columns; ``decoder`` is called if one is of an archive.

    One that is neither is ``queue.invalid``.
    """
    found, decode = list[RecordFile | ArchiveFile](), None
    for path in files:
        names = set(_names(path))
        if names >= _NEEDED:
            found.append(RecordFile(path=path))
        elif "columns.response_ids" in names:
            decode = decode or decoder()
            found.append(ArchiveFile(path=path, decode=decode))
        else:
            expected = "a file of a run's folder scores, or of an archive"
            shown: Any = {"where": str(path), "expected": expected, "found": ", ".join(sorted(names)) or "no columns"}
            raise QueueError("a file has no rewards", **shown)
    return found


def check_new(out: Path, names: Sequence[str]) -> None:
    """Raise ``run.storage`` if a file of these names is there already."""
    if there := [name for name in names if (out / name).exists()]:
        expected, fix = "a folder without these files", "give another folder; nothing is overwritten"
        details: Any = {"where": str(out), "expected": expected, "found": ", ".join(there[:4]), "fix": fix}
        raise RunError("there are files of these names", code="run.storage", **details)


def _row(values: Mapping[str, Any], deadline_seconds: float) -> ScoredRow:
    text = {name: values[name] or "" for name in ("data_source", "ground_truth", "prompt", "response", "key")}
    request = ScoreRequest(
        data_source=text["data_source"],
        solution_str=text["response"],
        ground_truth=text["ground_truth"],
        extra_info=json.loads(values.get("extra_info") or "{}"),
        prompt_str=text["prompt"],
        parts=(ResponsePart(author="model", text=text["response"]),),
        idempotency_key=text["key"],
        group_id=values["group"] or text["key"],
        deadline_seconds=deadline_seconds,
    )
    return ScoredRow(request=request, score=values["score"] if values["status"] == "ok" else None)


def _plain(value: Any) -> Any:
    return json.dumps(dict(value), ensure_ascii=False) if isinstance(value, Mapping) else value


def _next(names: Sequence[str], stem: str) -> int:
    number = 2
    while f"{stem}_{number}" in names:
        number += 1
    return number


def _names(path: Path) -> list[str]:
    pyarrow = import_pyarrow()
    from pyarrow import parquet

    try:
        return list(parquet.read_schema(path).names)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _table(path: Path, names: Sequence[str] | None) -> Any:
    pyarrow = import_pyarrow()
    from pyarrow import parquet

    try:
        return parquet.read_table(path, columns=names)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> QueueError:
    details: Any = {"where": str(path), "expected": "a Parquet file", "found": error}
    return QueueError("a file cannot be read", **details)
