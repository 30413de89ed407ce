"""The rows that operators make of experiences in a run, in a file that later runs can train on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from jackfield.abc.operator import Operator
from jackfield.config import RunConfig
from jackfield.files import replace_file
from jackfield_pipelines.row_sets import KEY

OPERATORS = "operators.json"  #: in the folder `made` of a run

_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode


@attrs.frozen(kw_only=True)
class MadeRow:
    """A row that an operator made of experiences."""

    key: str
    operator: str
    version: str = ""  #: of the operator's distribution
    settings: Mapping[str, Any] = attrs.field(factory=dict)  #: of the operator
    parents: tuple[str, ...]  #: keys of the samples that it was made from
    values: Mapping[str, Any]
    answers: bool = True  #: whether the operator gave it a response of its own, and not the parent's alone


def makes_samples(operator: Operator) -> bool:
    """Return whether an operator declares that it makes samples: rows with a response, which are no pairs."""
    return operator.type == "synthesizer" and "response" in operator.writes and "rejected" not in operator.writes


def record_operators(run: Path, operators: Sequence[Mapping[str, Any]]) -> None:
    """Write which operators shape the experiences of a run, for its lineage."""
    folder = run / "made"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / OPERATORS, _encode(operators))


class MadeRows:
    """A file with one JSON line for each row, which has its key once, also after a restart that makes it again."""

    def __init__(self, file: Path, warns: bool = False) -> None:
        self.file, self._warns = file, warns
        self._keys: set[str] | None = None
        self._named = set[str]()  # operators of which it was said that their samples are not trained on

    @classmethod
    def of_run(cls, config: RunConfig, worker: int) -> MadeRows:
        """Return the file of one of a run's reward workers; the first one says what is not trained on."""
        warns = config.mixing.made is None and worker == 0
        return cls(Path(config.folder, "made", f"worker-{worker}.jsonl"), warns)

    def warn(self, operators: Iterable[str]) -> None:
        """Say once of each operator that makes samples that the run does not train on them, if that is so."""
        for name in operators if self._warns else ():
            if name not in self._named:
                self._named.add(name)
                fix = (
                    "set mixing.made, for example {ratio: 0.5}, and an algorithm with an expert, such as mix; or leave"
                )
                text = "the samples that %s makes are not trained on, and go to %s alone; %s out the operator"
                logging.getLogger("jackfield").warning(f"{text} [data.pipeline.experiences]", name, self.file, fix)

    def write(self, rows: Sequence[MadeRow], batch: int) -> None:
        """Append rows that the file does not have.

        A line has the columns, ``_row``, ``parents``, and ``operator``, ``version`` and ``settings`` of what made it.
        """
        if self._keys is None:
            self._keys = self._read()
        new = [row for row in rows if row.key not in self._keys]
        self.warn(row.operator for row in new if row.answers and isinstance(row.values.get("response"), str))
        lines = [
            {
                **row.values,
                KEY: row.key,
                **{name: getattr(row, name) for name in ("parents", "operator", "version", "settings")},
                "batch": batch,
            }
            for row in new
        ]
        with self.file.open("ab") as file:
            file.write(b"".join(_encode(line) + b"\n" for line in lines))
        self._keys.update(row.key for row in new)

    def _read(self) -> set[str]:
        """Return the keys in the file, and cut off a line that was not written to its end."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()
        whole, keys = 0, set[str]()
        with self.file.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                keys.add(_decode(line)[KEY])
                whole += len(line)
        with self.file.open("r+b") as file:
            file.truncate(whole)
        return keys
