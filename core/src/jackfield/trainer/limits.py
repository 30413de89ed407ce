"""The end of a run before ``schedule.steps``: collected samples are used up, or a limit of ``schedule.until``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.errors import DataError
from jackfield.runtime.samples import TRAIN
from jackfield.trainer.role import Role


@attrs.define(kw_only=True, eq=False)
class Limits:
    """Counts what the run has used, over all its starts, and ends its schedule when a limit is reached."""

    role: Role
    used: dict[str, float] = attrs.field(factory=dict)  #: by limit; in mode train also the number of steps

    async def begin(self) -> None:
        """In mode train, let the schedule end when the samples in the queue have been used up.

        Groups that fill no batch at the end are left out. Too few groups for one batch are refused (``data.empty``).
        """
        config, schedule = self.role.config, self.role.schedule
        if config.mode != "train":
            return
        groups = (await self.role.queue.stats()).get(f"groups_of/{TRAIN}", 0)
        steps, rest = divmod(groups * config.data.epochs, config.data.groups_per_batch)
        if not steps:
            what, expected = "too few groups of samples", f"{config.data.groups_per_batch} (data.groups_per_batch)"
            raise DataError(what, code="data.empty", where=config.data.samples, expected=expected, found=groups)
        self.restore({"steps": float(min(steps, schedule.steps))})
        if rest and steps < schedule.steps:
            logging.getLogger("jackfield").info("%d groups fill no batch and are left out", rest)

    def restore(self, used: Mapping[str, float]) -> None:
        """Continue with what a checkpoint's run had used."""
        self.used = dict(used)
        if "steps" in used:
            self._end(min(int(used["steps"]), self.role.config.schedule.steps))

    def count(self, steps_done: int, tags: list[Mapping[str, Any]], seconds: float) -> None:
        """Add a step's samples and time."""
        workers, replicas = self.role.workers, self.role.workers.replicas
        ranks = max((len(ranks) for ranks in workers.ranks.values()), default=0)
        places = max(ranks, replicas) if workers.shares_devices else ranks + replicas
        tokens = float(sum(each["response_tokens"] for each in tags))
        found = {"samples": float(len(tags)), "tokens": tokens, "seconds": seconds, "device_seconds": seconds * places}
        self.used |= {name: self.used.get(name, 0.0) + value for name, value in found.items()}
        self.check(steps_done, self.used)

    def check(self, steps_done: int, found: Mapping[str, float]) -> None:
        """End the schedule with this step if one of these values has reached its limit."""
        for name, limit in attrs.asdict(self.role.config.schedule.until).items():
            if limit is not None and found.get(name, -float("inf")) >= limit and steps_done < self.role.schedule.steps:
                what = "schedule.until.%s: %g reached %g, the run ends with step %d"
                logging.getLogger("jackfield").info(what, name, found[name], limit, steps_done)
                self._end(steps_done)

    def _end(self, steps: int) -> None:
        self.role.schedule = attrs.evolve(self.role.schedule, steps=steps)
