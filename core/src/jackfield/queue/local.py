"""The queue whose controller lives in this process: what it keeps, and how it gets it back."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.transfer_queue import SnapshotRequest
from jackfield.errors import QueueError
from jackfield.files import replace_file, seal, unseal
from jackfield.queue.archive import write_archive
from jackfield.queue.journal import read_journal, saved_rows
from jackfield.queue.ledger import LedgerEnd
from jackfield.queue.local_consuming import LocalConsuming
from jackfield.queue.local_producing import LocalProducing
from jackfield.queue.meta import Notice
from jackfield.queue.missing import some
from jackfield.queue.snapshot import FORMAT, load_state, state_dict
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.waiting import wait

__all__ = ["STATE_FILE", "VALUES_FOLDER", "LocalQueue", "read_state"]

_EPOCHS = 0xFFFFFFFF  #: that one process gives at most
_MARKS = 8  #: of checkpoints, also of those that were broken off, that a journal remembers

STATE_FILE = "controller.json"
VALUES_FOLDER = "values"


class LocalQueue(LocalProducing, LocalConsuming, TransferQueue):
    """A queue whose controller lives in this process."""

    # -- what is going on

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Every ack, commit, rollback, expiry, retirement, derivation, drop, release and loss, in order, as dicts.

        Empty where they are written to a file.
        """
        return self._state.ledger

    async def drain_failures(self) -> dict[str, str]:
        """See :meth:`~jackfield.queue.TransferQueue.drain_failures`."""
        failures, self._state.failures = self._state.failures, {}
        return failures

    async def stats(self) -> dict[str, int]:
        """See :meth:`~jackfield.queue.TransferQueue.stats`."""
        state = self._state
        return {
            "rows": state.row_count,
            "bytes": state.byte_count,
            "tickets": sum(len(partition.tickets) for partition in state.partitions.values()),
            "groups_open": sum(group.state == "open" for group in state.groups.values()),
            "rows_leased": sum(len(consumer.leased) for consumer in state.consumers.values()),
        }

    async def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.post`."""
        self._check()
        self._state.post(topic, value)

    async def wait_notice(self, topic: str, after: int, deadline_seconds: float) -> Notice:
        """See :meth:`~jackfield.queue.TransferQueue.wait_notice`."""
        until = self.clock.time() + deadline_seconds
        while (notice := self._state.notices.get(topic)) is None or notice.number <= after:
            self._check()
            await wait(self.clock, self._state.noticed.next(), until, lambda: f"somebody to post {topic!r}")
        return notice

    # -- keeping

    def state_dict(self) -> dict[str, Any]:
        """The controller's state as plain JSON values: published groups, acks, tickets. Values are the backend's.

        Leased rows are saved as ready, open groups as slots to fill again.
        """
        return state_dict(self._controller)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replace everything by what :meth:`state_dict` returned. Consumers that are registered keep their columns."""
        load_state(self._controller, saved)

    async def checkpoint(self, folder: str | Path, again_from: Mapping[str, int] | None = None) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.checkpoint`."""
        self._check()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        async with self._deleting:
            text = await self._cut(folder, again_from or {})
        replace_file(folder / STATE_FILE, seal(text))
        for kept in (self._journal, self._ledger):
            if kept is not None:
                kept.sync()

    def _begin_journal(self, text: str | None = None) -> None:
        """Let the journal begin with the state as it is now."""
        if self._journal is not None:
            self._state.changes.entries.clear()
            self._state.changes.slots.clear()
            self._journal.begin(self._state_text({}) if text is None else text)

    def _state_text(self, again_from: Mapping[str, int], **more: Any) -> str:
        """The state, and the marks of the checkpoints after which it came: a journal goes on from no other."""
        state = {**state_dict(self._controller, again_from), "marks": self._marks, **more}
        return json.dumps(state, ensure_ascii=False, separators=(",", ":"))

    async def _cut(self, folder: Path, again_from: Mapping[str, int]) -> str:
        """Write values, and note the controller's state of the moment at which they are cut; without lost rows."""
        while True:
            await self.fail_lost()
            mark = uuid.uuid4().hex
            self._marks = [*self._marks[1 - _MARKS :], mark]
            more = {"mark": mark, "ledger": None if self._ledger is None else attrs.asdict(self._ledger.end)}
            text = self._state_text({} if self._journal is not None else again_from, **more)
            self._begin_journal(text)
            try:
                await self.backend.checkpoint(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
            except QueueError as error:
                if error.code != "queue.lost":
                    raise
                named = [str(key) for key in error.found] if isinstance(error.found, list | tuple) else []
                await self.fail_lost(named=named)
                if any(key in self._state.rows for key in named):
                    raise  # somebody works with them
                await self._forget()  # the rest makes the next attempt
            return text

    async def clear(self, folder: str | Path) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.clear`."""
        self._check()
        if self._ledger is not None:
            self._ledger.clear()
        async with self._deleting:
            self._state.discarded.clear()
            if (found := await self.backend.stats()).samples:
                write_archive(Path(folder), ())
                try:
                    await self.backend.restore(SnapshotRequest(folder=str(folder)))
                except QueueError as error:
                    raise QueueError(
                        "the queue's backend holds rows of an earlier run, and cannot forget them",
                        code="queue.store",
                        expected="no rows where a run begins anew",
                        found=f"{found.samples} rows, {found.bytes} bytes",
                        fix="remove them with the store's own tools, or give this run another folder",
                    ) from error
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
            if found.samples or any(partition.next_ticket for partition in self._state.partitions.values()):
                self._state.record("clear", rows=found.samples)
            consumers = self.state_dict()["consumers"]
            empty = {"consumers": consumers, "partitions": {}, "discarded": {}, "lineage": {}, "committed": None}
            self.load_state_dict({**empty, "format": FORMAT})
            self._marks = []
            self._begin_journal()

    async def restore(self, folder: str | Path, step: int | None = None) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.restore`."""
        self._check()
        saved = self._saved_state(folder)
        async with self._deleting:
            self._state.discarded.clear()
            await self.backend.restore(SnapshotRequest(folder=str(Path(folder) / VALUES_FOLDER)))
            self._roll_ledger_back(saved, step)
            self.load_state_dict(saved)
            self._marks = [saved["mark"]]
            if step is not None:
                self._controller.consume(self._leases.commit(step))
            self._begin_journal()
        await self._delete_now()  # before a group is made again whose rows have the same keys

    def _roll_ledger_back(self, checkpoint: Mapping[str, Any], step: int | None, kept: Sequence[str] = ()) -> None:
        """Say which acks the state that is restored does not have."""
        if self._ledger is not None and checkpoint["ledger"] is not None:
            self._ledger.roll_back(LedgerEnd(**checkpoint["ledger"]), step, kept=kept)

    def _saved_state(self, folder: str | Path) -> dict[str, Any]:
        """What a checkpoint has of the controller; the ledger is the one that it knows."""
        saved = read_state(Path(folder))
        if self._ledger is not None and saved["ledger"] is not None:
            self._ledger.verify(LedgerEnd(**saved["ledger"]))
        return saved

    async def recover(self, folder: str | Path, step: int, *, kept: Sequence[str] = ()) -> bool:
        """See :meth:`~jackfield.queue.TransferQueue.recover`."""
        self._check()
        checkpoint = self._saved_state(folder)
        lives = checkpoint["mark"] in self._marks  # it was the trainer that died, not this process
        saved = self._known(checkpoint, step, lives=lives)
        if saved is None:
            return False
        async with self._deleting:
            if not lives:
                self._state.discarded.clear()
                self.load_state_dict(saved)
                self._marks = saved["marks"]
            lost = await self._lost()
            if lost & {row["key"] for row in saved_rows(checkpoint)}:
                self._say_made_again(checkpoint, lost)
                return False
            self.went_on = lives
            if lives:
                self._leases.end_all()
                for name, consumer in checkpoint["consumers"].items():
                    self._state.consumers[name].sampler.load_state_dict(consumer["sampler"])
            self._roll_ledger_back(checkpoint, step, kept)
            for name, living in self._state.consumers.items():
                if name not in kept:
                    self._leases.take_back(living, step)
            self._controller.consume(self._leases.commit(step))
            if not lives:
                self._controller.offer_unfinished()
            self._begin_journal()
        if lost:
            await self.fail_lost()
        await self._delete_now()  # as after a restore
        return True

    def _say_made_again(self, checkpoint: Mapping[str, Any], lost: Collection[str]) -> None:
        """The queue goes back to a checkpoint: name what is gone, and what was made since."""
        known = {row["key"] for row in saved_rows(checkpoint)}
        groups = sorted({row.group.id for row in self._state.rows.values() if row.key not in known})
        logging.getLogger("jackfield").warning(
            "%d rows are gone from the queue's store (%s): the queue goes on with the rows of its checkpoint, and what "
            "was made since is made again: %s",
            *(len(lost), some(sorted(lost)), f"groups {some(groups)}" if groups else "nothing"),
        )

    def _known(self, checkpoint: Mapping[str, Any], step: int, *, lives: bool) -> dict[str, Any] | None:
        """The newest state, where it came after ``checkpoint`` and can go back to ``step``."""
        if lives:
            saved: dict[str, Any] | None = {"committed": self._state.committed}
        else:
            saved = None if self._journal is None else read_journal(self._journal.path)
            if saved is None or checkpoint["mark"] not in saved["marks"]:
                return None  # another run, or the same one without a journal, was here meanwhile
            for name, consumer in saved["consumers"].items():
                consumer["epoch"] = (consumer["epoch"] | _EPOCHS) + 1  # later ones than the dead process may have given
                consumer["sampler"] = checkpoint["consumers"].get(name, consumer)["sampler"]
        assert saved is not None
        return None if saved["committed"] is not None and saved["committed"] > step else saved

    async def flush(self) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.flush`."""
        self._check()
        await self._delete_now()


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint in ``folder`` has of the controller.

    Raises:
        QueueError: ``queue.invalid`` where there is none, or it is damaged or of another format.
    """
    file = folder / STATE_FILE
    if not file.is_file():
        raise QueueError("the folder holds no checkpoint of a queue", where=str(folder), expected=STATE_FILE)
    try:
        content = file.read_bytes()
        saved = unseal(content)
    except (OSError, ValueError) as error:
        raise QueueError(
            "a queue's checkpoint is damaged", where=str(file), expected="JSON with its digest", found=error
        ) from error
    if saved.get("format") != FORMAT:
        raise QueueError(
            "the queue's state has another format", where=str(file), expected=FORMAT, found=saved.get("format")
        )
    return saved
