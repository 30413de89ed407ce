"""A queue's checkpoint as people read it: rows with tags, columns and who has used them. Nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.queue.archive import read_archive
from jackfield.queue.cells import Cell
from jackfield.queue.ledger import read_ledger
from jackfield.queue.lineage import Lineage
from jackfield.queue.local import VALUES_FOLDER, read_state
from jackfield.queue.row_files import StoredRow

__all__ = ["Ancestor", "plain_values", "saved_rows", "trace"]


def saved_rows(folder: Path) -> Iterator[StoredRow]:
    """The rows that :meth:`~jackfield.queue.TransferQueue.checkpoint` wrote to ``folder``.

    Raises:
        QueueError: ``queue.invalid`` where there is no whole checkpoint, or one of another format.
    """
    known = _known(folder)
    for row in read_archive(folder / VALUES_FOLDER):
        found = known.get((row.partition, row.key), {})
        yield StoredRow(
            partition=row.partition,
            key=row.key,
            ticket=found.get("ticket"),
            group=found.get("group"),
            task=found.get("task"),
            tags=found.get("tags", {}),
            acked_by=tuple(sorted(found.get("acks", ()))),
            cells=row.cells,
        )


def plain_values(cell: Cell) -> Any:
    """A cell as JSON values: what a JSON column holds, or lists of numbers; complex numbers as texts."""
    if cell.kind == "json":
        return json.loads(bytes(cell.content))
    values = cell.tensor()
    if values.is_complex():
        return [str(number) for number in values.reshape(-1).tolist()]
    return (values.double() if values.is_floating_point() else values).tolist()


@attrs.frozen(kw_only=True, eq=False)
class Ancestor:
    """A row and what it was made of."""

    key: str
    operation: str | None  #: that made it; None: it was not made of other rows, or nobody knows
    parents: tuple[Ancestor, ...]
    in_queue: bool


def trace(key: str, checkpoint: Path | None, ledger: Path | None) -> Ancestor:
    """The rows that a row was made of, and those that they were made of.

    Args:
        key: of the row, which need not be in the queue any more.
        checkpoint: of the queue: rows that were there, and their ancestors.
        ledger: of the run (``ledger.jsonl``): every derivation there ever was.

    Raises:
        QueueError: ``queue.unknown-sample``: neither knows the row; ``queue.ledger``, ``queue.invalid``: damage.
    """
    derived: dict[str, Lineage] = {}
    living: set[str] = set()
    if ledger is not None and ledger.is_file():
        for entry in read_ledger(ledger):
            if entry["event"] == "derive":
                derived[entry["key"]] = Lineage(entry["operation"], tuple(entry["parents"]))
    if checkpoint is not None:
        state = read_state(checkpoint)
        derived |= {name: Lineage(operation, tuple(parents)) for name, (operation, parents) in state["lineage"].items()}
        for _, row_key in _known(checkpoint):
            living.add(row_key)
    if key not in derived and key not in living and not any(key in made.parents for made in derived.values()):
        where = ", ".join(str(each) for each in (checkpoint, ledger) if each is not None)
        raise QueueError(f"nobody knows a row {key!r}", code="queue.unknown-sample", where=where)
    return _ancestor(key, derived, living, frozenset())


def _ancestor(key: str, derived: Mapping[str, Lineage], living: set[str], below: frozenset[str]) -> Ancestor:
    made = derived.get(key)
    parents = () if made is None or key in below else made.parents  # an imported row may have the key of its own parent
    return Ancestor(
        key=key,
        operation=None if made is None else made.operation,
        parents=tuple(_ancestor(parent, derived, living, below | {key}) for parent in parents),
        in_queue=key in living,
    )


def _known(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What the controller knew of each row."""
    found = {}
    for partition, saved in read_state(folder)["partitions"].items():
        for ticket in saved["tickets"]:
            for group in filter(None, (slot["group"] for slot in ticket["slots"])):
                for row in group["rows"]:
                    found[partition, row["key"]] = {
                        "ticket": ticket["number"],
                        "group": group["id"],
                        "task": group["task_id"],
                        "tags": {**group["tags"], **row["tags"]},
                        "acks": list(row["acks"]),
                    }
    return found
