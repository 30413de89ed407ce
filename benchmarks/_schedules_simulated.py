"""A simulated run of a workload under a plan: the real schedule, queue, explorer, rewards and trainer, virtual time."""

from __future__ import annotations

from typing import Any

import attrs
from _schedules_bound import Plan, Workload
from _schedules_plugins import RolloutDevice
from _schedules_real import settings

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import StepEnded
from jackfield.simulation import Simulation, SimulationSettings

_DEADLINE = 1e5


@attrs.define(eq=False)
class TimedRun(Simulation):
    """A simulation whose stages take the times of a workload, in its own seconds."""

    work: Workload = attrs.field(kw_only=True)
    device: RolloutDevice = attrs.field(init=False)
    ends: list[float] = attrs.field(factory=list)  #: of the steps

    def __attrs_post_init__(self) -> None:
        self.device = RolloutDevice(self.clock, self.work)

    async def take(self, stage: str, seconds: float, batch: int, group: int = 0, rollout: int = 0) -> None:
        """Take the time of a stage in the workload, in the place of a drawn one."""
        work = self.work
        if stage == "generate":
            await self.device.generate(slow=work.tail > 0 and group == work.groups - 1)
        elif stage == "sync":
            await self.device.sync()
        elif stage == "reward":
            await self.clock.sleep(work.reward_seconds(batch, group, rollout))
        else:
            times = {"log_probs": work.log_probs, "update": work.update / work.mini_batches}
            await self.clock.sleep(times.get(stage, 0.0))

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        """Record a step and its end."""
        super().step_ended(event)
        self.ends.append(self.clock.now)


def simulate(work: Workload, plan: Plan, window: tuple[int, int]) -> float:
    """Return the seconds per step between the ends of two steps of a longer run."""
    first, last = window
    names = ("batch", "rollout", "reward", "engine", "sync")
    run: dict[str, Any] = settings(work, plan, last + plan.bound + 2) | {"deadlines": dict.fromkeys(names, _DEADLINE)}
    algorithm = ResolvedAlgorithm(
        loss=plan.algorithm if plan.algorithm != "grpo" else "ppo",
        advantages="grpo",
        recompute_old_log_probs=work.log_probs > 0,
    )
    timed = TimedRun(
        SimulationSettings(run=run, shared=work.shared, workers=1, deadline=_DEADLINE, algorithm=algorithm), work=work
    )
    timed.run()
    return (timed.ends[last - 1] - timed.ends[first - 1]) / (last - first)
