"""The explorer: tasks to token sequences, ticket by ticket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.errors import AgentError, JackfieldError
from jackfield.queue import GroupSlot, Ticket, TransferQueue
from jackfield.trainer.placement import PlacementLease
from jackfield.trainer.samples import TRAIN, run_seed, sequence_columns, sequence_tags
from jackfield.trainer.schedule import Progress, Schedule
from jackfield.trainer.stages import Stages

__all__ = ["Explorer", "run_agent"]


@attrs.define(kw_only=True, eq=False)
class Explorer:
    """Runs agent loops for the tickets that the schedule lets it start."""

    name: str
    queue: TransferQueue
    schedule: Schedule
    version: Progress  #: of the weights that the replicas serve
    placement: PlacementLease
    clock: Clock
    stages: Stages
    task_for: Callable[[GroupSlot], Task]
    make_agent: Callable[[], AgentLoopBase]
    sampling: Mapping[str, Any]
    groups: int  #: tasks in a ticket
    runs: int  #: agent runs of a task
    seed: int
    run_seconds: float
    batch_seconds: float
    _running: int = attrs.field(default=0, init=False)
    _idle: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    async def run(self, first_ticket: int = 0) -> None:
        """Explore until every ticket of the schedule is complete."""
        async with asyncio.TaskGroup() as tickets:
            for _ in range(first_ticket, self.schedule.steps):
                ticket = self.queue.claim_ticket(TRAIN, explorer=self.name, groups=self.groups)
                await self.version.until(
                    lambda version, number=ticket.number: self.schedule.may_start(number, version),  # type: ignore[misc]
                    self.batch_seconds,
                    f"the trainer's weights, by {self.name} to start batch {ticket.number}",
                )
                self._idle.clear()
                async with self.stages.measure("generate", "explorer", ticket.number):
                    tickets.create_task(self._explore(ticket))
                    # the next batch starts when every run of this one has ended; its rewards may still be pending
                    runs = f"the agent runs of batch {ticket.number}"
                    await self.clock.wait_for(self._idle.wait(), self.batch_seconds, runs)

    async def _explore(self, ticket: Ticket) -> None:
        """Fill the ticket's slots; one that is dropped later, for want of a reward, comes again."""
        async with asyncio.TaskGroup() as groups:
            async for slot in self.queue.slots(ticket, self.batch_seconds):
                self._running += 1
                groups.create_task(self._run_group(slot))

    async def _run_group(self, slot: GroupSlot) -> None:
        try:
            task = self.task_for(slot)
            group = self.queue.open_group(slot, task_id=task.id, runs=self.runs)
            async with self.placement.hold("rollout"):
                await asyncio.gather(*(self._run(slot, group, task, run) for run in range(self.runs)))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _run(self, slot: GroupSlot, group: str, task: Task, run: int) -> None:
        seed = run_seed(self.seed, slot.ticket, slot.index, slot.attempt, run)
        try:
            output = await run_agent(
                self.make_agent(), {**self.sampling, "seed": seed}, task, self.clock, self.run_seconds
            )
        except JackfieldError as error:
            self.queue.fail_run(group, run, reason=f"{error.code}: {error}")
            return
        tags = [sequence_tags(task, sequence, run) for sequence in output.sequences]
        await self.queue.put_run(group, run, sequence_columns(task, output.sequences), tags)


async def run_agent(
    agent: AgentLoopBase, sampling: Mapping[str, Any], task: Task, clock: Clock, seconds: float
) -> AgentLoopOutput:
    """Run an agent loop once, check what it returns, and give every failure a name.

    Raises:
        JackfieldError: the loop's own, ``agent.failed``, ``agent.output`` or ``deadline``.
    """
    try:
        output = await clock.wait_for(
            agent.run(sampling, **task.agent_fields()), seconds, f"the agent loop on task {task.id}"
        )
    except JackfieldError:
        raise
    except Exception as error:
        raise AgentError(f"the agent loop raised {type(error).__name__}: {error}", where=f"task {task.id}") from error
    for sequence in output.sequences:
        _check(sequence, task)
    return output


def _check(sequence: AgentSequence, task: Task) -> None:
    lengths = {
        "response_ids": len(sequence.response_ids),
        "response_mask": len(sequence.response_mask),
        "response_logprobs": len(sequence.response_logprobs),
        "weight_versions": len(sequence.weight_versions),
    }
    if len(set(lengths.values())) != 1 or not sequence.prompt_ids or not sequence.response_ids:
        raise AgentError(
            "an agent loop returned a sequence whose parts do not fit",
            code="agent.output",
            where=f"task {task.id}",
            expected="a prompt, and a response whose ids, mask, log-probs and versions have one length above 0",
            found=f"prompt {len(sequence.prompt_ids)}, {lengths}",
        )
