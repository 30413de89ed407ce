"""The offline producer: the data's own answers as training samples, through the same tickets and queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from jackfield.data.tasks import Task
from jackfield.queue import GroupSlot, TransferQueue
from jackfield.trainer.samples import TRAIN, supervised_columns, supervised_tags
from jackfield.trainer.schedule import Progress, Schedule

__all__ = ["OfflineProducer"]

_AHEAD = 2  #: tickets that are prepared before the trainer asks for them


@attrs.define(kw_only=True, eq=False)
class OfflineProducer:
    """Fills tickets with (prompt, answer) rows, a little ahead of the trainer."""

    queue: TransferQueue
    schedule: Schedule
    steps_done: Progress
    task_for: Callable[[GroupSlot], Task]
    encode: Callable[[Task], tuple[Sequence[int], Sequence[int]]]  #: prompt and response token ids
    groups: int
    batch_seconds: float

    async def run(self, first_ticket: int = 0) -> None:
        """Produce until every ticket of the schedule is complete."""
        for _ in range(first_ticket, self.schedule.steps):
            ticket = self.queue.claim_ticket(TRAIN, explorer="offline", groups=self.groups)
            await self.steps_done.until(
                lambda done, number=ticket.number: number < done + _AHEAD,  # type: ignore[misc]
                self.batch_seconds,
                f"the trainer, to take batch {ticket.number - _AHEAD}",
            )
            async for slot in self.queue.slots(ticket, self.batch_seconds):
                task = self.task_for(slot)
                prompt_ids, response_ids = self.encode(task)
                group = self.queue.open_group(slot, task_id=task.id, runs=1)
                tags = supervised_tags(task, prompt_ids, response_ids)
                await self.queue.put_run(group, 0, supervised_columns(prompt_ids, response_ids), [tags])
