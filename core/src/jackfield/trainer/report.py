"""What hooks receive at the end of a step: metrics, samples that failed, samples for the table."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from jackfield.plugins.hooks import SampleRecord, SamplesFailed, SamplesRecorded, StepEnded
from jackfield.queue import BatchMeta
from jackfield.runtime.samples import TRAIN, oldest_version, said_metrics
from jackfield.runtime.workers import resubmitted, suppress_lost
from jackfield.trainer.role import Role


@attrs.define(kw_only=True, eq=False)
class StepReport:
    """Reports each step to the hooks."""

    role: Role
    mixes: bool = False  #: whether batches have groups beside the step's own

    async def step_ended(self, step: int, batch: BatchMeta, metrics: Mapping[str, float], started: float) -> None:
        """Report the step with what its stages have found (``metrics``)."""
        hooks, all_metrics = self.role.hooks, {**metrics, **self._measured(step, batch, started)}
        hooks.step_ended(event=StepEnded(step=step + 1, metrics=all_metrics))
        failed = await self.role.queue.drain_failures()
        if failed:
            hooks.samples_failed(event=SamplesFailed(step=step + 1, reasons=failed))
        if shown := self.role.config.observe.samples_per_step:
            chosen = batch.select(batch.by_partition()[TRAIN][:shown])
            with suppress_lost():
                samples = await resubmitted(lambda: self._read(chosen), "a table of samples")
                hooks.samples_recorded(event=SamplesRecorded(step=step + 1, partition=TRAIN, samples=samples))

    def _measured(self, step: int, batch: BatchMeta, started: float) -> dict[str, float]:
        seconds = self.role.clock.time() - started
        lengths = [tags["response_tokens"] for tags in batch.tags]
        return {
            "samples": float(len(batch)),
            "response_tokens/mean": sum(lengths) / len(batch),
            "response_tokens/max": float(max(lengths)),
            "samples_per_second": len(batch) / max(seconds, 1e-9),
            "seconds/step": seconds,
            **said_metrics(batch.tags),
            **self.role.stages.drain(),
            **(self._exploration(step, batch) if self.role.schedule.explores else {}),
            **(_shares(step, batch) if self.mixes else {}),
        }

    def _exploration(self, step: int, batch: BatchMeta) -> dict[str, float]:
        attempts = {group: tags["retry"] for group, tags in zip(batch.groups, batch.tags, strict=True)}
        return {
            "staleness/max": float(step - oldest_version(batch.tags)),
            "groups/retries": float(sum(attempts.values())),
        }

    async def _read(self, shown: BatchMeta) -> tuple[SampleRecord, ...]:
        agent, rewarded = self.role.workers.agents.of(shown.keys[0]), self.role.schedule.explores
        reading = agent.records(TRAIN, shown.keys, shown.tags, with_reward=rewarded)
        who = f"an agent worker to read {len(shown)} samples, {shown.keys[0]} first"
        return await self.role.clock.wait_for(reading, self.role.config.deadlines.batch, who)


def _shares(step: int, batch: BatchMeta) -> dict[str, float]:
    """How many samples are not of this step's own groups, by where they come from."""
    counts: dict[str, float] = {}
    for lease, tags in zip(batch.leases, batch.tags, strict=True):
        if lease.partition != TRAIN or tags["batch"] != step:
            name = f"samples/{'replayed' if lease.partition == TRAIN else lease.partition}"
            counts[name] = counts.get(name, 0.0) + 1.0
    return counts
