"""The rows for which a pipeline is planned, and what their columns are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.compose.libraries import readers
from jackfield.config import RunConfig, load_config
from jackfield.config.data import DataSet, sets_of
from jackfield.data.formats import TaskFormat
from jackfield.errors import ConfigError
from jackfield.settings import structure


@attrs.frozen(kw_only=True)
class Source:
    """Rows, and their first ones."""

    config: RunConfig  #: of a run with these rows as training tasks
    lines: bytes  #: the first rows, as JSON lines
    records: Sequence[Mapping[str, Any]]  #: the first rows that are objects
    names: Mapping[str, str]  #: names of usual columns, such as ``prompt``, in these rows

    @property
    def path(self) -> str:
        """The file, folder or name."""
        return sets_of(self.config.data.train)[0].path

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the first rows have, in their order."""
        return tuple(dict.fromkeys(name for record in self.records for name in record))

    def column(self, name: str) -> str | None:
        """Return the name of a usual column if the rows have it."""
        found = self.names.get(name, name)
        return found if found in self.columns else None


def config_of(data: str | None, file: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a run's file, or of a run with ``data`` as its tasks.

    Exactly one of them has to be given; otherwise ``config.missing-key`` is raised.
    """
    if (data is None) == (file is None):
        details = {"expected": "either --data or --config", "found": "neither" if data is None else "both"}
        raise ConfigError("the rows have to come from one place", code="config.missing-key", **details)
    if file is not None:
        return load_config(file, overrides)
    return structure(RunConfig, {"model": {"path": ""}, "data": {"train": data}})


def open_source(config: RunConfig, rows: int) -> Source:
    """Read the first rows of a run's training tasks.

    Raise ``config.invalid-value`` unless there is one set of tasks, and what the readers raise.
    """
    given = only_set(config)
    with readers().open_lines(given, rows) as opened:
        form = form_of(opened, given, config)
        opened.seek(0)
        lines = opened.read()
    decode, records = _decoder(), list[Mapping[str, Any]]()
    for line in lines.splitlines():
        if isinstance(record := decode(line), dict):
            records.append(record)
    return Source(config=config, lines=lines, records=records, names=names_of(form))


def only_set(config: RunConfig) -> DataSet:
    """Return the set of training tasks."""
    found = sets_of(config.data.train, "data.train")
    if len(found) != 1:
        raise config.refusal("data.train", "operators pass one set of tasks", "one file or name")
    return found[0]


def form_of(opened: Any, given: DataSet, config: RunConfig) -> TaskFormat:
    """Return the format of the records of a file of JSON lines."""
    known = readers().recognise(readers().first_records(opened), given.format or config.data.format)
    form: TaskFormat = known.resolved()
    return form


def names_of(form: TaskFormat) -> dict[str, str]:
    """Return the names that usual columns have in records of a format."""
    names = {"prompt": form.messages_key or form.prompt_key, "answer": form.answer_key}
    names |= {"response": form.response_key, "rejected": form.rejected_key}
    return {name: column for name, column in names.items() if column}


def stem_of(config: RunConfig) -> str:
    """Return the beginning of the rows' keys."""
    return Path(only_set(config).path).stem


def _decoder() -> Any:
    import msgspec

    decode = msgspec.json.Decoder().decode

    def one(line: bytes) -> Any:
        try:
            return decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    return one
