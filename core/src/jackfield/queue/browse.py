"""Read a queue's checkpoint: samples with tags, columns and the consumers that have used them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import QueueError
from jackfield.queue.checkpoints import VALUES_FOLDER
from jackfield.queue.meta import Lineage
from jackfield.queue.restoring import Checkpoint
from jackfield.queue.store import STORE_FILE, read_lineage
from jackfield.sdk.archive import read_archive
from jackfield.sdk.arrow import SavedSample
from jackfield.sdk.cells import Cell, join
from jackfield.sdk.columns import rows_of


def saved_samples(folder: Path) -> Iterator[SavedSample]:
    """Read the samples that :meth:`~jackfield.queue.TransferQueue.checkpoint` wrote to ``folder``.

    Raises:
        QueueError: ``queue.invalid`` where there is no whole checkpoint, or one of another format.
    """
    state = Checkpoint.read(folder / STORE_FILE).state(Clock())
    for sample in read_archive(folder / VALUES_FOLDER):
        found = state.sample(sample.key) if state.knows(sample.key) else None
        if found is None:
            yield attrs.evolve(sample, tags={})  # it waited to be deleted
            continue
        group, known = found
        yield attrs.evolve(
            sample,
            batch=group.key.batch,
            group=str(group.key),
            task=group.task_id,
            tags={**group.tags, **known.tags},
            acked_by=tuple(sorted(name for name, use in group.uses.items() if use.is_made())),
        )


def plain_values(cell: Cell) -> Any:
    """Return a cell as JSON values: what a JSON column holds, or lists of numbers; complex numbers as texts."""
    values = rows_of(join("", [cell]))[0]
    if not hasattr(values, "is_complex"):
        return values
    if values.is_complex():
        return [str(number) for number in values.reshape(-1).tolist()]
    return (values.double() if values.is_floating_point() else values).tolist()


@attrs.frozen(kw_only=True, eq=False)
class Ancestor:
    """A sample and what it was made of."""

    key: str
    operation: str | None  #: that made it; None: it was not made of other samples, or that is unknown
    parents: tuple[Ancestor, ...]
    in_queue: bool


def trace(key: str, checkpoint: Path | None, store: Path | None) -> Ancestor:
    """Find the samples that a sample was made of, and those that they were made of.

    Args:
        key: of the sample, which need not be in the queue any more.
        checkpoint: of the queue: samples that were there, and their ancestors.
        store: file of the run's queue: every derivation there ever was.

    Raises:
        QueueError: ``queue.unknown-sample``: neither knows the sample; ``queue.ledger``, ``queue.invalid``: damage.
    """
    derived: dict[str, Lineage] = {} if store is None else read_lineage(store)
    living: set[str] = set()
    if checkpoint is not None:
        saved = Checkpoint.read(checkpoint / STORE_FILE)
        derived |= saved.lineage
        living = saved.keys(Clock())
    if key not in derived and key not in living and not any(key in made.parents for made in derived.values()):
        where = ", ".join(str(each) for each in (checkpoint, store) if each is not None)
        raise QueueError(f"the sample {key!r} is unknown", code="queue.unknown-sample", where=where)
    return _ancestor(key, derived, living, frozenset())


def _ancestor(key: str, derived: Mapping[str, Lineage], living: set[str], below: frozenset[str]) -> Ancestor:
    made = derived.get(key)
    parents = () if made is None or key in below else made.parents  # an imported sample may have its own parent's key
    return Ancestor(
        key=key,
        operation=None if made is None else made.operation,
        parents=tuple(_ancestor(parent, derived, living, below | {key}) for parent in parents),
        in_queue=key in living,
    )
