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
from jackfield.queue.snapshot import FORMAT
from jackfield.queue.transfer_queue import STATE_FILE, VALUES_FOLDER

__all__ = ["SavedRow", "plain_values", "saved_rows"]


@attrs.frozen(kw_only=True, eq=False)
class SavedRow:
    """One row of a checkpoint."""

    partition: str
    key: str
    ticket: int | None  #: None: nobody knows the row any more, it waited to be deleted
    group: str | None
    task: str | None
    tags: Mapping[str, Any]
    acked_by: tuple[str, ...]  #: consumers that are done with it
    cells: Mapping[str, Cell]  #: by column

    @property
    def bytes(self) -> int:
        """Of values."""
        return sum(len(cell.content) for cell in self.cells.values())


def saved_rows(folder: Path) -> Iterator[SavedRow]:
    """The rows that :meth:`~jackfield.queue.TransferQueue.checkpoint` wrote to ``folder``.

    Raises:
        QueueError: ``queue.invalid`` where there is no whole checkpoint, or one of another format.
    """
    known = _known(folder)
    for row in read_archive(folder / VALUES_FOLDER):
        found = known.get((row.partition, row.key), {})
        yield SavedRow(
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


def _known(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What the controller knew of each row."""
    file = folder / STATE_FILE
    if not file.is_file():
        raise QueueError("the folder holds no checkpoint of a queue", where=str(folder), expected=STATE_FILE)
    state = json.loads(file.read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise QueueError("the queue's state has another format", expected=FORMAT, found=state.get("format"))
    found = {}
    for partition, saved in state["partitions"].items():
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
