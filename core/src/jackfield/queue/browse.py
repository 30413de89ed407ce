"""Read a queue's checkpoint: samples with tags, columns and the consumers that have used them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from jackfield.errors import QueueError
from jackfield.queue.meta import Lineage, group_of
from jackfield.queue.store import STORE_FILE, read_checkpoint, read_lineage
from jackfield.queue.transfer_queue import VALUES_FOLDER
from jackfield.sdk.archive import read_archive
from jackfield.sdk.arrow import SavedSample


def saved_samples(folder: Path) -> Iterator[SavedSample]:
    """Read the samples that :meth:`~jackfield.queue.TransferQueue.checkpoint` wrote to ``folder``.

    Raises:
        QueueError: ``queue.invalid`` where there is no whole checkpoint, or one of another format.
    """
    state = read_checkpoint(folder / STORE_FILE).state()
    for sample in read_archive(folder / VALUES_FOLDER):
        group = state.groups.get(group_of(sample.key))
        if group is None or sample.key not in group.samples:
            yield attrs.evolve(sample, tags={})  # it waited to be deleted
            continue
        yield attrs.evolve(
            sample,
            batch=group.key.batch,
            group=group.name,
            task=group.task_id,
            tags={**group.tags, **group.samples[sample.key].tags},
            acked_by=tuple(sorted(group.uses)),
        )


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
        saved = read_checkpoint(checkpoint / STORE_FILE)
        derived |= saved.lineage
        living = saved.state().keys()
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
